// Parameter groups through the program: estimate, train, resume, generate.
#include "cli/train_fixture.h"

namespace sherd::cli {
namespace {

TEST_F(Train, ParameterGroupsShowTheirRates) {
  write_text(folder_ / "groups.json", R"({
  "optimizer": {"groups": [{"match": "*.bias", "lr": 0.006},
                           {"match": ["tokens.*", "blocks.1.*"], "type": "SGD", "lr": 0.03, "momentum": 0.5}]},
  "training": {"log_interval": 2}})");
  const auto with_groups = [&](std::vector<std::string> arguments) {
    arguments.insert(arguments.begin() + 3, (folder_ / "groups.json").string());
    arguments.insert(arguments.begin() + 3, "--config");
    return sherd(arguments);
  };
  const Outcome estimate = with_groups({"estimate", "--config", config(), "--gpus", "2"});
  EXPECT_EQ(estimate.code, 0) << estimate.err;
  const std::string metrics = (folder_ / "m.jsonl").string();
  const Outcome first = with_groups(train({"--ranks", "2", "--metrics", metrics}));
  ASSERT_EQ(first.code, 0) << first.err;
  EXPECT_EQ(metric("m.jsonl", "lr"), std::vector<std::string>(6, "0.003"));
  EXPECT_EQ(count(read_text(metrics), R"("lr":0.003,"lrs":[0.003,0.006,0.03],)"), 6u);
  EXPECT_EQ(count(first.err, "  lr 3.000e-03  lrs 3.000e-03,6.000e-03,3.000e-02  grad_norm"), 3u)
      << first.err;
  const Outcome more = with_groups(train({"--ranks", "1", "--resume", "--steps", "8", "--set",
                                          "optimizer.groups[0].lr=0.0015", "--metrics", metrics}));
  EXPECT_EQ(more.code, 0) << more.err;
  EXPECT_THAT(more.err, HasSubstr("optimizer.groups[0].lr was 0.006 and is 0.0015"));
  EXPECT_EQ(count(read_text(metrics), R"("lrs":[0.003,0.0015,0.03],)"), 2u);
  const Outcome text = sherd(
      {"generate", "--checkpoint", (folder_ / "run").string(), "--prompt", "The 3", "--max-tokens", "4"});
  EXPECT_EQ(text.code, 0) << text.err;
}

TEST_F(Train, APatternForNoParameterEndsTheProgramAtOnce) {
  for (const char* command : {"train", "estimate"}) {
    const Outcome got = sherd({command, "--config", config(), "--set",
                               R"(optimizer.groups=[{"match": ["*.bias", "blocks.2.att*"]}])"});
    EXPECT_EQ(got.code, 2) << command;
    EXPECT_THAT(got.err, HasSubstr("optimizer.groups[0]: no parameter of the model matches"));
    EXPECT_THAT(got.err, HasSubstr("blocks.2.att*"));
    EXPECT_EQ(count(got.err, "\n"), 1u) << got.err;
  }
}

}  // namespace
}  // namespace sherd::cli
