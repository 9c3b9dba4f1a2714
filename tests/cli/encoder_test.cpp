// Encoders as a person has them: trained by masked tokens, embedding texts, in and out of Hugging Face's
// files.
#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "cli/train_fixture.h"

namespace sherd::cli {
namespace {

class Encoder : public Train {
 protected:
  Encoder() {
    const Outcome prepared =
        sherd({"prepare", "--input", in("text.txt"), "--tokenizer",
               "hf:" SHERD_SOURCE_DIR "/tests/data/tokenizers/bert.json", "--output", in("masked")});
    require(prepared.code == 0, prepared.err);
  }
  std::string in(const std::string& name) const { return (folder_ / name).string(); }
  /// Trains BERT's style on the texts.
  Outcome train_bert(std::vector<std::string> more = {}) const {
    for (const char* set :
         {"model.type=bert", "model.dropout=0", "model.embedding_dropout=0", "model.attention_dropout=0"})
      more.insert(more.end(), {"--set", set});
    more.insert(more.end(), {"--set", "data.path=" + in("masked")});
    return sherd(train(more));
  }
  /// The lines of an embedding file.
  static std::vector<std::vector<double>> embeddings(const std::string& lines) {
    std::vector<std::vector<double>> out;
    std::istringstream in(lines);
    for (std::string line; std::getline(in, line);)
      out.push_back(nlohmann::json::parse(line).at("embedding").get<std::vector<double>>());
    return out;
  }
  static void expect_alike(const std::vector<std::vector<double>>& a,
                           const std::vector<std::vector<double>>& b) {
    ASSERT_EQ(a.size(), b.size());
    for (std::size_t i = 0; i < a.size(); ++i) {
      ASSERT_EQ(a[i].size(), b[i].size());
      for (std::size_t k = 0; k < a[i].size(); ++k) EXPECT_NEAR(a[i][k], b[i][k], 0.02) << i << ", " << k;
    }
  }
};

/// The same masks whatever the number of ranks, and others in each epoch.
TEST_F(Encoder, LearnsMaskedTokensOnAnyNumberOfRanks) {
  const std::vector<std::string> longer{"--steps", "40", "--metrics", in("one.jsonl")};
  const Outcome one = train_bert(longer);
  ASSERT_EQ(one.code, 0) << one.err;
  const std::vector<std::string> losses = metric("one.jsonl", "loss");
  ASSERT_EQ(losses.size(), 40u);
  EXPECT_LT(std::stod(losses.back()), 0.8 * std::stod(losses.front()));
  std::filesystem::remove_all(folder_ / "run");
  for (const std::string packing : {"stream", "documents"}) {
    std::vector<std::string> found[2];
    for (const int ranks : {1, 2}) {
      const std::string file = cat("ranks", ranks, packing, ".jsonl");
      const Outcome got = train_bert({"--ranks", std::to_string(ranks), "--metrics", in(file), "--set",
                                      "data.packing=" + packing, "--set", "training.whole_word_mask=true",
                                      "--set", "train_micro_batch_size_per_gpu=2"});
      ASSERT_EQ(got.code, 0) << got.err;
      found[ranks - 1] = metric(file, "loss");
      std::filesystem::remove_all(folder_ / "run");
    }
    ASSERT_EQ(found[0].size(), 6u);
    EXPECT_EQ(found[0], found[1]) << packing;
  }
}

TEST_F(Encoder, EmbedsTextsAndComesBackFromHuggingFacesFiles) {
  const Outcome trained = train_bert();
  ASSERT_EQ(trained.code, 0) << trained.err;
  write_text(folder_ / "texts.txt",
             "The 3 shards of jar 5\nrow 2\nThe 3 shards of jar 5.\nlie in row 4.\n");
  const auto embed = [&](const std::string& run, std::vector<std::string> more) {
    more.insert(more.begin(), {"generate", "--checkpoint", in(run), "--embed", "--prompts", in("texts.txt")});
    const Outcome out = sherd(more);
    EXPECT_EQ(out.code, 0) << out.err;
    return embeddings(out.out);
  };
  const auto together = embed("run", {});
  ASSERT_EQ(together.size(), 4u);
  ASSERT_EQ(together[0].size(), 32u);
  EXPECT_NE(together[0], together[1]);
  expect_alike(embed("run", {"--batch-size", "1"}), together);
  expect_alike(embed("run", {"--set", "parallel.tensor=2", "--ranks", "2"}), together);
  expect_alike(embed("run", {"--set", "parallel.pipeline=2", "--ranks", "2"}), together);
  const auto first = embed("run", {"--pooling", "cls"});
  EXPECT_NE(first, together);
  EXPECT_NE(embed("run", {"--pooling", "last"}), first);
  const Outcome exported = sherd({"export", in("run"), "--output", in("hf"), "--dtype", "fp32"});
  ASSERT_EQ(exported.code, 0) << exported.err;
  EXPECT_THAT(read_text(folder_ / "hf" / "config.json"), HasSubstr("\"BertForMaskedLM\""));
  const Outcome imported = sherd({"import", in("hf"), "--output", in("imported"), "--dtype", "bf16"});
  ASSERT_EQ(imported.code, 0) << imported.err;
  expect_alike(embed("imported", {}), together);
  // What an encoder does not do is said with what to do.
  const Outcome continued = sherd({"generate", "--checkpoint", in("run"), "--prompt", "The"});
  EXPECT_EQ(continued.code, 2);
  EXPECT_THAT(continued.err, HasSubstr("--embed"));
  write_text(folder_ / "task.jsonl", R"({"text": "The 3 shards"})");
  const Outcome scored = sherd({"evaluate", "--checkpoint", in("run"), "--tasks", in("task.jsonl")});
  EXPECT_EQ(scored.code, 2);
  EXPECT_THAT(scored.err, HasSubstr("loss of masked tokens"));
  const Outcome lengthy = sherd({"generate", "--checkpoint", in("run"), "--embed", "--prompt",
                                 "The 3 shards of jar 5 lie in row 2, and the others somewhere else again."});
  EXPECT_EQ(lengthy.code, 1);
  EXPECT_THAT(lengthy.err, HasSubstr("and the model takes 16"));
}

TEST_F(Encoder, NeedsATokenForMasks) {
  const Outcome without = sherd(train({"--set", "model.type=bert"}));
  EXPECT_EQ(without.code, 2);
  EXPECT_THAT(without.err, HasSubstr("has no token [MASK] or <mask>"));
}

}  // namespace
}  // namespace sherd::cli
