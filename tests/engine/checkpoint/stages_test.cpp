// Models that several stages of a pipeline hold: drawn, saved and loaded as by one rank, whichever way they
// are cut.
#include <gmock/gmock.h>

#include "base/log.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/initialize.h"
#include "models/gpt.h"
#include "support/equality.h"
#include "support/expect_error.h"
#include "support/logical_states.h"
#include "support/temp_folder.h"
#include "support/whole_tensors.h"

namespace sherd::test {
namespace {

using sherd::testing::expect_error;
using sherd::testing::TempFolder;
using sherd::testing::whole_tensors;
using ::testing::HasSubstr;

struct Stages {
  int pipeline = 1, tensor = 1, context = 1, data = 1;
  int zero = 0;
  int virtual_stages = 1, shard_size = 0;
  bool tied = true;
  std::string partition = "best", offload = "none";

  int ranks() const { return pipeline * tensor * context * data; }
  std::string text() const {
    return cat("pipeline ", pipeline, " x ", virtual_stages, ", tensor ", tensor, ", context ", context,
               ", data ", data, ", ZeRO ", zero, ", shard ", shard_size, ", ", partition, ", ", offload);
  }
  config::Config config(const std::string& nvme_path = ".") const {
    RunSpec spec;
    spec.stage = zero, spec.tensor = tensor, spec.context = context, spec.shard_size = shard_size;
    spec.tied = tied, spec.dtype = "bf16", spec.layers = 5, spec.hidden = 16;
    spec.accumulation = 2 * pipeline;
    spec.offload_optimizer = offload, spec.nvme_path = nvme_path;
    config::Config config = config::parse_text(spec.config());
    config.parallel.pipeline = pipeline, config.parallel.virtual_stages = virtual_stages;
    config.parallel.partition_method = partition;
    return config;
  }
};

void on_all_stages(const Stages& stages, const std::string& nvme_path,
                   const std::function<void(Engine&)>& body) {
  launch_ranks(stages.ranks(), [&](DistributedPtr dist) {
    const config::Config config = stages.config(nvme_path);
    const auto build = [&](const parallel::Layout& layout) {
      return std::make_shared<models::Gpt>(models::gpt_config(config, 101), layout);
    };
    const auto made = initialize({.dist = dist, .model = build, .config = config});
    body(*made.engine);
  });
}

std::size_t bytes_of(const LogicalStates& states) {
  std::size_t sum = 0;
  for (const auto& [name, bytes] : states) sum += bytes.size();
  return sum;
}

/// Bytes of the tensors in all ranks' files.
std::size_t bytes_in_files(const std::filesystem::path& folder) {
  std::size_t sum = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().extension() != ".safetensors") continue;
    const std::string bytes = sherd::testing::read_text(entry.path());
    std::uint64_t length = 0;
    std::memcpy(&length, bytes.data(), 8);
    sum += bytes.size() - 8 - length;
  }
  return sum;
}

class StageCheckpoints : public ::testing::Test {
 protected:
  LogicalStates states_of(const Stages& stages, const std::function<void(Engine&)>& before = {}) {
    LogicalStateCollector states;
    on_all_stages(stages, folder_.path().string(), [&](Engine& engine) {
      if (before) before(engine);
      states.add(engine);
    });
    return states.take();
  }
  std::string folder(const char* name) const { return (folder_ / name).string(); }

  TempFolder folder_;
};

const Stages stage_layouts[] = {{.pipeline = 2},
                                {.pipeline = 3, .zero = 1, .partition = "uniform"},
                                {.pipeline = 2, .data = 2, .zero = 3},
                                {.pipeline = 3, .zero = 3, .virtual_stages = 2},
                                {.pipeline = 2, .tensor = 2, .zero = 1, .partition = "type:TransformerBlock"},
                                {.pipeline = 2, .context = 2, .zero = 3, .offload = "cpu"},
                                {.pipeline = 2, .data = 2, .zero = 2, .shard_size = 1},
                                {.pipeline = 4, .zero = 1, .partition = "parameters", .offload = "nvme"},
                                {.data = 3, .zero = 3}};

