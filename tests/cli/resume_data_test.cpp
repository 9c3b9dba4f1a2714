// Checkpoints and their training data: the tokenizer goes along, another one is refused, other changes are
// told.
#include "cli/train_fixture.h"
#include "data/sample_text.h"

namespace sherd::cli {
namespace {

constexpr const char* resuming = "] resuming ";

class ResumeData : public Train {
 protected:
  /// A dataset NAME of its own text, with a SentencePiece model of 320 ids of its own.
  std::string tokens(const std::string& name, unsigned seed) const {
    write_text(folder_ / (name + ".txt"), data::sample_text(20000, seed));
    return prepared(name, "spm-train:320");
  }
  std::string prepared(const std::string& name, const std::string& tokenizer) const {
    const std::string to = (folder_ / name).string();
    const Outcome got = sherd({"prepare", "--input", to + ".txt", "--tokenizer", tokenizer, "--output", to});
    require(got.code == 0, got.err);
    return to;
  }
  Outcome train_on(const std::string& data, std::vector<std::string> more = {}) const {
    more.insert(more.end(), {"--set", "data.path=" + data});
    return sherd(train(more));
  }
  Outcome generate() const {
    return sherd({"generate", "--checkpoint", (folder_ / "run").string(), "--prompt", "kato misal",
                  "--max-tokens", "12", "--seed", "3"});
  }
};

TEST_F(ResumeData, GenerateUsesTheTokenizerThatWasTrainedOn) {
  const std::string a = tokens("a", 1), b = tokens("b", 2);
  ASSERT_NE(read_text(a + ".model"), read_text(b + ".model"));
  const Outcome trained = train_on(a, {"--steps", "1", "--ranks", "2"});
  ASSERT_EQ(trained.code, 0) << trained.err;
  EXPECT_EQ(read_text(folder_ / "run" / "global_step1" / "tokenizer.model"), read_text(a + ".model"));
  const Outcome first = generate();
  ASSERT_EQ(first.code, 0) << first.err;

  std::filesystem::copy_file(b + ".model", a + ".model", std::filesystem::copy_options::overwrite_existing);
  EXPECT_EQ(generate().out, first.out) << "another model of as many ids lies where the run's was";
  for (const char* file : {"a.model", "a.json", "a.bin", "a.idx"}) std::filesystem::remove(folder_ / file);
  std::filesystem::rename(folder_ / "run", folder_ / "moved");
  std::filesystem::rename(folder_ / "moved", folder_ / "run");
  const Outcome alone = generate();
  EXPECT_EQ(alone.code, 0) << alone.err;
  EXPECT_EQ(alone.out, first.out);

  const auto copy = folder_ / "run" / "global_step1" / "tokenizer.model";
  std::string damaged = read_text(copy);
  damaged[damaged.size() / 2] ^= 1;
  write_text(copy, damaged);
  const Outcome refused = generate();
  EXPECT_EQ(refused.code, 1);
  EXPECT_EQ(count(refused.err, "error: "), 1u) << refused.err;
  EXPECT_THAT(refused.err, HasSubstr("tokenizer.model is damaged"));
}

/// A tokenizer.json goes along as a SentencePiece model does, and into and out of Hugging Face's files.
TEST_F(ResumeData, ATokenizerJsonGoesWithDataCheckpointsAndExports) {
  const std::filesystem::path tests = std::filesystem::path(SHERD_SOURCE_DIR) / "tests/data/tokenizers";
  const std::string json = read_text(tests / "mistral.json"), hf = (folder_ / "hf").string();
  std::filesystem::create_directory(hf);
  write_text(folder_ / "hf" / "tokenizer.json", json);
  write_text(folder_ / "hf" / "tokenizer_config.json", R"({"eos_token": "</s>"})");
  write_text(folder_ / "a.txt", data::sample_text(20000, 1));
  const std::string a = prepared("a", "hf:" + hf);
  EXPECT_EQ(read_text(a + ".tokenizer.json"), json);
  std::filesystem::remove_all(hf);
  ASSERT_EQ(train_on(a, {"--steps", "1", "--ranks", "2"}).code, 0);
  EXPECT_EQ(read_text(folder_ / "run" / "global_step1" / "tokenizer.json"), json);

  write_text(folder_ / "b.txt", data::sample_text(20000, 1));
  const std::string b = prepared("b", cat("hf:", (tests / "llama2.json").string(), "?eod=</s>"));
  const Outcome other = train_on(b, {"--steps", "2", "--ranks", "2", "--resume"});
  EXPECT_EQ(other.code, 1);
  EXPECT_THAT(other.err, HasSubstr("was trained on tokens of 'hf:"));
  EXPECT_THAT(other.err, HasSubstr("(`sherd prepare --tokenizer 'hf:"));

  for (const char* file : {"a.tokenizer.json", "a.json", "a.bin", "a.idx"})
    std::filesystem::remove(folder_ / file);
  const Outcome first = generate();
  ASSERT_EQ(first.code, 0) << first.err;
  EXPECT_TRUE(first.out.starts_with("kato misal")) << first.out;
  ASSERT_EQ(sherd({"export", (folder_ / "run").string(), "--output", hf}).code, 0);
  EXPECT_EQ(read_text(folder_ / "hf" / "tokenizer.json"), json);
  std::filesystem::remove_all(folder_ / "run");
  const Outcome imported = sherd({"import", hf, "--output", (folder_ / "run").string()});
  ASSERT_EQ(imported.code, 0) << imported.err;
  EXPECT_EQ(imported.err.find("will not know"), std::string::npos) << imported.err;
  const Outcome again = generate();
  ASSERT_EQ(again.code, 0) << again.err;
  EXPECT_EQ(again.out, first.out);
  // One that is not supported is named, and leaves a checkpoint that trains.
  std::filesystem::remove_all(folder_ / "run");
  write_text(folder_ / "hf" / "tokenizer.json", R"({"model": {"type": "WordLevel"}})");
  const Outcome without = sherd({"import", hf, "--output", (folder_ / "run").string()});
  EXPECT_EQ(without.code, 0) << without.err;
  EXPECT_THAT(without.err, HasSubstr("model is of the type 'WordLevel'"));
  EXPECT_THAT(generate().err, HasSubstr("does not name its tokenizer"));
}

TEST_F(ResumeData, AnotherTokenizerOfEqualSizeIsRefused) {
  const std::string a = tokens("a", 1), b = tokens("b", 2);
  ASSERT_EQ(train_on(a, {"--steps", "1", "--ranks", "2"}).code, 0);
  const Outcome other = train_on(b, {"--steps", "2", "--ranks", "2", "--resume"});
  EXPECT_EQ(other.code, 1);
  EXPECT_EQ(count(other.err, "error: "), 1u) << other.err;
  EXPECT_THAT(other.err, HasSubstr(cat("was trained on tokens of 'spm:", a, ".model' of 320 ids")));
  EXPECT_THAT(other.err, HasSubstr(cat("are tokens of 'spm:", b, ".model' of 320 ids")));
  EXPECT_THAT(
      other.err,
      HasSubstr("set data.path to tokens of the checkpoint's tokenizer (`sherd prepare --tokenizer spm:"));

  // 257 ids and 320 are padded to the same shapes of the model.
  const Outcome bytes = train_on(prefix(), {"--steps", "2", "--ranks", "2", "--resume"});
  EXPECT_EQ(bytes.code, 1);
  EXPECT_THAT(bytes.err, HasSubstr("are tokens of 'byte' of 257 ids"));

  // The next step that the error names, and the same tokenizer in another place.
  write_text(folder_ / "third.txt", data::sample_text(20000, 3));
  const std::string third =
      prepared("third", cat("spm:", (folder_ / "run" / "global_step1" / "tokenizer.model").string()));
  const Outcome same = train_on(third, {"--steps", "2", "--ranks", "2", "--resume"});
  EXPECT_EQ(same.code, 0) << same.err;
  EXPECT_EQ(count(same.err, resuming), 1u) << same.err;
  EXPECT_THAT(same.err, HasSubstr("global_step1: the dataset had "));
}

TEST_F(ResumeData, AModelFileThatIsGoneIsToldAndLeftOut) {
  const std::string a = tokens("a", 1);
  std::filesystem::remove(a + ".model");
  const Outcome got = train_on(a, {"--steps", "1", "--ranks", "2"});
  EXPECT_EQ(got.code, 0) << got.err;
  EXPECT_EQ(count(got.err, cat("the tokenizer model of 'spm:", a, ".model' cannot be read")), 1u) << got.err;
  EXPECT_FALSE(std::filesystem::exists(folder_ / "run" / "global_step1" / "tokenizer.model"));
  EXPECT_THAT(generate().err, HasSubstr(a + ".model"));
}

TEST_F(ResumeData, TheCheckpointsCopyOfAModelThatIsGoneGoesOn) {
  const std::string a = tokens("a", 1);
  ASSERT_EQ(train_on(a, {"--steps", "1", "--ranks", "2"}).code, 0);
  const std::string model = read_text(a + ".model");
  std::filesystem::remove(a + ".model");
  const Outcome got = train_on(a, {"--steps", "2", "--ranks", "2", "--resume"});
  ASSERT_EQ(got.code, 0) << got.err;
  EXPECT_EQ(read_text(folder_ / "run" / "global_step2" / "tokenizer.model"), model);
  EXPECT_EQ(generate().code, 0);
}

TEST_F(ResumeData, WhatChangesWhatIsTrainedIsALineEach) {
  // Another text of the same sizes to the byte.
  std::string text = read_text(folder_ / "text.txt");
  for (char& c : text)
    if (c == 'j') c = 'k';
  write_text(folder_ / "other.txt", text);
  const std::string other = prepared("other", "byte");
  ASSERT_EQ(sherd(train({"--steps", "1"})).code, 0);
  const Outcome same = sherd(train({"--steps", "2", "--resume", "--set", "training.log_interval=5", "--set",
                                    "zero_optimization.stage=1", "--set", "steps_per_print=1", "--set",
                                    "training.recompute=full", "--set", "device.threads_per_rank=1"}));
  ASSERT_EQ(same.code, 0) << same.err;
  EXPECT_EQ(count(same.err, resuming), 0u) << same.err;

  const Outcome got = train_on(
      other, {"--steps", "3", "--resume", "--set", "training.seed=7", "--set", "data.seed=8", "--set",
              "optimizer.params.lr=0.001", "--set", "train_batch_size=8", "--set", "gradient_clipping=0.5"});
  ASSERT_EQ(got.code, 0) << got.err;
  for (const char* line :
       {"the dataset had ", "training.seed was ", "data.seed was ",
        "optimizer.params.lr was 0.003 and is 0.001", "train_batch_size was 4 and is 8",
        "train_micro_batch_size_per_gpu was 4 and is 8", "gradient_clipping was 1.0 and is 0.5"})
    EXPECT_EQ(count(got.err, cat("global_step2: ", line)), 1u) << line << "\n" << got.err;
  EXPECT_EQ(count(got.err, resuming), 7u) << got.err;

  const Outcome type = train_on(
      other, {"--steps", "4", "--resume", "--set", "optimizer.type=Adam", "--set", "bf16.enabled=false"});
  EXPECT_EQ(type.code, 0) << type.err;
  EXPECT_THAT(type.err, HasSubstr("optimizer.type was \"AdamW\" and is \"Adam\""));
  EXPECT_THAT(type.err, HasSubstr("bf16.enabled was true and is false"));
}

}  // namespace
}  // namespace sherd::cli
