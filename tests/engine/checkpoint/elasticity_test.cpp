// Checkpoints go from any number of ranks, stage and tiers to any other: every element of every state is the
// same, by name and index, in memory and in the files, which an oracle puts together.
#include <gtest/gtest.h>

#include <cmath>

#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/format.h"
#include "models/gpt.h"
#include "support/equality.h"
#include "support/expect_error.h"
#include "support/logical_states.h"
#include "support/odd_models.h"
#include "support/places.h"
#include "support/temp_folder.h"
#include "support/whole_tensors.h"

namespace sherd::test {
namespace {

namespace fs = std::filesystem;
using sherd::testing::expect_error;
using sherd::testing::read_text;
using sherd::testing::TempFolder;
using sherd::testing::whole_tensors;
using sherd::testing::write_text;

/// Expects the oracle to find in the files of `folder` what the ranks hold.
void expect_on_disk(const fs::path& folder, const LogicalStates& states) {
  const auto tensors = whole_tensors(folder);
  std::size_t parameters = 0;
  for (const auto& [name, bytes] : tensors) {
    const bool frozen = name.starts_with("frozen.");
    EXPECT_EQ(bytes, states.at(frozen ? "parameters." + name.substr(7) : name)) << name;
    parameters += frozen || name.starts_with("fp32.");
  }
  std::size_t expected = 0;
  for (const auto& [name, bytes] : states) {
    expected += name.starts_with("parameters.");
    const bool kept = !name.starts_with("parameters.");
    EXPECT_TRUE(!kept || tensors.contains(name)) << name;
  }
  EXPECT_EQ(parameters, expected);
}

struct RankLayout {
  int ranks, stage;
  const char *parameters = "none", *optimizer = "none";
  int shard_size = 0;  ///< 0: all ranks
};

/// Replicas of `shard_size` ranks each.
RankLayout sharded_by(int shard_size, int ranks, int stage) {
  return {ranks, stage, "none", "none", shard_size};
}

struct RankChange {
  const char* name;
  RankLayout saved;
  std::vector<RankLayout> loaded;
  std::string dtype = "bf16";
  bool split_masters = true;
};
void PrintTo(const RankChange& c, std::ostream* out) {
  *out << c.name;
}

class Elasticity : public ::testing::TestWithParam<RankChange> {
 protected:
  std::string config_of(const RankLayout& setup) const {
    RunSpec spec;
    spec.stage = setup.stage, spec.shard_size = setup.shard_size;
    spec.offload_param = setup.parameters, spec.offload_optimizer = setup.optimizer;
    spec.nvme_path = (folder_ / "nvme").string();
    spec.dtype = GetParam().dtype, spec.split_masters = GetParam().split_masters;
    spec.hidden = 16, spec.layers = 1;
    return spec.config();
  }
  /// Runs `body` with a new engine on each rank; the states at its end.
  LogicalStates run(const RankLayout& setup, const std::function<void(Engine&)>& body) const {
    LogicalStateCollector states;
    launch_ranks(setup.ranks, [&](DistributedPtr dist) {
      const config::Config config = config::parse_text(config_of(setup));
      Engine engine(dist, std::make_shared<models::Gpt>(models::gpt_config(config, 101)), config);
      body(engine);
      states.add(engine);
    });
    return states.take();
  }
  static double step(Engine& engine) {
    int micro = 0;
    return engine
        .train_batch([&] {
          return synthetic_batch(engine.device(), 2, 24, 101, engine.global_steps(), micro++,
                                 engine.dist().rank());
        })
        .loss;
  }
  std::string folder(const char* name) const { return (folder_ / name).string(); }

