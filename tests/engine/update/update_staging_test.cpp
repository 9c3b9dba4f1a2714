// Optimizer steps whose states lie partly beside a GPU, on a device that does everything as late as it may.
#include "engine/update/update_staging.h"

#include <gtest/gtest.h>

#include <cstring>

#include "engine/update/optimizer.h"
#include "nn/layers.h"
#include "sharding/sharded_model.h"
#include "support/gpu/lazy_kernels.h"

namespace sherd::engine {
namespace {

using device::Tier;
using sharding::MasterForm;
using sherd::testing::LazyCudaDevice;
using sherd::testing::LazyKernels;
using tensor::Tensor;

struct StagingCase {
  const char* name;
  DType compute;
  bool split;
  Tier gradients, parameters;
};
void PrintTo(const StagingCase& c, std::ostream* out) {
  *out << c.name;
}

std::string bytes_of(const Tensor& x) {
  return {reinterpret_cast<const char*>(x.raw()), x.bytes()};
}

/// Two steps on `kernels`' device; everything that they changed, as bytes.
std::string trained(const StagingCase& c, tensor::Kernels& kernels, tensor::Kernels& cpu) {
  std::string out;
  comm::run_local(1, comm::CommOptions{}, [&](comm::Communicator& group) {
    device::Device& device = kernels.device();
    sharding::ShardingOptions options;
    options.placements = sharding::make_placements(3, c.compute, c.compute, DType::f32, c.split);
    options.placements.masters.tier = options.placements.moments.tier = Tier::host;
    options.placements.gradients.tier = c.gradients;
    options.placements.parameters.tier = c.parameters;
    options.rules = {{{{"exp_avg"}, {"exp_avg_sq"}}}};
    sharding::ShardedModel model(std::make_shared<nn::Linear>(200, 257), options,
                                 {group, kernels, nullptr, nullptr});
    config::Optimizer adam;
    adam.lr = 0.01;
    Optimizer optimizer(adam, 7);
    std::unique_ptr<UpdateStaging> staging;
    if (device.accelerator()) staging = std::make_unique<UpdateStaging>(*device.accelerator(), 4096);
    for (int step = 0; step < 2; ++step) {
      optimizer.begin_step();
      for (sharding::Segment* segment : model.trainable_segments()) {
        RuleUpdate& update = optimizer.update_of(*segment);
        const std::int64_t begin = segment->update_begin(), end = segment->update_end();
        Tensor noise = Tensor::empty(device, {end - begin}, DType::f32);
        kernels.fill_normal(noise, {3, static_cast<std::uint64_t>(step)}, 0, 0, 1);
        kernels.copy(noise, segment->gradients().tensor());
        UpdateView view{};
        view.segment = segment, view.begin = begin;
        view.parameters = segment->parameters().range(begin, end);
        view.gradients = segment->gradients().range(begin, end);
        if (segment->masters()) view.masters = segment->masters().range(begin, end);
        for (const auto& moment : segment->moments()) view.moments.push_back(moment.range(begin, end));
        if (staging) {
          ASSERT_TRUE(UpdateStaging::by_processor(*segment));
          const std::uint64_t held = device.ledger().current(Tier::host);
          device.ledger().reset_peaks();
          staging->announce(view, device::as_cuda(device).compute_stream().record());
          ASSERT_TRUE(staging->run([&](const UpdateView& part) {
            return update.pass(optim::Phase::elementwise, part, 0.5, cpu);
          }));
          staging->join();
          const std::uint64_t taken = device.ledger().peak(Tier::host) - held;
          if (segment == model.trainable_segments().back()) staging->end_series();
          const std::uint64_t left = device.ledger().current(Tier::host);
          device.ledger().reset_peaks();
          UpdateStaging::charge(device, view, 4096);
          EXPECT_EQ(device.ledger().peak(Tier::host) - left, taken) << "what a dry run charges for it";
          EXPECT_GT(taken, 0u);
        } else {
          ASSERT_TRUE(update.pass(optim::Phase::elementwise, view, 0.5, kernels));
        }
        // As the next forward does: read in the compute stream's order.
        out += bytes_of(tensor::to_host(device, view.parameters)) + bytes_of(view.moments[0]) +
               bytes_of(view.moments[1]);
        Tensor weights = Tensor::on_host(device, {end - begin}, DType::f32);
        segment->read_masters(begin, weights);
        out += bytes_of(weights);
      }
    }
  });
  return out;
}

class UpdateStagingTest : public ::testing::TestWithParam<StagingCase> {};

TEST_P(UpdateStagingTest, gives_the_bits_of_an_update_on_the_processor) {
  const auto cpu = device::make_cpu_device(2);
  const auto cpu_kernels = tensor::make_kernels(*cpu);
  LazyCudaDevice gpu;
  LazyKernels gpu_kernels(gpu);
  const std::string expected = trained(GetParam(), *cpu_kernels, *cpu_kernels);
  ASSERT_GT(expected.size(), std::size_t{1} << 20);
  EXPECT_TRUE(trained(GetParam(), gpu_kernels, *cpu_kernels) == expected);
  EXPECT_EQ(gpu.ledger().current(Tier::host), 0u);
}

INSTANTIATE_TEST_SUITE_P(
    Placements, UpdateStagingTest,
    ::testing::Values(StagingCase{"split", DType::bf16, true, Tier::device, Tier::device},
                      StagingCase{"split_gradients_in_host", DType::bf16, true, Tier::host, Tier::device},
                      StagingCase{"split_parameters_in_host", DType::bf16, true, Tier::device, Tier::host},
                      StagingCase{"separate", DType::bf16, false, Tier::device, Tier::device},
                      StagingCase{"separate_gradients_in_host", DType::f16, false, Tier::host, Tier::device},
                      StagingCase{"fp32", DType::f32, false, Tier::device, Tier::device},
                      StagingCase{"fp32_parameters_in_host", DType::f32, false, Tier::device, Tier::host}),
    [](const auto& tested) { return tested.param.name; });

}  // namespace
}  // namespace sherd::engine
