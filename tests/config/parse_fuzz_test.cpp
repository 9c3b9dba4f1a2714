// Damaged configurations: each is a Config, or an Error{config} in few words, and nothing else.
#include <chrono>
#include <filesystem>

#include "config/support.h"
#include "support/mutate.h"
#include "support/places.h"
#include "support/temp_folder.h"

namespace sherd::config {
namespace {

/// An error's text is at most this long: a file's own problems, and a line that counts the rest.
constexpr std::size_t longest_error = 40'000;

std::vector<std::string> shipped_files() {
  std::vector<std::string> out;
  for (const auto& entry : std::filesystem::directory_iterator(SHERD_SOURCE_DIR "/configs"))
    if (entry.path().extension() == ".json") out.push_back(testing::read_text(entry.path()));
  return out;
}

std::vector<std::string> odd_texts() {
  return {"",
          "{}",
          "[",
          "null",
          "\"\"",
          "{\"a\":{\"a\":{\"a\":[[[]]]}}}",
          "{\"_note\": [1, {\"comment\": 2}]} // end",
          "{/* a */\"train_batch_size\": 1e2,}",
          "\xef\xbb\xbf{\"steps_per_print\": 10}",
          R"({"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}, "scheduler": {"type": "OneCycle",
              "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3}}})",
          R"({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/d"}},
              "aio": {"block_size": 65536}, "tensor_parallel": {"tp": {"tp_size": 1}}, "amp": {"enabled": false}})",
          R"({"data": {"path": "x", "split": [0.9, 0.1]}, "device": {"host_memory_limit": "8 GB"}})"};
}

/// Parses it, and what it dumps to.
void parse(const std::string& text, const std::vector<std::string>& overrides) {
  try {
    const Config config = parse_text(text, "run.json", overrides);
    EXPECT_TRUE(parse_text(dump(config)) == config) << dump(config);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::config) << error.what();
    EXPECT_LT(std::string(error.what()).size(), longest_error) << error.what();
  }
}

TEST(ParseFuzz, DamagedTextsAreErrorsOrConfigurations) {
  std::vector<std::string> texts = shipped_files(), odd = odd_texts();
  ASSERT_GE(texts.size(), 12u);
  texts.insert(texts.end(), odd.begin(), odd.end());
  const std::vector<std::string> assignments = {"zero_optimization.stage=3", "optimizer.params.lr=1e-3",
                                                "data.split=[0.9,0.1]", "training.save_dir=runs/x",
                                                "_a={\"b\":1}"};
  testing::Mutator mutator(20);
  for (int round = 0; round < testing::fuzz_rounds(10'000); ++round) {
    const std::string text = mutator.mutate(texts[mutator.pick(texts.size())]);
    std::vector<std::string> overrides;
    if (mutator.pick(4) == 0)
      overrides.push_back(mutator.mutate(assignments[mutator.pick(assignments.size())]));
    SCOPED_TRACE(cat("round ", round, ": ", text, overrides.empty() ? "" : " --set " + overrides[0]));
    const auto begin = std::chrono::steady_clock::now();
    ASSERT_NO_THROW(parse(text, overrides));
    ASSERT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace sherd::config