  TempFolder folder_;
};

TEST_P(Elasticity, StatesAreTheSameElementForElement) {
  fs::create_directories(folder("nvme"));
  const RankChange& c = GetParam();
  const LogicalStates saved = run(c.saved, [&](Engine& engine) {
    step(engine);
    step(engine);
    engine.save_checkpoint(folder("first"));
  });
  expect_on_disk(folder_ / "first" / "global_step2", saved);
  for (const RankLayout& setup : c.loaded) {
    SCOPED_TRACE(cat(setup.ranks, " ranks, stage ", setup.stage, ", shard_size ", setup.shard_size));
    const LogicalStates loaded = run(setup, [&](Engine& engine) {
      engine.load_checkpoint(folder("first"));
      EXPECT_EQ(engine.global_steps(), 2);
      EXPECT_EQ(engine.global_samples(), 2 * 2 * c.saved.ranks);
      engine.save_checkpoint(folder("second"), cat("of", setup.ranks));
    });
    EXPECT_EQ(loaded, saved);
    expect_on_disk(folder_ / "second" / cat("of", setup.ranks), saved);
    const LogicalStates later = run(setup, [&](Engine& engine) {
      engine.load_checkpoint(folder("second"));
      EXPECT_TRUE(std::isfinite(step(engine)));
      EXPECT_EQ(engine.global_steps(), 3);
    });
    EXPECT_NE(later, saved);
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, Elasticity,
    ::testing::Values(
        RankChange{"bf16Of4", {4, 2}, {{2, 3, "cpu", "nvme"}, {1, 0}, {3, 1, "none", "cpu"}, {6, 3}}},
        RankChange{"fp32Of4", {4, 3}, {{2, 0}, {1, 2}, {3, 3, "nvme", "cpu"}, {6, 1}}, "fp32"},
        RankChange{"offloadedOf4", {4, 3, "nvme", "nvme"}, {{2, 1}, {6, 2, "none", "cpu"}}},
        RankChange{"replicatedOf3", {3, 0}, {{4, 3, "cpu", "cpu"}, {2, 2, "none", "nvme"}}},
        RankChange{"wholeMastersOf4", {4, 1}, {{3, 3}}, "bf16", false},
        RankChange{"fp16Of1", {1, 3, "cpu", "cpu"}, {{4, 2}, {6, 3}}, "fp16"},
        RankChange{"hybridOf4", sharded_by(2, 4, 2), {{2, 3}, sharded_by(3, 6, 3), {1, 0}}},
        RankChange{
            "hybridOf6", sharded_by(3, 6, 3), {sharded_by(2, 4, 3), sharded_by(1, 2, 1), {1, 0}}, "fp32"},
        RankChange{
            "offloadedHybridOf4", {4, 3, "nvme", "nvme", 2}, {{3, 2}, {6, 3, "cpu", "cpu", 2}}, "fp16"},
        RankChange{"wholeToHybrid", {2, 3}, {sharded_by(2, 4, 2), sharded_by(3, 6, 3), sharded_by(1, 3, 0)}},
        RankChange{"oneToHybrid", {1, 0}, {sharded_by(2, 4, 3), sharded_by(2, 6, 1)}, "fp32"}),
    [](const auto& one) { return std::string(one.param.name); });

/// Parameters that do not train, and parameters that two layers share.
TEST(ElasticCheckpoints, FrozenAndTiedParametersGoAlong) {
  TempFolder folder;
  const auto run = [&](const RankLayout& setup, const std::function<void(Engine&)>& body) {
    config::Config config = odd_config(setup.stage);
    config.parallel.shard_size = setup.shard_size;
    LogicalStateCollector states;
    launch_ranks(setup.ranks, [&](DistributedPtr dist) {
      Engine engine(dist, std::make_shared<Odd>(true), config);
      body(engine);
      states.add(engine);
    });
    return states.take();
  };
  for (const RankLayout& saving : {RankLayout{4, 3}, sharded_by(2, 4, 3)}) {
    const LogicalStates saved = run(saving, [&](Engine& engine) {
      engine.train_batch([&] { return odd_batch(engine, 0); });
      engine.save_checkpoint(folder.path().string(), "a");
    });
    EXPECT_FALSE(saved.contains("fp32.layer0.weight"));
    expect_on_disk(folder / "a", saved);
    for (const RankLayout& loading : {RankLayout{1, 1}, {3, 3}, {6, 1}, sharded_by(3, 6, 3)})
      EXPECT_EQ(run(loading, [&](Engine& engine) { engine.load_checkpoint(folder.path().string()); }), saved)
          << "shard_size " << saving.shard_size << " to " << loading.shard_size << ", " << loading.ranks
          << " ranks";
  }
}

/// Saved by four ranks, each of which has elements to write; loaded by so many.
class ElasticFaults : public ::testing::TestWithParam<int> {
 protected:
  ElasticFaults() {
    on_ranks(4, [&](Engine& engine) { engine.save_checkpoint(folder_.path().string(), "a"); });
  }
  static void on_ranks(int ranks, const std::function<void(Engine&)>& body) {
    RunSpec spec;
    spec.stage = 3, spec.hidden = 16, spec.layers = 1;
    launch_ranks(ranks, [&](DistributedPtr dist) { body(*make_engine(dist, spec)); });
  }
  /// All ranks are told, and can go on.
  void expect_refused(ErrorKind kind, const std::string& why) {
    on_ranks(GetParam(), [&](Engine& engine) {
      expect_error(kind, why, [&] { engine.load_checkpoint(folder_.path().string()); });
      engine.train_batch(
          [&] { return synthetic_batch(engine.device(), 2, 24, 101, 0, 0, engine.dist().rank()); });
    });
  }
  fs::path file_of(int rank) const { return folder_ / "a" / engine::rank_file(rank); }

  TempFolder folder_;
};

TEST_P(ElasticFaults, AMissingFileIsNamed) {
  for (const int rank : {0, 2}) {
    const std::string content = read_text(file_of(rank));
    fs::remove(file_of(rank));
    expect_refused(ErrorKind::io, file_of(rank).string());
    write_text(file_of(rank), content);
  }
}

TEST_P(ElasticFaults, ATruncatedFileIsNamed) {
  const std::string content = read_text(file_of(3));
  write_text(file_of(3), content.substr(0, content.size() - 1));
  expect_refused(ErrorKind::data, cat("'", file_of(3).string(), "'"));
}

TEST_P(ElasticFaults, EveryFileIsVerified) {
  for (const int rank : {0, 1, 2, 3}) {
    const std::string content = read_text(file_of(rank));
    std::string bad = content;
    bad.back() = static_cast<char>(bad.back() ^ 4);
    write_text(file_of(rank), bad);
    expect_refused(ErrorKind::data, cat(file_of(rank).string(), " is damaged"));
    write_text(file_of(rank), content);
  }
  on_ranks(GetParam(), [&](Engine& engine) { engine.load_checkpoint(folder_.path().string()); });
}

TEST_P(ElasticFaults, EveryFileIsVerifiedByOneRank) {
  for (const int rank : {0, 1, 2, 3}) {
    const std::string content = read_text(file_of(rank));
    std::string bad = content;
    bad.back() = static_cast<char>(bad.back() ^ 4);
    write_text(file_of(rank), bad);
    const engine::CheckpointReader reader(folder_ / "a");
    int found = 0;
    for (int of = 0; of < GetParam(); ++of) {
      try {
        reader.verify_share(of, GetParam());
      } catch (const Error&) {
        ++found;
      }
    }
    EXPECT_EQ(found, 1) << rank;
    write_text(file_of(rank), content);
  }
}

INSTANTIATE_TEST_SUITE_P(On, ElasticFaults, ::testing::Values(1, 2, 3, 4, 6));

}  // namespace
}  // namespace sherd::test
