// `sherd estimate` and refusals of `sherd train`.
#include "cli/train_fixture.h"
#include "comm/memory.h"
#include "engine/report/report.h"

namespace sherd::cli {
namespace {

class EstimateProgram : public Train {
 protected:
  std::vector<std::string> estimate(const std::vector<std::string>& more = {}) const {
    std::vector<std::string> out{"estimate", "--config", config()};
    out.insert(out.end(), more.begin(), more.end());
    return out;
  }
  /// The number that follows the last of `keys`, each looked for behind the one before.
  static std::uint64_t number(const std::string& json, const std::vector<std::string>& keys) {
    std::size_t at = 0;
    for (const std::string& key : keys) {
      at = json.find("\"" + key + "\":", at);
      require(at != std::string::npos, "no '", key, "' in ", json);
    }
    return std::stoull(json.substr(json.find(':', at) + 1));
  }
  /// The change that the refusal or the report proposes: the words behind "that fits: ", up to the line's or
  /// the remark's end.
  static std::vector<std::string> proposal(const std::string& text) {
    const std::string mark = "hange that fits: ";
    const auto begin = text.find(mark);
    require(begin != std::string::npos, "nothing is proposed: ", text);
    std::istringstream words(text.substr(begin + mark.size()));
    std::vector<std::string> out;
    for (std::string word; words >> word && (word == "--set" || (!out.empty() && out.back() == "--set"));)
      out.push_back(word);
    return out;
  }
};

TEST_F(EstimateProgram, RanksOfOneMachineAreAsTrainCountsThem) {
  EXPECT_EQ(sherd(estimate({"--ranks", "2", "--json"})).out, sherd(estimate({"--gpus", "2", "--json"})).out);
  const Outcome both = sherd(estimate({"--ranks", "2", "--nodes", "3"}));
  EXPECT_EQ(both.code, 2);
  EXPECT_THAT(both.err, HasSubstr("give either --ranks, all on one machine, or --gpus and --nodes"));
}

TEST_F(EstimateProgram, SaysWhatTrainingThenTakes) {
  const Outcome told = sherd(estimate({"--gpus", "2", "--json"}));
  ASSERT_EQ(told.code, 0) << told.err;
  EXPECT_THAT(told.out, HasSubstr("\"fits\": true"));
  const Outcome trained = sherd(train({"--ranks", "2", "--metrics", (folder_ / "m.jsonl").string()}));
  ASSERT_EQ(trained.code, 0) << trained.err;
  const double predicted = static_cast<double>(number(told.out, {"tiers", "device", "peak", "total"}));
  const double taken = std::stod(metric("m.jsonl", "device_peak").back());
  EXPECT_NEAR(predicted, taken, 0.05 * taken);
  EXPECT_EQ(number(told.out, {"per_step", "reduce_scatter_bytes"}),
            std::stoull(metric("m.jsonl", "reduce_scatter_bytes").back()));
  EXPECT_EQ(number(told.out, {"per_step", "all_gather_bytes"}),
            std::stoull(metric("m.jsonl", "all_gather_bytes").back()));

  const Outcome table =
      sherd(estimate({"--gpus", "2", "--nodes", "3", "--rank", "5", "--set", "train_batch_size=12"}));
  ASSERT_EQ(table.code, 0) << table.err;
  for (const char* part :
       {"rank 5 of 6", "device parameters", "device optimizer", "machine (2)", "all (6)", "It fits"})
    EXPECT_THAT(table.out, HasSubstr(part));
}

/// Each size once, whoever tells it.
TEST_F(EstimateProgram, LocalCheckpointsHaveARowAndNumbersThatAgree) {
  const std::string local = (folder_ / "local").string();
  const std::vector<std::string> keys{"--gpus",  "2",
                                      "--nodes", "2",
                                      "--set",   "training.local_save_interval=2",
                                      "--set",   "training.local_save_dir=" + local};
  std::vector<std::string> as_json = keys;
  as_json.emplace_back("--json");
  const Outcome json = sherd(estimate(as_json)), table = sherd(estimate(keys)),
                without = sherd(estimate({"--gpus", "2", "--nodes", "2"}));
  ASSERT_EQ(table.code, 0) << table.err;
  const std::uint64_t bytes = number(json.out, {"local_checkpoints", "bytes"}),
                      buffers = number(json.out, {"local_checkpoints", "buffers"}),
                      snapshot = number(json.out, {"snapshot", "bytes"});
  EXPECT_EQ(number(json.out, {"local_checkpoints", "of_machine"}), 2 * bytes);
  EXPECT_EQ(buffers, 8u << 20);
  EXPECT_EQ(number(json.out, {"host", "peak", "checkpoint"}), snapshot + buffers);
  EXPECT_EQ(bytes, 4 * snapshot) << "its own and a copy, twice";
  const auto row_of = [&](const std::string& begin) {
    std::vector<std::string> rows;
    std::istringstream in(table.out);
    for (std::string line; std::getline(in, line);)
      if (line.starts_with(begin)) rows.push_back(line);
    return rows;
  };
  const auto rows = row_of("local checkpoints in " + local);
  ASSERT_EQ(rows.size(), 2u) << table.out;
  EXPECT_THAT(rows[0], HasSubstr(engine::human_bytes(bytes)));
  EXPECT_THAT(rows[1], ::testing::AllOf(HasSubstr(engine::human_bytes(bytes)),
                                        HasSubstr(engine::human_bytes(2 * bytes)),
                                        HasSubstr(engine::human_bytes(4 * bytes))));
  EXPECT_THAT(table.out, HasSubstr(cat("from a copy in host memory of ", engine::human_bytes(snapshot))));
  EXPECT_THAT(table.out, HasSubstr(cat("travel through ", engine::human_bytes(buffers), " of host memory")));
  EXPECT_EQ(count(without.out, "local checkpoints"), 0u);
}

TEST_F(EstimateProgram, NeedsNoDatasetWhenTheVocabularyIsGiven) {
  const Outcome got = sherd(estimate({"--set", "data.path=/nowhere", "--set", "model.vocab_size=50257"}));
  EXPECT_EQ(got.code, 0) << got.err;
  const Outcome untold = sherd(estimate({"--set", "data.path=/nowhere"}));
  EXPECT_EQ(untold.code, 1);
  EXPECT_THAT(untold.err, HasSubstr("model.vocab_size"));
  EXPECT_EQ(sherd(estimate({"--rank", "1"})).code, 2);
  EXPECT_EQ(sherd({"estimate"}).code, 2);
}

TEST_F(EstimateProgram, WorldsHaveBounds) {
  for (const auto& [option, number, most] :
       std::vector<std::array<std::string, 3>>{{"--gpus", "2147483647", "1024"},
                                               {"--gpus", "4294967297", "1024"},
                                               {"--nodes", "2147483647", "100000"},
                                               {"--nodes", "9223372036854775807", "100000"}}) {
    const Outcome got = sherd(estimate({option, number}));
    EXPECT_EQ(got.code, 2) << got.err;
    EXPECT_THAT(got.err, HasSubstr(cat(option, " must be at most ", most, ", not ", number)));
  }
  const Outcome rank = sherd(estimate({"--rank", "4294967296"}));
  EXPECT_EQ(rank.code, 2);
  EXPECT_THAT(rank.err, HasSubstr("--rank 4294967296 is not one of the 1 ranks"));
  const Outcome ranks = sherd(train({"--ranks", "4294967297"}));
  EXPECT_EQ(ranks.code, 2);
  EXPECT_THAT(ranks.err, HasSubstr("--ranks must be at most 1024"));
  const Outcome largest =
      sherd(estimate({"--gpus", "1024", "--nodes", "100000", "--set", "train_batch_size=102400000"}));
  EXPECT_TRUE(largest.code == 0 || largest.code == 3) << largest.err;
  EXPECT_THAT(largest.out, HasSubstr("all (102400000)"));
}

TEST_F(EstimateProgram, TrainRefusesWhatCannotFitAndItsProposalFits) {
  const std::vector<std::string> tight{"--ranks", "2", "--set", "device.device_memory_limit=400KB"};
  const Outcome refused = sherd(train(tight));
  EXPECT_EQ(refused.code, 1);
  EXPECT_EQ(count(refused.err, "sherd: error:"), 1u) << refused.err;
  EXPECT_EQ(count(refused.err, "\n"), 1u) << refused.err;
  EXPECT_THAT(refused.err, HasSubstr("this run does not fit: the device tier of each rank needs"));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "run"));
  std::vector<std::string> mended = tight;
  const std::vector<std::string> change = proposal(refused.err);
  ASSERT_FALSE(change.empty()) << refused.err;
  mended.insert(mended.end(), change.begin(), change.end());
  const Outcome fits = sherd(train(mended));
  EXPECT_EQ(fits.code, 0) << fits.err;

