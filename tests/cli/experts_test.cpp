// The lines of `sherd train` about experts.
#include "cli/train_fixture.h"

namespace sherd::cli {
namespace {

TEST_F(Train, TellsWhatRoutersDo) {
  const std::vector<std::string> keys{"--ranks",   "2",
                                      "--metrics", (folder_ / "m.jsonl").string(),
                                      "--set",     "model.moe.experts=4",
                                      "--set",     "model.moe.ffn_hidden_size=16",
                                      "--set",     "model.moe.bias_update=0.01"};
  const Outcome got = sherd(train(keys));
  ASSERT_EQ(got.code, 0) << got.err;
  for (const char* word : {"most / mean", "balance loss", "blocks.0.mlp", "blocks.1.mlp"})
    EXPECT_THAT(got.out, HasSubstr(word));
  const std::string lines = read_text(folder_ / "m.jsonl");
  EXPECT_EQ(count(lines, R"("moe":{"balance_loss":)"), 6u);
  EXPECT_EQ(count(lines, R"("layers":["blocks.0.mlp","blocks.1.mlp"],"imbalance":[)"), 6u);
  EXPECT_EQ(count(lines, R"("dropped":[0,0])"), 6u);
  const std::size_t at = lines.rfind(R"("tokens":[[)");
  ASSERT_NE(at, std::string::npos);
  std::int64_t choices = 0;
  for (std::size_t i = at + 10; lines[i] != '}'; ++i) {
    if (lines[i] < '0' || lines[i] > '9') continue;
    choices += std::strtoll(&lines[i], nullptr, 10);
    i = lines.find_first_not_of("0123456789", i) - 1;
  }
  EXPECT_EQ(choices, 2 * 4 * 16 * 2);  // layers, samples, their tokens, experts of each

  EXPECT_THAT(read_text(folder_ / "run" / "global_step6" / "manifest.json"), HasSubstr("\"step_states\""));
  std::vector<std::string> more = keys;
  more.insert(more.end(), {"--resume", "--steps", "8", "--set", "parallel.expert=2"});
  const Outcome resumed = sherd(train(more));
  ASSERT_EQ(resumed.code, 0) << resumed.err;
  EXPECT_EQ(count(resumed.err, "begins anew"), 0u) << resumed.err;
  const Outcome text = sherd({"generate", "--checkpoint", (folder_ / "run").string(), "--prompt", "The 3",
                              "--max-tokens", "4", "--seed", "1"});
  EXPECT_EQ(text.code, 0) << text.err;  // on one rank, which has all experts
}

}  // namespace
}  // namespace sherd::cli
