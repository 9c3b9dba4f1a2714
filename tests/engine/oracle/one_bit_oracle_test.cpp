// 1-bit Adam and 1-bit LAMB against NumPy with simulated workers
// (scripts/references/make_one_bit_reference.py): weights, momentum, variances, and both errors, over 50
// steps.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "engine/update/rules/parameter_norms.h"
#include "engine/update/update_pipeline.h"
#include "nn/layers.h"
#include "support/places.h"
#include "support/reference_file.h"

namespace sherd::engine {
namespace {

using tensor::Tensor;

constexpr int freeze_step = 8, steps = 50;

/// The script's formulas; `i` counts the elements of both parameters.
float gradient_of(std::int64_t i, std::int64_t step, std::int64_t worker, bool packed) {
  if (packed && 280 <= i && i < 340) return 0;  // padding
  if (i % 50 == 7 && step <= freeze_step) return 0;
  const std::int64_t numerator = (i * 7919 + step * 104729 + worker * 1299709) % 2003 - 1001;
  return static_cast<float>(numerator) / 1001.0f * static_cast<float>(1 + i % 5);
}
float weight_of(std::int64_t i) {
  return static_cast<float>(i * 4813 % 997 - 498) / 498.0f;
}

/// `packed`: the weight is three tensors, of rows 0 to 4, 5, 6, 11 to 13, and 7 to 10, and padding.
std::shared_ptr<nn::Linear> two_parameters(bool packed) {
  auto linear = std::make_shared<nn::Linear>(20, 17);
  linear->bias()->decay = true;
  if (packed) linear->weight()->packing.tensors = {{{0, 5}}, {{5, 7}, {11, 14}}, {{7, 11}}};
  return linear;
}

constexpr std::int64_t weights = 340;

/// Calls visit(element of both parameters, index in a buffer that begins at flat element `begin`).
template <class Visit>
void for_each_element(const sharding::Segment& segment, std::int64_t begin, std::int64_t end,
                      const Visit& visit) {
  for (const sharding::Piece& piece : segment.layout().pieces(begin, end))
    for (std::int64_t i = 0; i < piece.count; ++i)
      visit((piece.slot == 0 ? 0 : weights) + piece.parameter_begin + i, piece.flat_begin + i - begin);
}

/// One rank's part of the two parameters, updated by gradients that the test writes.
class Worker {
 public:
  Worker(const std::string& optimizer, comm::Communicator& world, comm::Communicator& shard,
         comm::Communicator& replica, int shards, bool packed)
      : replica_(replica),
        packed_(packed),
        device_(device::make_cpu_device(1)),
        kernels_(tensor::make_kernels(*device_)),
        config_(config::parse_text(cat(
            R"({"train_batch_size": 1, "optimizer": {"params": {"lr": 0.01, "betas": [0.9, 0.99], "eps": 1e-3,
                    "weight_decay": 0.1, "freeze_step": 8)",
            optimizer, "}}"))),
        optimizer_(config_.optimizer, 1),
        sources_{{shard, &replica}, *kernels_, nullptr, nullptr, &world},
        model_(two_parameters(packed), options(shards), sources_),
        pipeline_(model_, sources_, {.rules = optimizer_.rules()}) {
    const Tensor start = Tensor::empty(*device_, {segment().layout().padded()}, DType::f32);
    kernels_->fill(start, 0);
    for_each_element(segment(), 0, start.numel(),
                     [&](std::int64_t i, std::int64_t at) { start.data<float>()[at] = weight_of(i); });
    segment().write_values(0, start);
  }

  sharding::Segment& segment() { return *model_.trainable_segments().front(); }

  void step(int number) {
    const bool own = number > freeze_step && replica_.size() > 1;
    const Tensor sum = segment().own_gradients();
    kernels_->fill(sum, 0);
    for_each_element(segment(), segment().own_begin(), segment().own_end(),
                     [&](std::int64_t i, std::int64_t at) {
                       float total = 0;
                       for (int worker = 0; worker < replica_.size(); ++worker)
                         if (!own || worker == replica_.rank())
                           total += gradient_of(i, number, worker, packed_);
                       sum.data<float>()[at] = total;
                     });
    optimizer_.begin_step();
    pipeline_.run(optimizer_, 1.0 / replica_.size());
  }

  /// Compares this rank's part of a state with `values` of both parameters.
  void expect(const sharding::StateBuffer& state, std::span<const float> values, double tolerance,
              const std::string& what) {
    for_each_element(segment(), state.begin(), state.end(), [&](std::int64_t i, std::int64_t at) {
      const float is = state.tensor().data<float>()[at], wanted = values[static_cast<std::size_t>(i)];
      ASSERT_NEAR(is, wanted, tolerance) << what << ", element " << i << " on rank " << replica_.rank();
      if (std::abs(wanted) > tolerance) {
        ASSERT_EQ(is < 0, wanted < 0) << what << ", element " << i;
      }
    });
  }
  comm::Communicator& replica() { return replica_; }
  ParameterNorms& norms() { return optimizer_.norms(); }

