// `sherd generate` as a person runs it: prompts of a file, stop strings, weights off the device.
#include <nlohmann/json.hpp>
#include <sstream>

#include "cli/train_fixture.h"

namespace sherd::cli {
namespace {

class GenerateProgram : public Train {
 protected:
  void SetUp() override {
    const Outcome trained = sherd(train(
        {"--set", "training.steps=40", "--set", "optimizer.params.lr=0.01", "--set", "model.seq_length=64"}));
    ASSERT_EQ(trained.code, 0) << trained.err;
  }
  Outcome generate(const std::vector<std::string>& more) const {
    std::vector<std::string> all{"generate", "--checkpoint", (folder_ / "run").string()};
    all.insert(all.end(), more.begin(), more.end());
    return sherd(all);
  }
  static std::vector<nlohmann::json> lines(const std::string& text) {
    std::vector<nlohmann::json> out;
    std::istringstream in(text);
    for (std::string line; std::getline(in, line);) out.push_back(nlohmann::json::parse(line));
    return out;
  }
};

TEST_F(GenerateProgram, CompletesThePromptsOfAFileAsEachAlone) {
  const std::vector<std::string> prompts{"The", "The 3 shards of jar 12 lie", "T", "row 4.", "The 5 sh"};
  std::string text;
  for (const std::string& prompt : prompts) text += prompt + "\n";
  write_text(folder_ / "prompts.txt", text);
  const std::string file = (folder_ / "prompts.txt").string(), out = (folder_ / "out.jsonl").string();
  for (const std::string temperature : {"0", "1.2"}) {
    std::vector<std::vector<nlohmann::json>> all;
    for (const std::string batch : {"1", "3", "8"}) {
      const Outcome got = generate({"--prompts", file, "--output", out, "--batch-size", batch, "--max-tokens",
                                    "25", "--temperature", temperature, "--top-p", "0.95"});
      ASSERT_EQ(got.code, 0) << got.err;
      EXPECT_THAT(got.err, HasSubstr("5 texts: read 44 tokens in "));
      EXPECT_THAT(got.err, HasSubstr("keys and values "));
      all.push_back(lines(read_text(out)));
      ASSERT_EQ(all.back().size(), prompts.size());
      EXPECT_EQ(all.back(), all.front()) << "batches of " << batch;
    }
    for (std::size_t i = 0; i < prompts.size(); ++i) {
      EXPECT_EQ(all[0][i]["prompt"], prompts[i]);
      if (temperature != "0" && i > 0) continue;  // of later prompts, a stream of their own
      const Outcome alone = generate(
          {"--prompt", prompts[i], "--max-tokens", "25", "--temperature", temperature, "--top-p", "0.95"});
      EXPECT_EQ(alone.out, prompts[i] + all[0][i]["completion"].get<std::string>() + "\n");
    }
  }
  const Outcome to_stdout = generate({"--prompts", file, "--max-tokens", "3", "--temperature", "0"});
  ASSERT_EQ(lines(to_stdout.out).size(), 5u);
  EXPECT_EQ(lines(to_stdout.out)[0]["tokens"], 3);
  EXPECT_EQ(lines(to_stdout.out)[0]["finish"], "length");
}

TEST_F(GenerateProgram, StopsBeforeAStopString) {
  const std::vector<std::string> greedy{"--prompt", "The 3", "--temperature", "0", "--max-tokens", "60"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), greedy.begin(), greedy.end());
    return generate(more);
  };
  const Outcome whole = with({});
  ASSERT_EQ(whole.code, 0) << whole.err;
  ASSERT_GT(whole.out.size(), 20u);
  const std::string stop = whole.out.substr(14, 3);  // three tokens: bytes
  const std::size_t at = whole.out.find(stop, 5);
  const Outcome stopped = with({"--stop", "nowhere", "--stop", stop});
  EXPECT_EQ(stopped.out, whole.out.substr(0, at) + "\n");
  write_text(folder_ / "p.jsonl", "{\"prompt\": \"The 3\"}\n");
  const Outcome file = generate({"--prompts", (folder_ / "p.jsonl").string(), "--temperature", "0",
                                 "--max-tokens", "60", "--stop", stop});
  ASSERT_EQ(lines(file.out).size(), 1u) << file.err;
  EXPECT_EQ(lines(file.out)[0]["completion"], whole.out.substr(5, at - 5));
  EXPECT_EQ(lines(file.out)[0]["finish"], "stop");
}

