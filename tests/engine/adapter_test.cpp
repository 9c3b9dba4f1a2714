// Training of adapters that PEFT wrote, in every layout: the adapter after a step against PEFT's gradients,
// and the model's own weights, which stay as they are.
#include <gtest/gtest.h>

#include "support/hugging_face/adapter_step.h"
#include "support/hugging_face/prompt_reference.h"

namespace sherd::test {
namespace {

template <class Name>
using InLayout = ::testing::TestWithParam<std::tuple<Name, StepSetting>>;

class Adapted : public InLayout<const char*> {};

TEST_P(Adapted, AStepMovesTheAdapterAsKnownGradientsSayAndNothingElse) {
  const auto& [name, setting] = GetParam();
  const PeftReference peft(name);
  expect_step(
      {peft.config,
       [&](Engine& engine) {
         models::HuggingFaceWeights base(models_reference() / "hugging_face" / peft.family,
                                         models::HuggingFaceLayout(peft.options)),
             adapter(peft.folder, peft.layout, models::adapter_stem(peft.options.adapter.type));
         models::InitialProducts products(base, peft.options, engine.device());
         models::WithoutProducts without(products);
         const bool begins_apart = config::takes_from_base(peft.options.adapter.lora.init);
         models::WithAdapter weights(begins_apart ? static_cast<nn::WeightSource&>(without) : base, &adapter,
                                     peft.saved);
         engine.load_weights(weights);
       },
       [&](device::Device& device) -> tensor::Batch {
         tensor::Batch out;
         for (const char* which : {"tokens", "labels"}) {
           out[which] = tensor::Tensor::empty(device, {2, 12}, DType::i32);
           peft.expected_file.read(which, 0, out[which]);
         }
         return out;
       },
       peft.expected("loss")[0],
       [&](const std::string& parameter, bool gradient) { return peft.published(parameter, gradient); }},
      setting);
}

class Prompted : public InLayout<const char*> {};

/// With p-tuning's network, where there is one, and among three prompts of which one has texts.
TEST_P(Prompted, AStepMovesThePromptAsKnownGradientsSayAndNothingElse) {
  const auto& [name, setting] = GetParam();
  const PromptReference peft(name);
  config::Config config = peft.config;
  config.training.adapter.prompt.tasks = {{"a", ""}, {"b", ""}, {"c", ""}};
  const Given values = peft.encoder(3, 1);
  expect_step({config,
               [&](Engine& engine) {
                 models::HuggingFaceWeights base(models_reference() / "hugging_face" / peft.family,
                                                 models::HuggingFaceLayout(peft.options));
                 Given own = values;
                 models::WithAdapter weights(base, &own);
                 engine.load_weights(weights);
               },
               [&](device::Device& device) { return peft.texts(device, 1); }, peft.expected("loss")[0],
               [&](const std::string& parameter, bool gradient) {
                 const std::vector<float>& whole = values.values.at(parameter);
                 if (!gradient) return whole;
                 const std::vector<double> g =
                     peft.expected("grad." + PromptReference::in_encoder(parameter));
                 std::vector<float> out(whole.size(), 0.0f);
                 const auto first = PromptReference::is_table(parameter) ? std::ssize(g) : 0;
                 std::transform(g.begin(), g.end(), out.begin() + first,
                                [](double v) { return static_cast<float>(v); });
                 return out;
               }},
              setting);
}

std::string name_of(const ::testing::TestParamInfo<std::tuple<const char*, StepSetting>>& test) {
  return cat(std::get<0>(test.param), "_", std::get<1>(test.param).name);
}

INSTANTIATE_TEST_SUITE_P(
    All, Adapted,
    ::testing::Combine(::testing::Values("gpt2_all", "gpt2_default", "llama_all", "llama_default",
                                         "qwen2_some", "gpt2_ia3", "llama_ia3", "qwen2_ia3", "gpt2_houlsby",
                                         "llama_pfeiffer", "mistral_attention", "llama_patterns",
                                         "gpt2_regex", "llama_saved", "gpt2_saved", "llama_dora", "gpt2_dora",
                                         "mixtral_experts", "gpt_oss_experts", "qwen2_moe_beside",
                                         "qwen3_moe_modules", "llama_tokens", "gpt2_tokens", "gemma2_tokens",
                                         "llama_pissa", "gpt2_pissa", "llama_olora"),
                       ::testing::ValuesIn(step_settings)),
    name_of);
/// Layouts of models with experts alone.
constexpr StepSetting expert_settings[] = {
    {"expert_2_stage_2", 2, 2, R"({"expert": 2})", ""},
    {"expert_2_tensor_2", 4, 1, R"({"expert": 2, "tensor": 2})", ""},
    {"expert_2_data_2_stage_3_on_host", 4, 3, R"({"expert": 2})",
     R"(, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"})"}};
INSTANTIATE_TEST_SUITE_P(Experts, Adapted,
                         ::testing::Combine(::testing::Values("mixtral_experts", "gpt_oss_experts",
                                                              "qwen2_moe_beside", "qwen3_moe_modules"),
                                            ::testing::ValuesIn(expert_settings)),
                         name_of);
/// In the layouts that an encoder in front of a decoder has.
std::vector<StepSetting> without_context() {
  std::vector<StepSetting> out(std::begin(step_settings), std::end(step_settings));
  std::erase_if(out,
                [](const StepSetting& each) { return std::string_view(each.name).starts_with("context"); });
  return out;
}
INSTANTIATE_TEST_SUITE_P(EncoderDecoder, Adapted,
                         ::testing::Combine(::testing::Values("t5_all"),
                                            ::testing::ValuesIn(without_context())),
                         name_of);
// Sixteen tokens of prompt, which ranks can share.
INSTANTIATE_TEST_SUITE_P(All, Prompted,
                         ::testing::Combine(::testing::Values("llama_prompt", "gpt2_ptuning"),
                                            ::testing::ValuesIn(step_settings)),
                         name_of);

}  // namespace
}  // namespace sherd::test