  std::vector<std::string> asked = estimate({"--gpus", "2", "--set", "device.device_memory_limit=400KB"});
  const Outcome told = sherd(asked);
  EXPECT_EQ(told.code, 3) << told.err;
  EXPECT_EQ(told.err, "");
  EXPECT_THAT(told.out, HasSubstr("It does not fit: the device tier"));
  EXPECT_EQ(proposal(told.out), change);
  asked.insert(asked.end(), change.begin(), change.end());
  const Outcome mended_told = sherd(asked);
  EXPECT_EQ(mended_told.code, 0) << mended_told.err;
  EXPECT_THAT(mended_told.out, HasSubstr("It fits.\n"));

  const Outcome as_json =
      sherd(estimate({"--gpus", "2", "--set", "device.device_memory_limit=400KB", "--json"}));
  EXPECT_EQ(as_json.code, 3) << as_json.err;
  EXPECT_THAT(as_json.out, HasSubstr("\"fits\": false"));
}

TEST_F(EstimateProgram, PlansForGpusThatAreNotHere) {
  const std::vector<std::string> on_gpus{"--set", "device.type=cuda", "--set",
                                         "device.device_memory_limit=40MiB"};
  std::vector<std::string> as_json = on_gpus;
  as_json.push_back("--json");
  const Outcome cpu = sherd(estimate({"--json"})), gpu = sherd(estimate(as_json));
  ASSERT_EQ(gpu.code, 0) << gpu.err;
  EXPECT_THAT(cpu.out, HasSubstr("\"device\": \"cpu\""));
  EXPECT_THAT(gpu.out, HasSubstr("\"device\": \"cuda\""));
  EXPECT_THAT(gpu.out, HasSubstr("\"fits\": true"));
  for (const char* category : {"parameters", "gradients", "optimizer"})
    EXPECT_EQ(number(gpu.out, {"tiers", "device", "peak", category}),
              number(cpu.out, {"tiers", "device", "peak", category}));
  EXPECT_GE(number(gpu.out, {"tiers", "device", "peak", "workspace"}), 32u << 20);
  EXPECT_GT(number(gpu.out, {"tiers", "host", "peak", "workspace"}), 0u);
  const Outcome table = sherd(estimate({"--set", "device.type=cuda"}));
  EXPECT_THAT(table.out, HasSubstr("1 rank on 1 machine with GPUs"));
  EXPECT_THAT(table.out, HasSubstr("no GPU here: each must hold the device tier"));
  EXPECT_THAT(table.out, HasSubstr("beside it, CUDA"));
  EXPECT_THAT(table.out, Not(HasSubstr("beside it, NCCL"))) << "one rank has no peers";
  EXPECT_THAT(sherd(estimate({"--gpus", "2", "--set", "device.type=cuda"})).out,
              HasSubstr("beside it, NCCL"));
  as_json.insert(as_json.end(), {"--gpus", "2"});
  EXPECT_EQ(number(sherd(estimate(as_json)).out, {"beside_the_books", "nccl"}),
            comm::nccl_memory(2, 2, comm::nccl_channels()));
  EXPECT_EQ(table.out.find("It fits"), std::string::npos) << table.out;
  EXPECT_THAT(
      table.out,
      HasSubstr(
          "Whether it fits is not known, as no GPU is seen here. The memory of this machine is enough.\n"));
  EXPECT_EQ(table.code, 0) << table.err;
}

TEST_F(EstimateProgram, EveryRankOfALauncherRefuses) {
  if (!SHERD_TEST_MPI) GTEST_SKIP() << "this build has no MPI";
  const Outcome refused = sherd_mpi(2, train({"--set", "device.device_memory_limit=400KB"}));
  EXPECT_EQ(count(refused.err, "exit code 1\n"), 2u) << refused.err;
  EXPECT_THAT(refused.err, HasSubstr("this run does not fit"));
}

}  // namespace
}  // namespace sherd::cli
