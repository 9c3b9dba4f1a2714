// An update rule's states begin with the values that it says, wherever they lie.
#include <gtest/gtest.h>

#include "nn/layers.h"
#include "sharding/sharded_model.h"
#include "support/cpu_fixture.h"
#include "support/temp_folder.h"

namespace sherd::test {
namespace {

using device::Tier;
using sherd::testing::TempFolder;
using tensor::Tensor;

sharding::ShardingOptions options_for(Tier tier, DType moments) {
  sharding::ShardingOptions options;
  options.placements = sharding::make_placements(1, DType::f32, DType::f32, DType::f32);
  options.placements.masters.tier = options.placements.moments.tier = tier;
  options.placements.moments.dtype = moments;
  // The second rule is that of the bias.
  options.rules = {{{{"sum", 0.375}, {"mean"}}}, {{{"count", -2}}}};
  options.rule_of = [](const autograd::Parameter& parameter) { return parameter.name == "bias" ? 1 : 0; };
  return options;
}

struct StatesCase {
  Tier tier;
  DType dtype;
};
void PrintTo(const StatesCase& c, std::ostream* to) {
  *to << device::name_of(c.tier) << '_' << name_of(c.dtype);
}
class InitialStates : public ::testing::TestWithParam<StatesCase> {};

/// More than two chunks of what passes through memory at once.
std::shared_ptr<nn::Module> large_layer() {
  return std::make_shared<nn::Linear>(1500, 1500);
}

TEST_P(InitialStates, AreThoseOfTheRule) {
  const TempFolder folder;
  comm::run_local(2, {.timeout_seconds = 20}, [&](comm::Communicator& world) {
    Cpu machine(1);
    offload::StoreOptions store_options;
    store_options.folder = folder.path().string(), store_options.rank = world.rank();
    offload::Store store(store_options, machine.device->ledger());
    sharding::StateSources sources{world, *machine.kernels};
    sources.optimizer_store = &store;
    sharding::ShardedModel model(large_layer(), options_for(GetParam().tier, GetParam().dtype), sources);
    std::map<std::string, double> seen;
    for (const sharding::Segment* segment : model.trainable_segments()) {
      ASSERT_EQ(segment->states().size(), segment->moments().size());
      for (std::size_t i = 0; i < segment->states().size(); ++i) {
        const sharding::StateBuffer& moments = segment->moments()[i];
        ASSERT_EQ(moments.stored(), GetParam().tier == Tier::nvme);
        const Tensor values =
            Tensor::empty(*machine.device, {moments.end() - moments.begin()}, moments.dtype());
        moments.read(moments.begin(), values).wait();
        for (const double value : machine.values(values)) ASSERT_EQ(value, segment->states()[i].initial);
        seen[segment->states()[i].name] = segment->states()[i].initial;
      }
    }
    EXPECT_EQ(seen, (std::map<std::string, double>{{"sum", 0.375}, {"mean", 0}, {"count", -2}}));
  });
}

TEST_P(InitialStates, AreBookedByDryRunsAsTheyAre) {
  const TempFolder folder;
  const auto peaks = [&](comm::Communicator& world, const std::shared_ptr<device::Device>& device) {
    const auto kernels = tensor::make_kernels(*device);
    offload::StoreOptions store_options;
    store_options.folder = folder.path().string();
    store_options.dry = device->kind() == device::Kind::meta;
    offload::Store store(store_options, device->ledger());
    sharding::StateSources sources{world, *kernels};
    sources.optimizer_store = &store;
    const sharding::ShardedModel model(large_layer(), options_for(GetParam().tier, GetParam().dtype),
                                       sources);
    std::vector<std::uint64_t> out;
    for (const Tier tier : {Tier::device, Tier::host, Tier::nvme})
      out.push_back(device->ledger().current(tier)), out.push_back(device->ledger().peak(tier));
    return out;
  };
  comm::run_local(1, {}, [&](comm::Communicator& world) {
    EXPECT_EQ(peaks(world, device::make_meta_device(1)), peaks(world, device::make_cpu_device(1)));
  });
}

INSTANTIATE_TEST_SUITE_P(Everywhere, InitialStates,
                         ::testing::Values(StatesCase{Tier::device, DType::f32},
                                           StatesCase{Tier::host, DType::f32},
                                           StatesCase{Tier::nvme, DType::f32},
                                           StatesCase{Tier::nvme, DType::bf16}),
                         ::testing::PrintToStringParamName());

}  // namespace
}  // namespace sherd::test