 private:
  sharding::ShardingOptions options(int shards) const {
    sharding::ShardingOptions out = optimizer_.sharding_options(config_);
    out.placements = sharding::make_placements(shards > 1 ? 2 : 0, DType::f32, DType::f32, DType::f32);
    return out;
  }

  comm::Communicator& replica_;
  bool packed_;
  std::shared_ptr<device::Device> device_;
  std::unique_ptr<tensor::Kernels> kernels_;
  config::Config config_;
  Optimizer optimizer_;
  sharding::StateSources sources_;
  sharding::ShardedModel model_;
  UpdatePipeline pipeline_;
};

constexpr const char* adam = R"(}, "type": "OneBitAdam")";
constexpr const char* lamb =
    R"(, "coeff_beta": 0.8, "factor_min": 0.9, "factor_max": 1.2, "factor_threshold": 0.05}, "type": "OneBitLamb")";

struct OneBitCase {
  bool lamb;
  int workers, shards;
  bool packed = false;
  std::string name() const {
    return cat(lamb ? "lamb" : "adam", ".", workers, "x", shards, packed ? ".packed" : "");
  }
};

class OneBitOracle : public ::testing::TestWithParam<OneBitCase> {};

TEST_P(OneBitOracle, AgreesWithSimulatedWorkers) {
  const OneBitCase& one = GetParam();
  const int workers = one.workers, shards = one.shards;
  const auto reference = test::read_reference(SHERD_SOURCE_DIR "/tests/engine/reference/one_bit.safetensors");
  comm::run_local(workers * shards, comm::CommOptions{}, [&](comm::Communicator& world) {
    const auto shard = world.split(world.rank() / shards, world.rank());
    const auto replica = world.split(world.rank() % shards, world.rank());
    Worker worker(one.lamb ? lamb : adam, world, *shard, *replica, shards, one.packed);
    for (int step = 1; step <= steps; ++step) {
      worker.step(step);
      if (step != 8 && step != 9 && step != 20 && step != 50) continue;
      const auto values = [&](const std::string& kind) {
        return reference.at(cat(one.name(), ".", step, ".", kind)).values<float>();
      };
      const double tolerance = 2e-6;
      worker.expect(worker.segment().parameters(), values("fp32"), tolerance, cat("weights of step ", step));
      for (std::size_t i = 0; i < worker.segment().states().size(); ++i) {
        const std::string& kind = worker.segment().states()[i].name;
        std::vector<float> wanted = values(kind);
        if (kind == "worker_error")
          wanted.erase(
              wanted.begin(),
              wanted.begin() + static_cast<std::ptrdiff_t>(wanted.size() / static_cast<std::size_t>(workers) *
                                                           static_cast<std::size_t>(replica->rank())));
        worker.expect(worker.segment().moments()[i], wanted, 20 * tolerance, cat(kind, " of step ", step));
      }
    }
  });
}

/// Each tensor of a parameter goes on from the one ratio that earlier versions saved for all of them.
TEST(OneBitLamb, TensorsGoOnFromTheRatioOfTheirParameter) {
  const auto after_a_step = [](const std::map<std::string, std::string>& saved) {
    std::map<std::string, double> out;
    comm::run_local(1, comm::CommOptions{}, [&](comm::Communicator& world) {
      const auto alone = world.split(0, 0);
      Worker worker(lamb, world, *alone, *alone, 1, true);
      worker.norms().restore(saved);
      worker.step(1);
      for (const auto& [name, text] : worker.norms().save()) out[name] = std::stod(text);
    });
    return out;
  };
  const auto fresh = after_a_step({}), again = after_a_step({{"weight", "3 1"}});
  ASSERT_EQ(fresh.size(), 4u) << "three tensors and the bias";
  ASSERT_EQ(again.size(), 4u) << "the parameter's own is gone";
  for (const char* name : {"weight/0", "weight/1", "weight/2"})
    EXPECT_NEAR(again.at(name), fresh.at(name) + 0.8 * 3, 1e-12) << name;
  EXPECT_EQ(again.at("bias"), fresh.at("bias"));
}

INSTANTIATE_TEST_SUITE_P(All, OneBitOracle,
                         ::testing::Values(OneBitCase{false, 1, 1}, OneBitCase{false, 2, 1},
                                           OneBitCase{false, 3, 1}, OneBitCase{false, 2, 2},
                                           OneBitCase{true, 1, 1}, OneBitCase{true, 2, 1},
                                           OneBitCase{true, 3, 1}, OneBitCase{true, 2, 2},
                                           OneBitCase{false, 2, 1, true}, OneBitCase{true, 1, 1, true},
                                           OneBitCase{true, 2, 2, true}),
                         [](const auto& each) {
                           std::string name = each.param.name();
                           std::replace(name.begin(), name.end(), '.', '_');
                           return name;
                         });

}  // namespace
}  // namespace sherd::engine
