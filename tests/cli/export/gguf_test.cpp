// `sherd export --format gguf`, of a run of the program's own.
#include <filesystem>

#include "cli/train_fixture.h"

namespace sherd::cli {
namespace {

namespace fs = std::filesystem;

class ExportGguf : public Train {
 protected:
  std::string in(const std::string& name) const { return (folder_ / name).string(); }
  void run(std::vector<std::string> more) const {
    std::vector<std::string> arguments;
    for (const std::string& set : more) arguments.insert(arguments.end(), {"--set", set});
    const Outcome out = sherd(train(arguments));
    ASSERT_EQ(out.code, 0) << out.err;
  }
  Outcome exported(const std::string& file, std::vector<std::string> more = {}) const {
    more.insert(more.begin(), {"export", in("run"), "--output", in(file), "--format", "gguf"});
    return sherd(more);
  }
};

TEST_F(ExportGguf, WritesOneFileThatIsComplete) {
  run({"model.type=llama"});
  const Outcome out = exported("m.gguf");
  ASSERT_EQ(out.code, 0) << out.err;
  EXPECT_THAT(out.err, HasSubstr("as llama in bf16"));
  EXPECT_THAT(out.err, HasSubstr(cat(fs::file_size(folder_ / "m.gguf"), " bytes")));
  const std::string file = read_text(folder_ / "m.gguf");
  EXPECT_TRUE(file.starts_with("GGUF"));
  for (const char* part : {"general.architecture", "llama.context_length", "tokenizer.ggml.tokens",
                           "blk.1.attn_q.weight", "<|endoftext|>"})
    EXPECT_THAT(file, HasSubstr(part));
  EXPECT_FALSE(fs::exists(folder_ / "m.gguf.partial"));
  // The same again has the same bytes.
  fs::rename(folder_ / "m.gguf", folder_ / "first.gguf");
  ASSERT_EQ(exported("m.gguf").code, 0);
  EXPECT_TRUE(read_text(folder_ / "m.gguf") == file);
  const Outcome few = exported("q.gguf", {"--type", "q8_0"});
  ASSERT_EQ(few.code, 0) << few.err;
  EXPECT_LT(fs::file_size(folder_ / "q.gguf"), file.size());
}

TEST_F(ExportGguf, TellsWhatIsWrong) {
  run({"model.type=llama"});
  const auto expect = [&](const std::string& file, std::vector<std::string> more, int code,
                          const char* part) {
    const Outcome out = exported(file, more);
    EXPECT_EQ(out.code, code) << out.err;
    EXPECT_THAT(out.err, HasSubstr(part));
  };
  expect("folder", {}, 2, "--output is a file whose name ends with .gguf");
  expect("m.gguf", {"--type", "q5_k"}, 2, "--type is f32, f16, bf16, q8_0, q6_k, q4_0 or q4_k, not 'q5_k'");
  expect("m.gguf", {"--dtype", "bf16"}, 2, "--dtype is of safetensors");
  expect("m.gguf", {"--adapter", "--type", "q8_0"}, 2, "--type of an adapter is");
  expect("m.gguf", {"--adapter"}, 2, "of a run without training.adapter");
  const Outcome other = sherd({"export", in("run"), "--output", in("hf"), "--type", "f16"});
  EXPECT_EQ(other.code, 2);
  EXPECT_THAT(other.err, HasSubstr("--type is of a file of --format gguf"));
  write_text(folder_ / "there.gguf", "mine");
  expect("there.gguf", {}, 1, "is there already: name a new file");
  EXPECT_EQ(read_text(folder_ / "there.gguf"), "mine");
  EXPECT_FALSE(fs::exists(folder_ / "m.gguf"));
  EXPECT_FALSE(fs::exists(folder_ / "m.gguf.partial"));
}

TEST_F(ExportGguf, RefusesAModelThatLlamaCppDoesNotCompute) {
  run({"model.type=smollm3", "model.no_rope_layer_interval=2"});
  const Outcome out = exported("m.gguf");
  EXPECT_EQ(out.code, 2) << out.err;
  EXPECT_THAT(out.err, HasSubstr("llama.cpp does not compute model.no_rope_layer_interval that is not 4"));
}

TEST_F(ExportGguf, WritesLora) {
  run({"model.type=llama", R"(training.adapter={"type": "lora", "r": 2})"});
  const Outcome out = exported("a.gguf", {"--adapter"});
  ASSERT_EQ(out.code, 0) << out.err;
  const std::string file = read_text(folder_ / "a.gguf");
  EXPECT_THAT(file, HasSubstr("adapter.lora.alpha"));
  EXPECT_THAT(file, HasSubstr("blk.0.attn_v.weight.lora_b"));
  EXPECT_THAT(file, ::testing::Not(HasSubstr("token_embd")));
}

}  // namespace
}  // namespace sherd::cli
