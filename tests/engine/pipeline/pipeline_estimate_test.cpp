// The estimate of a rank of a pipeline, among stages that are not there, is what a run books and sends.
#include <gmock/gmock.h>

#include "engine/estimate/estimate.h"
#include "engine/initialize.h"
#include "models/gpt.h"
#include "support/equality.h"
#include "support/temp_folder.h"

namespace sherd::test {
namespace {

struct PipelineSpec {
  int pipeline = 2, tensor = 1, data = 1, zero = 0, virtual_stages = 1;
  config::Schedule schedule = config::Schedule::automatic;
  bool tied = true;
  std::string recompute = "none";
  std::string nvme{};                    ///< where states are; empty: on the device
  long blocks = -1, micro_batches = -1;  ///< that recompute

  int ranks() const { return pipeline * tensor * data; }
  config::Config config() const {
    RunSpec spec;
    spec.stage = zero, spec.tensor = tensor, spec.tied = tied, spec.dtype = "bf16", spec.layers = 6;
    spec.hidden = 64, spec.accumulation = 6, spec.recompute = recompute, spec.clipping = 1;
    if (!nvme.empty()) spec.offload_optimizer = "nvme", spec.nvme_path = nvme;
    if (!nvme.empty() && zero == 3)
      spec.offload_param = "nvme", spec.offload_param_extra = R"(, "max_in_cpu": 0)";
    spec.recompute_blocks = blocks, spec.recompute_micro_batches = micro_batches;
    config::Config config = config::parse_text(spec.config());
    config.parallel.pipeline = pipeline, config.parallel.virtual_stages = virtual_stages;
    config.parallel.schedule = schedule;
    return config;
  }
};

TEST(PipelineEstimates, AreWhatARunBooksAndSends) {
  using enum config::Schedule;
  const sherd::testing::TempFolder folder;
  for (const PipelineSpec& spec :
       {PipelineSpec{}, PipelineSpec{.pipeline = 3, .zero = 1, .schedule = gpipe, .tied = false},
        PipelineSpec{.data = 2, .zero = 3, .schedule = zero_bubble},
        PipelineSpec{.tensor = 2, .zero = 1, .recompute = "full"},
        PipelineSpec{.pipeline = 3, .recompute = "full", .blocks = 1, .micro_batches = 2},
        PipelineSpec{.pipeline = 3, .zero = 3, .virtual_stages = 2},
        PipelineSpec{.zero = 1, .nvme = folder.path().string()},
        PipelineSpec{.data = 2, .zero = 3, .recompute = "full", .nvme = folder.path().string()}}) {
    const config::Config config = spec.config();
    SCOPED_TRACE(
        cat(spec.pipeline, " stages, ZeRO ", spec.zero, ", schedule ", static_cast<int>(spec.schedule)));
    const auto build = [&](const parallel::Layout& layout) {
      return std::make_shared<models::Gpt>(models::gpt_config(config, 101), layout);
    };
    const auto batch = [](device::Device& device) {
      return tensor::Batch{{"tokens", tensor::Tensor::empty(device, {2, 24}, DType::i32)},
                           {"labels", tensor::Tensor::empty(device, {2, 24}, DType::i32)}};
    };
    std::vector<engine::Estimate> planned;
    for (int rank = 0; rank < spec.ranks(); ++rank)
      planned.push_back(engine::estimate(config, build, batch,
                                         {.ranks = spec.ranks(), .local_ranks = spec.ranks(), .rank = rank}));
    launch_ranks(spec.ranks(), [&](DistributedPtr dist) {
      const engine::Estimate& mine = planned[static_cast<std::size_t>(dist->rank())];
      const auto made = initialize({.dist = dist, .model = build, .config = config});
      Engine& engine = *made.engine;
      for (std::size_t tier = 0; tier < device::tier_count; ++tier)
        EXPECT_EQ(engine::MemoryReport::of(engine.device()).tiers[tier].total_current,
                  mine.states.tiers[tier].total_current);
      const auto next = [&] { return synthetic_batch(engine.device(), 2, 24, 101, 0, 0, 0); };
      engine.train_batch(next);
      engine.eval_batch(next());
      engine.eval_batch(next());
      engine.groups().reset_traffic();
      engine.train_batch(next);
      const auto sent = engine.groups().traffic();
      ASSERT_EQ(sent.size(), mine.traffic_by_axis.size());
      for (std::size_t i = 0; i < sent.size(); ++i) {
        EXPECT_EQ(sent[i].axis, mine.traffic_by_axis[i].axis);
        EXPECT_EQ(sent[i].traffic.payload(), mine.traffic_by_axis[i].traffic.payload())
            << comm::name_of(sent[i].axis);
        EXPECT_EQ(sent[i].traffic.scalars, mine.traffic_by_axis[i].traffic.scalars)
            << comm::name_of(sent[i].axis);
      }
      for (std::size_t tier = 0; tier < device::tier_count; ++tier) {
        const engine::MemoryReport report = engine::MemoryReport::of(engine.device());
        const auto peak = static_cast<double>(report.tiers[tier].total_peak);
        EXPECT_NEAR(static_cast<double>(mine.peaks.tiers[tier].total_peak), peak, 0.05 * peak) << tier;
      }
    });
    // The first stage of 1F1B keeps more micro-batches than the last; all know what they pass on.
    for (const engine::Estimate& each : planned) EXPECT_GT(each.traffic.p2p, 0u);
  }
}

}  // namespace
}  // namespace sherd::test
