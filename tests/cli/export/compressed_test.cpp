// `sherd export --quantize`, of a run of the program's own, with and without calibration, and in again.
#include <filesystem>
#include <nlohmann/json.hpp>

#include "cli/train_fixture.h"

namespace sherd::cli {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

class ExportCompressed : public Train {
 protected:
  std::string in(const std::string& name) const { return (folder_ / name).string(); }
  void run(std::vector<std::string> more) const {
    std::vector<std::string> arguments;
    for (const std::string& set : more) arguments.insert(arguments.end(), {"--set", set});
    const Outcome out = sherd(train(arguments));
    ASSERT_EQ(out.code, 0) << out.err;
  }
  Outcome exported(const std::string& to, std::vector<std::string> more) const {
    more.insert(more.begin(), {"export", in("run"), "--output", in(to), "--quantize"});
    return sherd(more);
  }
  json quantization_config(const std::string& folder) const {
    return json::parse(read_text(folder_ / folder / "config.json")).at("quantization_config");
  }
};

TEST_F(ExportCompressed, GoesOutAndComesIn) {
  run({"model.type=llama", "model.ffn_hidden_size=64"});
  const Outcome nearest = exported("int8", {"int8", "--json"});
  ASSERT_EQ(nearest.code, 0) << nearest.err;
  for (const char* key : {"calibrated_on", "outputs_error"})
    EXPECT_TRUE(json::parse(nearest.out).at("quantized").at(key).is_null()) << key;
  EXPECT_THAT(nearest.err, HasSubstr("model.layers.1.mlp.down_proj.weight: weights 0."));
  EXPECT_THAT(nearest.err, HasSubstr("in bf16 and int8, which rounded away 0."));
  EXPECT_THAT(nearest.err, ::testing::Not(HasSubstr("outputs")));
  const json int8 = quantization_config("int8");
  EXPECT_EQ(int8.at("format"), "int-quantized");
  EXPECT_EQ(int8.at("ignore"), json::array({"lm_head"}));
  EXPECT_EQ(int8.at("config_groups").at("group_0").at("input_activations").at("dynamic"), true);

  const Outcome fixed = exported("fp8", {"fp8", "--calibrate", prefix()});
  ASSERT_EQ(fixed.code, 0) << fixed.err;
  EXPECT_THAT(fixed.err, HasSubstr(" % away, outputs "));
  EXPECT_EQ(
      quantization_config("fp8").at("config_groups").at("group_0").at("input_activations").at("strategy"),
      "tensor");

  const std::vector<std::string> options{
      "int4", "--group", "16", "--calibrate", prefix(), "--calibrate-sequences", "8", "--json"};
  const Outcome gptq = exported("int4", options);
  ASSERT_EQ(gptq.code, 0) << gptq.err;
  const json told = json::parse(gptq.out).at("quantized");
  EXPECT_EQ(told.at("layers").size(), 14U);
  EXPECT_EQ(told.at("calibrated_on"), prefix());
  EXPECT_LT(told.at("outputs_error"), told.at("weights_error")) << "what the inputs do not see is given away";
  EXPECT_GT(told.at("outputs_error"), 0.0);
  EXPECT_THAT(gptq.err, HasSubstr(" and changed layers' outputs by "));
  // Texts may go from one document into the next.
  std::string lines;
  for (int i = 0; i < 30; ++i)
    lines += cat("{\"text\": \"jar ", std::string(static_cast<std::size_t>(i % 9), 'x'), "\"}\n");
  write_text(folder_ / "docs.jsonl", lines);
  ASSERT_EQ(
      sherd({"prepare", "--input", in("docs.jsonl"), "--tokenizer", "byte", "--output", in("docs")}).code, 0);
  const Outcome over_documents = exported("documents", {"int8", "--calibrate", in("docs")});
  EXPECT_EQ(over_documents.code, 0) << over_documents.err;
  // The same again has the same bytes, and says nothing where it is told so.
  fs::rename(folder_ / "int4", folder_ / "first");
  std::vector<std::string> quiet = options;
  quiet.back() = "--quiet";
  const Outcome again = exported("int4", quiet);
  ASSERT_EQ(again.code, 0) << again.err;
  EXPECT_EQ(again.out, "");
  EXPECT_THAT(again.err, ::testing::Not(HasSubstr("down_proj")));
  EXPECT_TRUE(read_text(folder_ / "int4/model.safetensors") ==
              read_text(folder_ / "first/model.safetensors"));

  // A run begins from each with nearly the loss that it begins with from the run itself.
  const auto first_loss = [&](const std::string& from) {
    fs::remove(folder_ / "losses.jsonl");
    const Outcome out = sherd(train({"--set", "training.init_from=" + in(from), "--set", "training.steps=1",
                                     "--set", "training.save_dir=", "--metrics", in("losses.jsonl")}));
    EXPECT_EQ(out.code, 0) << out.err;
    const std::vector<std::string> losses = metric("losses.jsonl", "loss");
    return losses.empty() ? -1 : std::stod(losses[0]);
  };
  const double whole = first_loss("run"), rounded = first_loss("int4");
  EXPECT_GT(whole, 1);
  EXPECT_NE(whole, rounded);
  EXPECT_NEAR(whole, rounded, 0.05);
  EXPECT_NEAR(whole, first_loss("fp8"), 0.01);
  EXPECT_EQ(sherd({"import", in("int8"), "--output", in("imported")}).code, 0);
}

TEST_F(ExportCompressed, TellsWhatIsWrong) {
  run({"model.type=llama", "model.ffn_hidden_size=64", R"(training.adapter={"type": "lora", "r": 2})"});
  const auto expect = [&](std::vector<std::string> more, int code, const char* part) {
    const Outcome out = exported("quantized", more);
    EXPECT_EQ(out.code, code) << out.err;
    EXPECT_THAT(out.err, HasSubstr(part));
  };
  expect({"int3"}, 2, "--quantize is int8, fp8 or int4, not 'int3'");
  expect({"int4", "--format", "nf4"}, 2, "two forms of the same weights: give one of them");
  expect({"int4", "--adapter"}, 2, "--quantize is of a model's weights");
  expect({"int8", "--group", "32"}, 2, "--group goes with --quantize int4");
  expect({"int4", "--activation-order"}, 2, "--activation-order goes with --quantize int4 and --calibrate");
  expect({"int4", "--calibrate-length", "8"}, 2, "--calibrate-length goes with --calibrate");
  expect({"int4"}, 2, "has 32 inputs, no multiple of groups of 128: take --group");
  expect({"int4", "--group", "16", "--calibrate", in("nothing")}, 1, "nothing");
  expect({"int8", "--calibrate", prefix(), "--calibrate-length", "17"}, 2,
         "--calibrate-length is 17, and the model's sequences have 16 tokens");
  const Outcome other = sherd({"export", in("run"), "--output", in("quantized"), "--calibrate", prefix()});
  EXPECT_EQ(other.code, 2);
  EXPECT_THAT(other.err, HasSubstr("--calibrate goes with --quantize"));
  EXPECT_FALSE(fs::exists(folder_ / "quantized"));
  // The adapter is merged.
  const Outcome merged = exported("quantized", {"int4", "--group", "16", "--calibrate", prefix()});
  EXPECT_EQ(merged.code, 0) << merged.err;
  EXPECT_THAT(merged.err, HasSubstr("its adapter merged"));
}

}  // namespace
}  // namespace sherd::cli