/// Weights of any run are kept in few bits: what bf16 holds says the same, and NF4 takes less memory.
TEST_F(GenerateProgram, KeepsWeightsInFewBits) {
  const std::string wide = (folder_ / "wide").string();
  const Outcome trained = sherd(train(
      {"--set", "training.steps=1", "--set", "model.hidden_size=512", "--set", "training.save_dir=" + wide}));
  ASSERT_EQ(trained.code, 0) << trained.err;
  const auto said = [&](const std::string& format, const std::string& memory) {
    return sherd({"generate", "--checkpoint", wide, "--prompt", "The 3 shards", "--temperature", "0",
                  "--max-tokens", "4", "--base-format", format, "--device-memory", memory});
  };
  const Outcome whole = said("compute", "0");
  ASSERT_EQ(whole.code, 0) << whole.err;
  EXPECT_EQ(said("bf16", "0").out, whole.out);
  // 6.3 million weights of linear layers; a processor with AVX2 alone decodes the largest into fp32.
  const Outcome in_4_bits = said("nf4", "12MiB");
  EXPECT_EQ(in_4_bits.code, 0) << in_4_bits.err;
  EXPECT_THAT(said("compute", "12MiB").err, HasSubstr("--base-format nf4"));
}

TEST_F(GenerateProgram, SaysWhatDoesNotGoTogether) {
  const auto refused = [&](const std::vector<std::string>& more, const std::string& why) {
    const Outcome got = generate(more);
    EXPECT_EQ(got.code, 2) << why;
    EXPECT_THAT(got.err, HasSubstr(why));
  };
  refused({}, "give --prompt T or --prompts FILE");
  refused({"--prompt", "a", "--prompts", "b"}, "not both");
  refused({"--prompt", "a", "--output", "b"}, "--output goes with --prompts");
  refused({"--prompt", "a", "--offload", "disk"}, "--offload is cpu or nvme, not 'disk'");
  refused({"--prompt", "a", "--offload", "nvme"}, "needs --nvme-path DIR");
  refused({"--prompt", "a", "--nvme-path", "x"}, "goes with --offload nvme");
  refused({"--prompt", "a", "--base-format", "nf5"}, "--base-format is compute, bf16, int8, nf4, ");
  EXPECT_THAT(generate({"--prompt", "a", "--top-p", "1.5"}).err, HasSubstr("top_p is a probability"));
  EXPECT_THAT(generate({"--prompts", "/none"}).err, HasSubstr("/none"));
  EXPECT_THAT(generate({"--prompt", "a", "--ranks", "3", "--set", "parallel.tensor=2"}).err,
              HasSubstr("3 ranks are not a multiple of the 2 that share the model"));
}

/// Weights of 4.7 MiB on a device of 3. (What products take beside them depends on the processor.)
TEST_F(Train, AModelLargerThanItsDeviceGeneratesTheSame) {
  const Outcome trained = sherd(train({"--set", "training.steps=3", "--set", "model.hidden_size=128", "--set",
                                       "model.num_layers=12", "--set", "model.seq_length=64"}));
  ASSERT_EQ(trained.code, 0) << trained.err;
  const std::string nvme = (folder_ / "nvme").string();
  std::filesystem::create_directory(nvme);
  write_text(folder_ / "prompts.txt", "The 3\nrow 1. The 6 shards\nThe\n");
  const auto generate = [&](std::vector<std::string> more) {
    more.insert(more.begin(), {"generate", "--checkpoint", (folder_ / "run").string(), "--prompts",
                               (folder_ / "prompts.txt").string(), "--max-tokens", "30"});
    return sherd(more);
  };
  const Outcome whole = generate({}), none = generate({"--device-memory", "3MiB"});
  ASSERT_EQ(whole.code, 0) << whole.err;
  EXPECT_NE(none.code, 0);
  EXPECT_THAT(none.err, HasSubstr("the limit of 3145728"));
  EXPECT_THAT(none.err, HasSubstr("--offload nvme --nvme-path DIR"));
  for (const std::vector<std::string>& offload :
       {std::vector<std::string>{"--offload", "nvme", "--nvme-path", nvme}, {"--offload", "cpu"}}) {
    std::vector<std::string> limited = offload;
    limited.insert(limited.end(), {"--device-memory", "3MiB"});
    const Outcome got = generate(limited);
    EXPECT_EQ(got.code, 0) << got.err;
    EXPECT_EQ(got.out, whole.out) << offload[1];
  }
  const Outcome shared = generate({"--ranks", "3", "--device-memory", "4MiB"});  // a third of them each
  EXPECT_EQ(shared.code, 0) << shared.err;
  EXPECT_EQ(shared.out, whole.out);
}

}  // namespace
}  // namespace sherd::cli
