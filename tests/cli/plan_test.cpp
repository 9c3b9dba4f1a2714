// `sherd plan`, and machines that `sherd bench machine` measures.
#include <cstdlib>

#include "cli/train_fixture.h"
#include "config/machine.h"

namespace sherd::cli {
namespace {

double number_in(const std::string& json, const std::string& key) {
  return std::stod(json.substr(json.find(':', json.find('"' + key + '"')) + 1));
}

class PlanProgram : public Train {
 protected:
  PlanProgram() {
    write_text(folder_ / "machine.json", R"({"name": "a box of two", "devices": 2,
      "rates": [{"bandwidth": 1e10, "products": [{"dtype": "bf16", "peak": 1e11}]}],
      "links": [{"name": "memory", "bandwidth": 5e9}], "host": {"memory": "64GB"}})");
  }
  std::string machine() const { return (folder_ / "machine.json").string(); }
  Outcome plan(const std::vector<std::string>& more = {}) const {
    std::vector<std::string> words{"plan", "--config", config(), "--machine", machine()};
    words.insert(words.end(), more.begin(), more.end());
    return sherd(words);
  }
};

TEST_F(PlanProgram, WritesAConfigurationThatTrainTakes) {
  const std::string file = (folder_ / "best.json").string();
  const Outcome found = plan({"--output", file, "--tokens", "1G"});
  ASSERT_EQ(found.code, 0) << found.err;
  EXPECT_THAT(found.out, HasSubstr("2 ranks, 1 machine of a box of two"));
  EXPECT_THAT(found.out, HasSubstr("layout "));
  EXPECT_THAT(found.out, HasSubstr("1.00G tokens take "));
  EXPECT_THAT(found.out,
              HasSubstr(cat("The best is written to ", file, ": sherd train --config ", file, " --ranks 2")));
  const Outcome trained = sherd({"train", "--config", file, "--ranks", "2"});
  EXPECT_EQ(trained.code, 0) << trained.err;
  const Outcome as_is = sherd({"plan", "--config", file, "--machine", machine(), "--as-is", "--json"});
  EXPECT_THAT(as_is.out, HasSubstr("\"tried\": 1,"));
  // `estimate` prices the same run alike.
  const Outcome estimate =
      sherd({"estimate", "--config", file, "--ranks", "2", "--machine", machine(), "--json"});
  EXPECT_EQ(number_in(estimate.out, "step_s"), number_in(as_is.out, "step_s"));
  const Outcome tight = sherd({"estimate", "--config", file, "--ranks", "2", "--machine", machine(), "--set",
                               "device.device_memory_limit=400KB"});
  EXPECT_THAT(tight.out, HasSubstr(", by the rates of a box of two"));
  EXPECT_EQ(tight.out.find("inf %"), std::string::npos) << tight.out;
}

TEST_F(PlanProgram, KeepsGivenKeysAndSaysWhatIsMissing) {
  const Outcome json = plan({"--json", "--set", "zero_optimization.stage=3"});
  ASSERT_EQ(json.code, 0) << json.err;
  EXPECT_THAT(json.out, HasSubstr("\"zero_optimization.stage\": \"3\""));
  EXPECT_EQ(json.out.find("\"zero_optimization.stage\": \"1\""), std::string::npos);
  const auto refused = [&](const std::vector<std::string>& words, int code, const std::string& text) {
    const Outcome outcome = plan(words);
    EXPECT_EQ(outcome.code, code) << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr(text));
    EXPECT_EQ(count(outcome.err, "\n"), 1u) << outcome.err;
  };
  refused({"--goal", "speed"}, 2, "unknown goal 'speed'");
  refused({"--set", "train_batch_size=null"}, 2, "--global-batch");
  refused({"--nodes", "0"}, 2, "--nodes");
  refused({"--as-is", "--global-batch", "8"}, 2, "--as-is searches nothing");
  refused({"--set", "zero_optimization.offload_optimizer.device=cpu"}, 2, "no host.update");
  write_text(folder_ / "machine.json", R"({"name": "nothing"})");
  refused({}, 2, "rates");
  std::filesystem::remove(folder_ / "machine.json");
  refused({}, 1, "cannot read the machine");
}

