// Prompts that PEFT wrote against what it makes of them (support/hugging_face/prompt_reference.h).
#include <gtest/gtest.h>

#include <algorithm>

#include "models/adapters/prompt_weights.h"
#include "support/hugging_face/prompt_reference.h"
#include "support/temp_folder.h"
#include "support/tiny_gpt.h"

namespace sherd::models {
namespace {

using sherd::testing::TempFolder;
using tensor::Tensor;
using test::expect_near;
using test::Given;
using test::PlainParameters;
using Values = std::vector<double>;

class Prompt : public ::testing::TestWithParam<std::string>, protected test::PromptReference {
 protected:
  Prompt() : PromptReference(GetParam()) {}
};

TEST_P(Prompt, GivesItsLogitsLossAndGradients) {
  Gpt model(trained());
  const PlainParameters parameters(*cpu.kernels, model, DType::f32);
  Given own = encoder();
  WithAdapter weights(base, &own);
  load(parameters, weights);
  const tensor::Batch batch = texts(*cpu.device);
  expect_near(logits(model, batch.at("tokens")), expected("logits"), 1e-5);
  autograd::Tape tape(*cpu.kernels);
  const autograd::Var loss = model(tape, batch);
  tape.backward(loss);
  EXPECT_NEAR(cpu.values(loss.value())[0], expected("loss")[0], 1e-5);
  std::size_t found = 0;
  for (const auto& p : parameters.all()) {
    SCOPED_TRACE(p->name);
    EXPECT_EQ(p->trainable, is_adapter(p->name));
    if (!p->trainable) continue;
    ++found;
    expect_near(cpu.values(p->grad), expected("grad." + in_encoder(p->name)), 1e-5);
  }
  EXPECT_EQ(found, encoded ? 7U : 1U);
}

/// PEFT saves a prompt without a network.
TEST_P(Prompt, ItsFileGivesTheSameLogits) {
  ASSERT_EQ(options.adapter.type, config::AdapterType::prompt_tuning);
  Gpt model(options);
  const PlainParameters parameters(*cpu.kernels, model, DType::f32);
  load(parameters, both);
  expect_near(logits(model, texts(*cpu.device).at("tokens")), expected("logits"), 1e-5);
}

/// In a model with three prompts a row has that of its ids, and the others get no gradient.
TEST_P(Prompt, ARowHasThePromptOfItsIds) {
  const GptConfig several = trained(3);
  Gpt model(several);
  const PlainParameters parameters(*cpu.kernels, model, DType::f32);
  Given own = encoder(3, 1);
  WithAdapter weights(base, &own);
  load(parameters, weights);
  const tensor::Batch batch = texts(*cpu.device, 1);
  expect_near(logits(model, batch.at("tokens")), expected("logits"), 1e-5);
  EXPECT_NE(logits(model, texts(*cpu.device, 2).at("tokens")), logits(model, batch.at("tokens")));
  autograd::Tape tape(*cpu.kernels);
  tape.backward(model(tape, batch));
  for (const auto& p : adapter_parameters(parameters.all())) {
    SCOPED_TRACE(p->name);
    const Values got = cpu.values(p->grad), of_one = expected("grad." + in_encoder(p->name));
    if (!is_table(p->name)) {
      expect_near(got, of_one, 1e-5);
      continue;
    }
    const auto size = std::ssize(of_one);
    expect_near({got.begin() + size, got.begin() + 2 * size}, of_one, 1e-5);
    EXPECT_TRUE(std::all_of(got.begin(), got.begin() + size, [](double v) { return v == 0; }));
    EXPECT_TRUE(std::all_of(got.begin() + 2 * size, got.end(), [](double v) { return v == 0; }));
  }
}

/// One of several prompts, for a model without the others and without a network: PEFT's file.
TEST_P(Prompt, OneOfSeveralIsPeftsFile) {
  Given own = encoder(3, 2);
  const GptConfig single = TaskPrompt::config(trained(3));
  Gpt one(single);
  one.assign_names();
  TaskPrompt prompt(own, trained(3), 2, *cpu.device);
  TempFolder out;
  export_to_hugging_face(out.path(), layout, adapter_parameters(one.parameters()), prompt, *cpu.device,
                         {.dtype = DType::f32, .stem = "adapter_model"});
  const tensor::SafetensorsFile there(folder / "adapter_model.safetensors"),
      back(out.path() / "adapter_model.safetensors");
  ASSERT_EQ(back.entries().size(), 1U);
  const auto values = [&](const tensor::SafetensorsFile& file) {
    const Tensor to =
        Tensor::empty(*cpu.device, {options.adapter.virtual_tokens(), options.hidden_size}, DType::f32);
    file.read("prompt_embeddings", 0, to);
    return cpu.values(to);
  };
  expect_near(values(back), values(there), encoded ? 1e-6 : 0);
}

/// Reading goes on from PEFT's description of what is written.
TEST_P(Prompt, ItsDescriptionMeansTheSamePrompt) {
  const std::string text = adapter_config(config.training.adapter, options, family);
  EXPECT_NE(text.find(encoded ? "\"P_TUNING\"" : "\"PROMPT_TUNING\""), std::string::npos);
  EXPECT_NE(text.find(cat("\"token_dim\": ", options.hidden_size)), std::string::npos);
  const config::Adapter there =
      from_peft(testing::read_text(folder / "adapter_config.json"), "adapter_config.json");
  EXPECT_EQ(from_peft(text, "written"), there);
}

/// Rows of the model's table, in any order.
TEST_P(Prompt, BeginsAsRowsOfTheTable) {
  GptConfig plain = options;
  plain.adapter = {};
  Gpt of_base(plain), model(options);
  const PlainParameters table(*cpu.kernels, of_base, DType::f32), begun(*cpu.kernels, model, DType::f32);
  load(table, base);
  const std::vector<std::int32_t> ids = repeated({7, 3, 36}, options.adapter.virtual_tokens());
  VocabularyPrompt prompt(base, options, ids, *cpu.device);
  WithAdapter weights(base, &prompt);
  load(begun, weights);
  const Values got = cpu.values(begun.find(prompt_parameter)->value),
               rows = cpu.values(table.find("tokens.weight")->value);
  const auto width = static_cast<std::size_t>(options.hidden_size);
  for (std::size_t i = 0; i < got.size(); ++i)
    EXPECT_EQ(got[i], rows[static_cast<std::size_t>(ids[i / width]) * width + i % width]) << "element " << i;
}

INSTANTIATE_TEST_SUITE_P(All, Prompt,
                         ::testing::Values("gpt2_prompt", "llama_prompt", "gpt2_ptuning", "llama_ptuning"),
                         [](const auto& test) { return test.param; });

/// A prompt stands beside scaled embeddings: begun as rows of the table, it computes as the text that they
/// are.
TEST(Prompts, StandBesideScaledEmbeddings) {
  test::Cpu cpu(1);
  GptConfig plain = test::tiny_gemma();
  plain.sliding_window = 0, plain.layer_types.clear(), plain.sliding_rope.reset();
  const GptConfig options = test::with_prompt(plain);
  Gpt base(plain), model(options);
  const PlainParameters table(*cpu.kernels, base, DType::f32), prompted(*cpu.kernels, model, DType::f32);
  for (const auto& p : table.all()) cpu.kernels->copy(p->value, prompted.find(p->name)->value);
  const Values rows = cpu.values(table.find("tokens.weight")->value);
  const Tensor& prompt = prompted.find(prompt_parameter)->value;
  const auto width = static_cast<std::size_t>(plain.hidden_size);
  const std::vector<std::int32_t> ids{7, 3};
  for (std::size_t i = 0; i < 2 * width; ++i)
    prompt.data<float>()[i] =
        static_cast<float>(options.embedding_root(DType::f32) *
                           rows[static_cast<std::size_t>(ids[i / width]) * width + i % width]);
  const auto logits = [&](Gpt& of, std::vector<std::int32_t> text) {
    autograd::Tape tape(*cpu.kernels);
    autograd::Tape::NoGrad pause(tape);
    return cpu.values(
        of.logits(tape, Tensor::of<std::int32_t>(*cpu.device, {1, std::ssize(text)}, text)).value());
  };
  const std::vector<std::int32_t> virtual_ids = options.prompt();
  EXPECT_EQ(logits(model, {virtual_ids[0], virtual_ids[1], 5, 2}), logits(base, {7, 3, 5, 2}));
}

TEST(Prompts, ATextIsRepeatedOrCut) {
  EXPECT_EQ(repeated({7, 3}, 5), (std::vector<std::int32_t>{7, 3, 7, 3, 7}));
  EXPECT_EQ(repeated({7, 3, 9}, 2), (std::vector<std::int32_t>{7, 3}));
}

}  // namespace
}  // namespace sherd::models
