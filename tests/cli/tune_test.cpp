// `sherd tune`: trials of the real program over a small dataset, and what is kept of them.
#include <nlohmann/json.hpp>

#include "cli/train_fixture.h"

namespace sherd::cli {
namespace {

using Json = nlohmann::json;

class Tune : public Train {
 protected:
  Tune() {
    write_text(folder_ / "machine.json", R"({"name": "a box of two", "devices": 2,
      "rates": [{"bandwidth": 1e10, "products": [{"dtype": "bf16", "peak": 1e11}]}],
      "links": [{"name": "memory", "bandwidth": 5e9}], "host": {"memory": "64GB"}})");
  }
  std::string found() const { return (folder_ / "tune").string(); }
  Outcome tune(const std::vector<std::string>& more = {}) const {
    std::vector<std::string> words{
        "tune",  "--config", config(),  "--machine", (folder_ / "machine.json").string(),
        "--dir", found(),    "--steps", "3",         "--json"};
    words.insert(words.end(), more.begin(), more.end());
    return sherd(words);
  }
  Json read(const std::string& file) const { return Json::parse(read_text(found() + "/" + file)); }
};

TEST_F(Tune, KeepsTheFastestAndWhatItMeasured) {
  const Outcome first = tune({"--top", "3"});
  ASSERT_EQ(first.code, 0) << first.err;
  const Json out = Json::parse(first.out);
  ASSERT_EQ(out.at("layouts").size(), 3u);
  std::vector<double> seconds;
  for (const Json& each : out.at("layouts")) {
    ASSERT_TRUE(each.contains("step_s")) << each.dump();
    seconds.push_back(each.at("step_s"));
    // The median of the steps behind the first, as the trial's own file tells.
    std::istringstream steps(read_text(found() + "/trial-" + std::to_string(seconds.size()) + ".jsonl"));
    std::vector<double> measured;
    for (std::string line; std::getline(steps, line);) measured.push_back(Json::parse(line).at("step_ms"));
    ASSERT_EQ(measured.size(), 3u);
    EXPECT_NEAR(seconds.back() * 1e3, (measured[1] + measured[2]) / 2, 1e-9);
  }
  const auto fastest = std::min_element(seconds.begin(), seconds.end()) - seconds.begin();
  EXPECT_EQ(out.at("best"), fastest);
  EXPECT_EQ(read("best.json"), read(cat("trial-", fastest + 1, ".json")));
  EXPECT_THAT(read_text(found() + "/tune.svg"), HasSubstr("predicted seconds"));
  EXPECT_FALSE(std::filesystem::exists(folder_ / "run")) << "a trial saves nothing";
  // By corrected rates the predictions are nearer, as `plan` tells it of the file: squares of errors, of
  // which the correction is the least, as shares of what was predicted at first. Medians go by the noise of
  // trials.
  std::vector<double> errors;
  double before = 0, after = 0;
  for (std::size_t i = 0; i < seconds.size(); ++i) {
    const Outcome again = sherd({"plan", "--config", cat(found(), "/trial-", i + 1, ".json"), "--machine",
                                 found() + "/machine.json", "--as-is", "--json"});
    ASSERT_EQ(again.code, 0) << again.err;
    const double corrected = Json::parse(again.out).at("plans")[0].at("step_s"),
                 predicted = out.at("layouts")[i].at("predicted_step_s");
    errors.push_back(std::abs(corrected / seconds[i] - 1));
    before += std::pow((seconds[i] - predicted) / predicted, 2);
    after += std::pow((seconds[i] - corrected) / predicted, 2);
  }
  EXPECT_LT(after, before);
  std::sort(errors.begin(), errors.end());
  EXPECT_NEAR(out.at("corrected_median_error"), errors[1], 1e-6);
  // The same call has nothing left to do, and one with more goes on.
  const std::string kept = read_text(found() + "/trials.jsonl");
  const Outcome same = tune({"--top", "3"});
  EXPECT_EQ(same.err, "");
  EXPECT_EQ(Json::parse(same.out).at("median_error"), out.at("median_error"));
  // Fewer ranks are planned, and the file is the machine's all the same.
  EXPECT_EQ(tune({"--top", "1", "--gpus", "1"}).code, 0);
  EXPECT_EQ(read("machine.json").at("devices"), 2);
  const Outcome more = tune({"--top", "4"});
  EXPECT_THAT(more.err, HasSubstr("trial-4 of 4"));
  EXPECT_EQ(count(more.err, "predicted"), 1u) << more.err;
  EXPECT_TRUE(read_text(found() + "/trials.jsonl").starts_with(kept));
}

TEST_F(Tune, ATrialThatFailsIsARow) {
  // The launcher starts one of the two layouts.
  write_text(folder_ / "launcher",
             "case \"$*\" in *trial-1*) echo 'sherd: error: the jar is empty' >&2; exit 1 ;; esac\n"
             "exec \"$@\"\n");
  const std::string launcher = "sh " + (folder_ / "launcher").string();
  const Outcome outcome = tune({"--top", "2", "--launcher", launcher});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  const Json out = Json::parse(outcome.out);
  EXPECT_THAT(out.at("layouts")[0].at("failure").get<std::string>(), HasSubstr("the jar is empty"));
  EXPECT_TRUE(out.at("layouts")[1].contains("step_s"));
  EXPECT_EQ(out.at("best"), 1);
  // A trial that failed is run again, and one that ran is not.
  const Outcome again = tune({"--top", "2", "--launcher", launcher});
  EXPECT_THAT(again.err, HasSubstr("trial-1: the jar is empty"));
  EXPECT_EQ(count(again.err, "trial-2"), 0u) << again.err;
  // It comes last, as it may take all the time again.
  const std::string more = tune({"--top", "3", "--launcher", launcher}).err;
  EXPECT_LT(more.find("trial-3 of 3"), more.find("trial-1 of 3")) << more;
  EXPECT_NE(more.find("trial-1 of 3"), std::string::npos) << more;
}

/// Whether the process is there and no zombie, which waits for a parent that may never look.
bool lives(int process) {
  std::ifstream in(cat("/proc/", process, "/stat"));
  std::string word, name, state;
  return in >> word >> name >> state && state != "Z";
}

/// However a trial ends, what it has started ends with it.
TEST_F(Tune, NothingOutlivesATrial) {
  const std::string launcher = "sh " + (folder_ / "launcher").string();
  for (const bool ends : {true, false}) {
    write_text(folder_ / "launcher", cat("sleep 1000 & echo $! > ", folder_.path().string(), "/asleep; ",
                                         ends ? "echo no hosts; exit 7" : "wait", "\n"));
    const Outcome outcome =
        tune({"--top", "1", "--launcher", launcher, "--trial-minutes", ends ? "5" : "0.05"});
    EXPECT_EQ(outcome.code, 1) << outcome.err;
    EXPECT_THAT(outcome.out,
                HasSubstr(ends ? "ended with exit code 7: no hosts (" : "took longer than 3.0s"));
    const int asleep = std::stoi(read_text(folder_ / "asleep"));
    for (int turn = 0; turn < 500 && lives(asleep); ++turn)
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT_FALSE(lives(asleep)) << "what a trial started has outlived it";
  }
}

TEST_F(Tune, ATrialEndsWithATuneThatIsKilled) {
  const std::filesystem::path number = folder_ / "number";
  write_text(folder_ / "launcher", cat("echo $$ > ", number.string(), ".new; mv ", number.string(), ".new ",
                                       number.string(), "; exec sleep 1000\n"));
  const pid_t run = start_line(
      joined({"tune", "--config", config(), "--machine", (folder_ / "machine.json").string(), "--dir",
              found(), "--top", "1", "--launcher", "sh " + (folder_ / "launcher").string()}),
      "tune.err");
  for (int turn = 0; turn < 3000 && !std::filesystem::exists(number); ++turn)
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  ::kill(run, SIGKILL);
  int status = 0;
  ASSERT_EQ(::waitpid(run, &status, 0), run);
  const int trial = std::stoi(read_text(number));
  for (int turn = 0; turn < 500 && lives(trial); ++turn)
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(lives(trial));
}

TEST_F(Tune, GoesOnWhereASignalStoppedIt) {
  write_text(folder_ / "launcher", cat("case \"$*\" in *trial-2*) touch ", folder_.path().string(),
                                       "/second; sleep 1000 ;; esac\nexec \"$@\"\n"));
  const std::string launcher = "sh " + (folder_ / "launcher").string();
  const std::string words =
      joined({"tune", "--config", config(), "--machine", (folder_ / "machine.json").string(), "--dir",
              found(), "--steps", "3", "--top", "2", "--launcher", launcher});
  const pid_t run = start_line(words, "tune.err");
  for (int turn = 0; turn < 3000 && !std::filesystem::exists(folder_ / "second"); ++turn)
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  ::kill(run, SIGINT);
  int status = 0;
  ASSERT_EQ(::waitpid(run, &status, 0), run);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 130) << status << read_text(folder_ / "tune.err");
  EXPECT_EQ(count(read_text(found() + "/trials.jsonl"), "\n"), 1u);
  write_text(folder_ / "launcher", "exec \"$@\"\n");
  const Outcome again = tune({"--top", "2", "--launcher", launcher});
  EXPECT_EQ(again.code, 0) << again.err;
  EXPECT_EQ(count(again.err, "trial-1"), 0u) << again.err;
}

TEST_F(Tune, SaysWhatItCannotDo) {
  const auto refused = [&](const std::vector<std::string>& words, int code, const std::string& text) {
    const Outcome outcome = tune(words);
    EXPECT_EQ(outcome.code, code) << outcome.err;
    EXPECT_THAT(outcome.err, HasSubstr(text));
    EXPECT_EQ(count(outcome.err, "\n"), 1u) << outcome.err;
  };
  refused({"--goal", "memory"}, 2, "measures time");
  refused({"--nodes", "2"}, 2, "ranks of 2 machines need a launcher");
  refused({"--steps", "1"}, 2, "--steps");
  refused({"--minutes", "0"}, 2, "--minutes must be more than 0");
  refused({"--set", "model.num_layers=2000", "--set", "model.hidden_size=8192"}, 3,
          "nothing fits: the smallest layout holds at least ");
  EXPECT_FALSE(std::filesystem::exists(found())) << "nothing was tried";
}

}  // namespace
}  // namespace sherd::cli