TEST_F(PlanProgram, TellsOfGeneration) {
  const Outcome table =
      plan({"--generate", "--prompt-tokens", "8", "--max-tokens", "4", "--batch-sizes", "1,2"});
  ASSERT_EQ(table.code, 0) << table.err;
  EXPECT_THAT(table.out, HasSubstr("prompts of 8 tokens, 4 that follow"));
  EXPECT_EQ(count(table.out, "\n"), 8u) << "two numbers of ranks, two batches: " << table.out;
  const Outcome lonely = plan({"--max-tokens", "4"});
  EXPECT_EQ(lonely.code, 2);
  EXPECT_THAT(lonely.err, HasSubstr("--max-tokens belongs to --generate"));
  const Outcome longer = plan({"--generate", "--prompt-tokens", "16", "--max-tokens", "2"});
  EXPECT_EQ(longer.code, 2);
  EXPECT_THAT(longer.err, HasSubstr("model.seq_length"));
}

TEST_F(PlanProgram, EndsWithThreeWhereNothingFits) {
  write_text(folder_ / "machine.json", R"({"name": "tiny", "devices": 2, "memory": "1GiB",
      "rates": [{"bandwidth": 1e10, "products": [{"dtype": "bf16", "peak": 1e11}]}],
      "links": [{"name": "a cable", "bandwidth": 1e9}]})");
  const Outcome none = plan();
  EXPECT_EQ(none.code, 3) << none.err;
  EXPECT_THAT(none.out, HasSubstr("Nothing fits: the memory of a GPU needs"));
  const Outcome as_is = plan({"--as-is"});
  EXPECT_EQ(as_is.code, 3) << as_is.err;
  EXPECT_THAT(as_is.out, HasSubstr("It does not fit: the memory of a GPU needs"));
}

TEST_F(PlanProgram, AMeasuredMachinePredictsWhatTrainingTakes) {
  const std::string file = (folder_ / "here.json").string();
  const Outcome measured = sherd({"bench", "machine", "--output", file, "--rounds", "1", "--width", "256"});
  ASSERT_EQ(measured.code, 0) << measured.err;
  const Outcome plan =
      sherd({"plan", "--config", config(), "--machine", file, "--gpus", "1", "--as-is", "--json"});
  ASSERT_EQ(plan.code, 0) << plan.err;
  EXPECT_GT(number_in(plan.out, "step_s"), 0);
  EXPECT_LT(number_in(plan.out, "step_s"), 10) << "a tiny model";
  EXPECT_GT(number_in(plan.out, "mfu"), 0);
  EXPECT_LE(number_in(plan.out, "mfu"), 1);
}

/// On emulated GPUs, which SHERD_TEST_PROGRAM has; without one it is told.
TEST_F(PlanProgram, MeasuresGpus) {
  const std::string file = (folder_ / "gpu.json").string();
  const Outcome measured =
      sherd({"bench", "machine", "--device", "cuda", "--output", file, "--rounds", "1", "--width", "64"});
  if (!std::getenv("SHERD_TEST_PROGRAM")) {
    EXPECT_NE(measured.code, 0);
    EXPECT_THAT(measured.err, HasSubstr("device.type"));
    return;
  }
  ASSERT_EQ(measured.code, 0) << measured.err;
  const config::Machine machine = config::read_machine(file);
  EXPECT_TRUE(machine.accelerator());
  ASSERT_EQ(machine.rates.size(), 1u);
  EXPECT_EQ(machine.rates[0].ranks, 0) << "each rank has a GPU of its own";
  EXPECT_GT(machine.rates[0].launch, 0);
  EXPECT_GT(machine.rates[0].latency, 0);
  EXPECT_GT(machine.host.to_device, 0);
  EXPECT_GT(machine.host.from_device, 0);
  EXPECT_GT(machine.host.update, 0);
  const Outcome plan =
      sherd({"plan", "--config", config(), "--machine", file, "--gpus", "1", "--as-is", "--json"});
  ASSERT_EQ(plan.code, 0) << plan.err;
  EXPECT_GT(number_in(plan.out, "step_s"), 0);
}

}  // namespace
}  // namespace sherd::cli