TEST_F(StageCheckpoints, InitialValuesAreThoseOfOneRank) {
  for (const bool tied : {true, false}) {
    const LogicalStates expected = states_of({.zero = 1, .tied = tied});
    EXPECT_EQ(expected.contains("fp32.head.weight"), !tied);
    for (Stages stages : stage_layouts) {
      stages.tied = tied;
      SCOPED_TRACE(stages.text());
      EXPECT_EQ(states_of(stages), expected);
    }
  }
}

/// One rank's trained states go through every layout, each of which saves what the one before it saved.
TEST_F(StageCheckpoints, GoFromEveryLayoutToEveryOther) {
  const Stages alone{.zero = 1};
  const LogicalStates expected = states_of(alone, [&](Engine& engine) {
    for (int step = 0; step < 2; ++step)
      engine.train_batch([&] { return synthetic_batch(engine.device(), 2, 24, 101, step, 0, 0); });
    engine.save_checkpoint(folder("a"), "start");
  });
  LogicalStates kept = expected;
  std::erase_if(kept, [](const auto& state) { return state.first.starts_with("parameters."); });
  std::string from = folder("a");
  for (const Stages& stages : stage_layouts) {
    SCOPED_TRACE(stages.text());
    const std::string to = folder(cat("b", &stages - stage_layouts).c_str());
    const LogicalStates loaded = states_of(stages, [&](Engine& engine) {
      engine.load_checkpoint(from);
      EXPECT_EQ(engine.global_steps(), 2);
      engine.save_checkpoint(to, "next");
    });
    EXPECT_EQ(loaded, expected);
    // In the files each element is there, and once.
    auto on_disk = whole_tensors(to + "/next");
    EXPECT_EQ(on_disk, kept);
    EXPECT_EQ(bytes_in_files(to + "/next"), bytes_of(kept));
    EXPECT_EQ(engine::CheckpointReader(to + "/next").manifest().grid.at("pipeline"), stages.pipeline);
    from = to;
  }
}

TEST_F(StageCheckpoints, AStageHoldsItsOwnPartsAlone) {
  for (const Stages& stages : {Stages{.pipeline = 3, .zero = 3, .tied = false, .partition = "uniform"},
                               Stages{.pipeline = 3, .zero = 3, .partition = "uniform"}})
    on_all_stages(stages, ".", [&](Engine& engine) {
      std::map<std::string, int> blocks;
      for (const auto& unit : engine.sharded().units())
        for (const auto& segment : unit->segments())
          for (const auto& parameter : segment->layout().parameters())
            ++blocks[parameter->name.substr(0, parameter->name.find('.', parameter->name.find('.') + 1))];
      // Seven parts: the tables, five blocks, and norm and head.
      const int stage = engine.stages().stage;
      EXPECT_EQ(blocks.contains("blocks.0"), stage == 0);
      EXPECT_EQ(blocks.contains("blocks.4"), stage == 2);
      EXPECT_EQ(blocks.contains("positions.weight"), stage == 0);
      EXPECT_EQ(blocks.contains("norm.weight"), stage == 2);
      EXPECT_EQ(blocks.contains("head.weight"), stage == 2 && !stages.tied);
      EXPECT_EQ(blocks.contains("tokens.weight"), stage == 0 || (stage == 2 && stages.tied));
    });
}

TEST_F(StageCheckpoints, TheLogTellsOfAnotherPipeline) {
  on_all_stages({.pipeline = 2, .data = 2}, ".",
                [&](Engine& engine) { engine.save_checkpoint(folder("log"), "t"); });
  set_log_level(LogLevel::info);
  ::testing::internal::CaptureStderr();
  on_all_stages({.pipeline = 3}, ".", [&](Engine& engine) { engine.load_checkpoint(folder("log")); });
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(
      log, HasSubstr("4 ranks (tensor 1 x context 1 x data 2 x pipeline 2) wrote it, and it goes on with 3 "
                     "(tensor 1 x context 1 x data 1 x pipeline 3)"));
  EXPECT_THAT(log, ::testing::Not(HasSubstr("parallel.pipeline was")));
}

}  // namespace
}  // namespace sherd::test
