#include "models/hub/config_json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "config/config.h"
#include "models/families/family.h"
#include "support/expect_error.h"

namespace sherd::models {
namespace {

using config::family_named;
using config::FfnActivation;
using config::Model;
using config::Moe;
using config::parse_text;
using config::section_of;
using sherd::testing::expect_error;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

PublishedModel read(const std::string& text) {
  return from_hugging_face(text, "config.json");
}

std::string error_in(const std::string& text) {
  try {
    read(text);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::config);
    return error.what();
  }
  return {};
}

/// As published with Llama 3.1 8B, but for tokens' ids.
const std::string llama3 = R"({
  "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 128000,
  "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
  "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama",
  "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
  "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_type": "llama3"},
  "rope_theta": 500000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
  "transformers_version": "4.43.0.dev0", "use_cache": true, "vocab_size": 128256})";

/// The configuration's list and that of the files in models/families.
TEST(Families, BothListsHaveTheSame) {
  std::vector<std::string> here;
  for (const models::Family& family : families()) here.push_back(family.name);
  EXPECT_THAT(here, ::testing::UnorderedElementsAreArray(config::family_names()));
}

TEST(HuggingFaceConfig, LlamaThree) {
  const PublishedModel published = read(llama3);
  EXPECT_EQ(published.dtype, "bfloat16");
  const Model& m = published.model;
  EXPECT_THAT(published.notes, IsEmpty());
  EXPECT_EQ(m.type, family_named("llama"));
  EXPECT_EQ(m.vocab_size, 128256);
  EXPECT_EQ(m.hidden_size, 4096);
  EXPECT_EQ(m.ffn_hidden_size, 14336);
  EXPECT_EQ(m.num_layers, 32);
  EXPECT_EQ(m.num_heads, 32);
  EXPECT_EQ(m.num_kv_heads, 8);
  EXPECT_EQ(m.head_dim, 128);
  EXPECT_EQ(m.max_positions, 131072);
  EXPECT_EQ(m.seq_length, 131072);
  EXPECT_EQ(m.rotary_base, 5e5);
  EXPECT_EQ(m.rope_scaling.type, RotaryScaling::llama3);
  EXPECT_EQ(m.rope_scaling.factor, 8);
  EXPECT_EQ(m.rope_scaling.original_max_positions, 8192);
  EXPECT_EQ(m.norm_epsilon, 1e-5);
  EXPECT_FALSE(m.tie_embeddings || m.bias || m.qkv_bias || m.qk_norm);
  // The parser takes the section as it is, with keys of the run's own over it.
  EXPECT_EQ(*parse_text(section_of(m)).model, m);
  EXPECT_EQ(parse_text(section_of(m), "x", {"model.seq_length=512"}).model->seq_length, 512);
}

TEST(HuggingFaceConfig, AbsentKeysHaveTheirClassesDefaults) {
  const Model gpt2 = read(R"({"model_type": "gpt2"})").model;
  EXPECT_EQ(gpt2.hidden_size, 768);
  EXPECT_EQ(gpt2.ffn_hidden_size, 3072);
  EXPECT_EQ(gpt2.vocab_size, 50257);
  EXPECT_EQ(gpt2.dropout, 0.1);
  EXPECT_EQ(gpt2.activation, FfnActivation::gelu_tanh);
  EXPECT_TRUE(gpt2.tie_embeddings && gpt2.bias && gpt2.qkv_bias);
  const Model mistral = read(R"({"model_type": "mistral"})").model;
  EXPECT_EQ(mistral.sliding_window, 4096);
  EXPECT_EQ(mistral.num_kv_heads, 8);
  EXPECT_EQ(mistral.norm_epsilon, 1e-6);
  const Model qwen2 = read(R"({"model_type": "qwen2"})").model;
  EXPECT_TRUE(qwen2.qkv_bias && !qwen2.bias);
  EXPECT_EQ(qwen2.sliding_window, 0);
  const Model qwen3 = read(R"({"model_type": "qwen3"})").model;
  EXPECT_TRUE(qwen3.qk_norm);
  EXPECT_EQ(qwen3.head_dim, 128);
  const Model mixtral = read(R"({"model_type": "mixtral"})").model;
  EXPECT_EQ(mixtral.rotary_base, 1e6);
  EXPECT_EQ(mixtral.moe.experts, 8);
  EXPECT_EQ(mixtral.moe.aux_loss, 0);
  const Model moe = read(R"({"model_type": "qwen3_moe"})").model;
  EXPECT_EQ(moe.moe.experts, 128);
  EXPECT_EQ(moe.moe.top_k, 8);
  EXPECT_FALSE(moe.moe.norm_topk);
}

TEST(HuggingFaceConfig, PhiThreesOwnKeys) {
  const Model m = read(R"({"model_type": "phi3", "resid_pdrop": 0.1, "embd_pdrop": 0.2,
                           "attention_dropout": 0.3})")
                      .model;
  EXPECT_EQ(m.dropout, 0.1);
  EXPECT_EQ(m.embedding_dropout, 0.2);
  EXPECT_EQ(m.attention_dropout, 0.3);
  EXPECT_EQ(m.ffn_hidden_size, 8192);
  // Its class would take 32000, which a smaller vocabulary does not have.
  EXPECT_THAT(to_hugging_face(m, 1000, "float32"), HasSubstr("\"pad_token_id\": null"));
  EXPECT_THAT(to_hugging_face(m, 32064, "float32", R"({"model_type": "phi3", "pad_token_id": 32000})"),
              HasSubstr("\"pad_token_id\": 32000"));
}

TEST(HuggingFaceConfig, WhatNullMeans) {
  EXPECT_EQ(read(R"({"model_type": "mistral", "sliding_window": null})").model.sliding_window, 0);
  EXPECT_EQ(read(R"({"model_type": "gpt2", "n_inner": null})").model.ffn_hidden_size, 3072);
  // As transformers 4; of 5.24 Mistral, Mixtral and Qwen3-MoE, which have 8, 8 and 4 without it, refuse it.
  for (const char* family : {"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"})
    EXPECT_EQ(
        read(cat(R"({"model_type": ")", family, R"(", "num_key_value_heads": null})")).model.num_kv_heads,
        32);
  EXPECT_EQ(read(R"({"model_type": "llama", "sliding_window": null})").model.sliding_window, 0);
  expect_error(ErrorKind::config, "sliding_window: 64 is not supported: the family has none",
               [] { read(R"({"model_type": "llama", "sliding_window": 64})"); });
}

TEST(HuggingFaceConfig, BothFormsOfRotaryScaling) {
  const Model older = read(R"({"model_type": "qwen2", "rope_theta": 1e6,
      "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}})")
                          .model;
  const Model newer =
      read(R"({"model_type": "qwen2", "rope_parameters": {"rope_theta": 1e6, "rope_type": "yarn",
      "factor": 4.0, "original_max_position_embeddings": 32768}})")
          .model;
  EXPECT_EQ(older, newer);
  EXPECT_EQ(older.rope_scaling.type, RotaryScaling::yarn);
  EXPECT_EQ(older.rotary_base, 1e6);
  EXPECT_EQ(
      read(
          R"({"model_type": "llama", "rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2}})")
          .model.rope_scaling.type,
      RotaryScaling::linear);
  const Model dynamic =
      read(R"({"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2.0}})").model;
  EXPECT_EQ(dynamic.rope_scaling.type, RotaryScaling::dynamic);
  EXPECT_EQ(read(to_hugging_face(dynamic, 32000, "float32", "")).model, dynamic);
}

TEST(HuggingFaceConfig, WhatPublishedFilesCarryBesideIsRead) {
  EXPECT_NO_THROW(
      read(R"({"model_type": "qwen2", "use_mrope": false, "qkv_bias": true, "rope_theta": 1e6})"));
  EXPECT_NO_THROW(
      read(R"({"model_type": "gpt2", "n_special": 0, "predict_special_tokens": true, "output_past": true,
      "n_ctx": 1024, "summary_type": "cls_index", "task_specific_params": {"text-generation": {"do_sample": true}}})"));
  EXPECT_NO_THROW(read(R"({"model_type": "llama", "max_sequence_length": 2048, "is_llama_config": true,
      "transformers.js_config": {"kv_cache_dtype": "x"}, "_name_or_path": "y", "pretraining_tp": 1})"));
  EXPECT_NO_THROW(
      read(R"({"model_type": "qwen3_moe", "shared_expert_intermediate_size": 0, "use_qk_norm": true,
      "qkv_bias": false})"));
}

TEST(HuggingFaceConfig, TheInnerRotaryBaseGoesBefore) {
  const Model m =
      read(R"({"model_type": "llama", "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"},
      "rope_theta": 1e4})")
          .model;
  EXPECT_EQ(m.rotary_base, 5e5);
  const Model early = read(R"({"model_type": "llama", "rope_scaling": {"rope_type": "llama3", "factor": 8,
      "low_freq_factor": 1, "high_freq_factor": 4, "finetuned": true}, "max_position_embeddings": 4096})")
                          .model;
  EXPECT_EQ(early.rope_scaling.original_max_positions, 4096);
}

TEST(HuggingFaceConfig, LayersWithAWindowAreListedOrFollowThoseWithout) {
  const auto qwen = [](const std::string& more) {
    return cat(R"({"model_type": "qwen2", "num_hidden_layers": 4, "sliding_window": 64, )", more, "}");
  };
  const auto windows = [&](const std::string& more) {
    const Model model = read(qwen(more)).model;
    std::vector<std::int64_t> out;
    for (std::int64_t i = 0; i < 4; ++i) out.push_back(model.window(i));
    return out;
  };
  const std::vector<std::int64_t> none(4), all(4, 64);
  const std::string listed = R"("layer_types": ["full_attention", "sliding_attention", "full_attention",
                                                "sliding_attention"])";
  EXPECT_EQ(windows(R"("use_sliding_window": false)"), none);
  EXPECT_EQ(windows(R"("use_sliding_window": false, )" + listed), none);
  EXPECT_EQ(windows(R"("use_sliding_window": true, "max_window_layers": 4)"), none);
  EXPECT_EQ(windows(R"("use_sliding_window": true, "max_window_layers": 0)"), all);
  EXPECT_EQ(windows(R"("use_sliding_window": true, "max_window_layers": 3)"),
            (std::vector<std::int64_t>{0, 0, 0, 64}));
  const std::string mixed = qwen(R"("use_sliding_window": true, )" + listed);
  EXPECT_EQ(windows(R"("use_sliding_window": true, )" + listed), (std::vector<std::int64_t>{0, 64, 0, 64}));
  EXPECT_EQ(read(mixed).model.layer_types.size(), 2U) << "the shortest pattern";
  EXPECT_EQ(config::parse_text(config::section_of(read(mixed).model)).model, read(mixed).model);
  const std::string written = to_hugging_face(read(mixed).model, 10, "float32");
  EXPECT_EQ(read(written).model.layer_types, read(mixed).model.layer_types);
  EXPECT_THAT(written, HasSubstr("\"max_window_layers\": 1"));
  EXPECT_THAT(error_in(qwen(R"("use_sliding_window": true, "layer_types": ["full_attention"])")),
              HasSubstr("layer_types names 1 layer of 4"));
  EXPECT_THAT(error_in(qwen(R"("layer_types": ["linear_attention"])")),
              HasSubstr("\"linear_attention\" is not supported"));
  EXPECT_THAT(error_in(cat(R"({"model_type": "mistral", "num_hidden_layers": 4, )", listed, "}")),
              HasSubstr("sliding_window in 2 of 4 layers is not supported"));
}

/// Yarn's factor of scores, from both of its keys, and not from one of them.
TEST(HuggingFaceConfig, MscaleIsAFactorOfScores) {
  const auto factor = [](const std::string& more) {
    return read(
               cat(R"({"model_type": "llama", "max_position_embeddings": 64, "rope_parameters": {"rope_type": "yarn",
        "factor": 4, "original_max_position_embeddings": 16)",
                   more, "}}"))
        .model.rope_scaling.attention_factor;
  };
  EXPECT_EQ(factor(R"(, "mscale": 1)"), 0);
  EXPECT_NEAR(factor(R"(, "mscale": 1, "mscale_all_dim": 0.5)"),
              (0.1 * std::log(4) + 1) / (0.05 * std::log(4) + 1), 1e-15);
  EXPECT_EQ(factor(R"(, "mscale": 1, "mscale_all_dim": 0.5, "attention_factor": 1.5)"), 1.5);
  EXPECT_EQ(
      read(R"({"model_type": "llama", "rope_parameters": {"rope_type": "linear", "factor": 4, "mscale": 1,
                     "mscale_all_dim": 0.5}})")
          .model.rope_scaling.attention_factor,
      0)
      << "of yarn alone";
}

/// The classes of transformers get the keys that they need: from a file without all keys, and for a model
/// that came from none.
TEST(HuggingFaceConfig, ClassesGetWhatTheyNeed) {
  const auto model = [](const std::string& keys) {
    return *config::parse_text(cat(R"({"model": {"seq_length": 32, "hidden_size": 16, "num_layers": 12,
        "num_heads": 4, "vocab_size": 10)",
                                   keys, "}}"))
                .model;
  };
  // Their masks have a window, also where no layer uses it.
  const Model gemma = model(R"(, "type": "gemma3_text")");
  EXPECT_EQ(gemma.window(0), 0);
  EXPECT_THAT(to_hugging_face(gemma, 10, "float32"), HasSubstr("\"sliding_window\": 32"));
  EXPECT_EQ(read(to_hugging_face(gemma, 10, "float32")).model.window(0), 0);
  // Positions of layers with a window are told by themselves: the older form has a base of its own there.
  const Model olmo = model(R"(, "type": "olmo3", "sliding_window": 8, "rotary_base": 2e4)");
  EXPECT_EQ(olmo.window(2), 8);
  EXPECT_EQ(olmo.window(3), 0);
  const std::string text = to_hugging_face(olmo, 10, "float32");
  EXPECT_THAT(text, HasSubstr("\"sliding_attention\": {"));
  EXPECT_EQ(read(text).model, olmo);
  EXPECT_EQ(read(R"({"model_type": "olmo3", "rope_theta": 2e4})").model.sliding_rope->rotary_base, 5e5);
  // Queries are divided by a length that must be there.
  EXPECT_EQ(published_as(model(R"(, "type": "ministral3")")), family_named("llama"));
  EXPECT_EQ(read(R"({"model_type": "smollm3", "sliding_window": 16})").model.sliding_window, 0);
  EXPECT_THAT(error_in(R"({"model_type": "smollm3", "no_rope_layers": [1, 0]})"),
              HasSubstr("no_rope_layers names 2 layers of 36"));
  EXPECT_THAT(error_in(R"({"model_type": "olmo3", "sliding_window": null, "num_hidden_layers": 1,
                           "layer_types": ["sliding_attention"]})"),
              HasSubstr("layer_types has 1 layer with sliding_attention"));
  EXPECT_EQ(
      read(R"({"model_type": "phi3", "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": false})")
          .model.type,
      family_named("phi3"));
}

/// A type's default is written out where a model does not have it.
TEST(HuggingFaceConfig, SectionsOfGemmaSayWhatItHas) {
  const auto again = [](const Model& model) { return *config::parse_text(config::section_of(model)).model; };
  const auto gemma = [](const std::string& keys) {
    return *config::parse_text(cat(R"({"model": {"type": "gemma3_text", "seq_length": 32, "hidden_size": 16,
        "num_layers": 12, "num_heads": 4, "sliding_window": 8)",
                                   keys, "}}"))
                .model;
  };
  for (const char* keys : {"", R"(, "layer_types": [])", R"(, "layer_types": ["full_attention"])",
                           R"(, "sliding_rope": {"rotary_base": 1e6})"})
    EXPECT_EQ(again(gemma(keys)), gemma(keys)) << keys;
  EXPECT_EQ(gemma("").window(5), 0);
  EXPECT_EQ(gemma(R"(, "layer_types": [])").window(5), 8);
  const Model one_base =
      read(R"({"model_type": "gemma3_text", "rope_theta": 1e6, "rope_local_base_freq": 1e6})").model;
  EXPECT_EQ(again(one_base), one_base);
}

/// The older form goes before, as in transformers 5.
TEST(HuggingFaceConfig, RopeScalingGoesBeforeRopeParameters) {
  for (const char* text :
       {R"({"model_type": "llama", "rope_scaling": {"rope_type": "linear", "factor": 2},
                               "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}})",
        R"({"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
                               "rope_scaling": {"rope_type": "linear", "factor": 2}})"}) {
    const Model m = read(text).model;
    EXPECT_EQ(m.rope_scaling.type, RotaryScaling::linear);
    EXPECT_EQ(m.rotary_base, 10000);
  }
}

/// Phi-3's first length stands beside rope_scaling, in files of its first days under another name.
TEST(HuggingFaceConfig, LongRopeIsReadAndWritten) {
  const auto text = [](const std::string& type) {
    return cat(
        R"({"model_type": "phi3", "hidden_size": 8, "num_attention_heads": 2, "max_position_embeddings": 131072,
        "original_max_position_embeddings": 2048, "rope_scaling": {"type": ")",
        type, R"(", "short_factor": [1, 1.5], "long_factor": [2, 64]}})");
  };
  const Model m = read(text("longrope")).model;
  EXPECT_EQ(m.rope_scaling.type, RotaryScaling::longrope);
  EXPECT_EQ(m.rope_scaling.original_max_positions, 2048);
  EXPECT_EQ(m.rope_scaling.long_factor, (std::vector<double>{2, 64}));
  EXPECT_NEAR(m.rope_scaling.attention_factor, std::sqrt(1 + std::log(64) / std::log(2048)), 1e-15);
  EXPECT_EQ(read(text("su")).model, m);
  EXPECT_EQ(config::parse_text(config::section_of(m)).model, m);
  const std::string written = to_hugging_face(m, 32064, "float32");
  EXPECT_EQ(read(written).model, m);
  EXPECT_THAT(written, HasSubstr("\"original_max_position_embeddings\": 2048"));
  EXPECT_THAT(written, Not(HasSubstr("\"attention_factor\""))) << "which transformers 4 does not take";
  Model other = m;
  other.rope_scaling = {.type = RotaryScaling::linear, .factor = 2};
  EXPECT_EQ(published_as(other), family_named("llama")) << "which the class has not";
}

/// Published as a class that reads pictures too.
TEST(HuggingFaceConfig, ThePartForTextIsTaken) {
  const PublishedModel whole =
      read(R"({"model_type": "gemma3", "torch_dtype": "bfloat16", "vision_config": {},
      "mm_tokens_per_image": 256, "text_config": {"model_type": "gemma3_text", "hidden_size": 64,
      "num_attention_heads": 4, "num_hidden_layers": 7, "sliding_window": 16}})");
  EXPECT_EQ(whole.model.type, family_named("gemma3_text"));
  EXPECT_EQ(whole.dtype, "bfloat16");
  EXPECT_THAT(whole.notes, Contains(StartsWith("text_config")));
  for (const std::int64_t layer : {0, 4, 6})
    EXPECT_EQ(whole.model.window(layer), 16) << "the class's pattern";
  EXPECT_EQ(whole.model.window(5), 0);
  EXPECT_THAT(error_in(R"({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"},
                           "quantization_config": {"bits": 4}})"),
              HasSubstr("before it was quantised"));
  const auto tied = [](const char* outer) {
    return read(cat(R"({"model_type": "mistral3", "tie_word_embeddings": )", outer,
                    R"(, "text_config": {"model_type": "mistral", "tie_word_embeddings": false}})"))
        .model.tie_embeddings;
  };
  EXPECT_TRUE(tied("true")) << "the outer key goes before";
  EXPECT_FALSE(tied("false"));
  EXPECT_THAT(error_in(R"({"model_type": "llama", "text_config": {"hidden_size": 4}})"),
              HasSubstr("it does not say its model_type"));
}

TEST(HuggingFaceConfig, WhatWouldChangeTheModelIsRefusedByName) {
  const std::pair<const char*, const char*> refused[] = {
      {R"({"hidden_size": 4})", "model_type is absent"},
      {R"({"model_type": "bloom"})", "model_type \"bloom\" is not supported"},
      {R"({"model_type": "mistral", "attention_bias": true})", "attention_bias: true is not supported"},
      {R"({"model_type": "llama", "mlp_bias": true})", "mlp_bias true beside attention_bias false"},
      {R"({"model_type": "gpt_oss", "attention_bias": false})", "attention_bias: false is not supported"},
      {R"({"model_type": "gpt_oss", "swiglu_limit": 6.0})", "swiglu_limit"},
      {R"({"model_type": "gpt_oss", "quantization_config": {"quant_method": "fp8"}})",
       "before it was quantised"},
      {R"({"model_type": "deepseek_v3", "quantization_config": {"quant_method": "fp8",
           "weight_block_size": [64, 64]}})",
       "before it was quantised"},
      {R"({"model_type": "deepseek_v3", "topk_method": "greedy"})", "a bias corrects the choice"},
      {R"({"model_type": "qwen3_5_text", "output_gate_type": "sigmoid"})", "output_gate_type"},
      {R"({"model_type": "qwen3_5_text", "linear_num_value_heads": 33})",
       "is not a multiple of num_key_heads"},
      {R"({"model_type": "qwen3", "num_hidden_layers": 1, "layer_types": ["linear_attention"]})",
       "linear_attention"},
      {R"({"model_type": "deepseek_v3", "moe_layer_freq": 2})", "moe_layer_freq"},
      {R"({"model_type": "deepseek_v2", "norm_topk_prob": true})", "norm_topk_prob: true is not supported"},
      {R"({"model_type": "deepseek_v2", "topk_method": "noaux_tc"})",
       "topk_method: \"noaux_tc\" is not supported"},
      {R"({"model_type": "deepseek_v2", "v_head_dim": 200})", "mla.v_head_dim 200 is more than a key's 192"},
      {R"({"model_type": "qwen2_moe", "shared_expert_intermediate_size": 5000})",
       "shared_expert_intermediate_size 5000"},
      {R"({"model_type": "llama", "hidden_act": "relu"})", "hidden_act \"relu\""},
      {R"({"model_type": "llama", "rope_scaling": {"type": "ntk", "factor": 2}})", "ntk"},
      {R"({"model_type": "phi3", "rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [2]}})",
       "longrope has 1 factor for 48 pairs"},
      {R"({"model_type": "phi3", "rope_scaling": {"type": "longrope", "long_factor": [2]}})", "short_factor"},
      {R"({"model_type": "llama", "rope_scaling": {"rope_type": "llama3", "factor": 8}})", "low_freq_factor"},
      {R"({"model_type": "qwen3_moe", "shared_expert_intermediate_size": 64})",
       "shared_expert_intermediate_size"},
      {R"({"model_type": "qwen2", "use_mrope": true})", "use_mrope"},
      {R"({"model_type": "llama", "rope_parameters": {"rope_type": "yarn", "factor": 4,
           "llama_4_scaling_beta": 0.1}})",
       "llama_4_scaling_beta 0.1 is not supported"},
      {R"({"model_type": "llama", "rope_parameters": {"sliding_attention": {"rope_type": "default"}}})",
       "all layers have the same positions"},
      {R"({"model_type": "gemma3_text", "final_logit_softcapping": 30.0})", "scores are not capped"},
      {R"({"model_type": "smollm3", "no_rope_layers": [1, 0, 1, 1]})", "must be each n-th one"},
      {R"({"model_type": "llama", "partial_rotary_factor": 0.5})", "partial_rotary_factor"},
      {R"({"model_type": "llama", "quantization_config": {"bits": 4}})", "before it was quantised"},
      {R"({"model_type": "llama", "logit_scale": 2})", "unknown key \"logit_scale\""},
      {R"({"model_type": "llama", "hidden_size": 10, "num_attention_heads": 4})",
       "not a multiple of 4 heads"},
      {R"({"model_type": "gpt2", "activation_function": "relu"})", "activation_function \"relu\""},
      {R"({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": true})",
       "scale_attn_by_inverse_layer_idx"},
      {R"({"model_type": "gpt2", "scale_attn_weights": false})", "scale_attn_weights"},
      {R"({"model_type": "gpt2", "add_cross_attention": true})", "add_cross_attention"},
      {R"({"model_type": "mixtral", "router_jitter_noise": 0.1})", "router_jitter_noise"},
      {R"({"model_type": "qwen3_moe", "mlp_only_layers": [1]})", "mlp_only_layers"},
      {R"({"model_type": "qwen3_moe", "mlp_only_layers": [0], "decoder_sparse_step": 2})",
       "decoder_sparse_step"}};
  for (const auto& [text, part] : refused) EXPECT_THAT(error_in(text), HasSubstr(part)) << text;
  // All of them at once.
  const std::string both = error_in(R"({"model_type": "llama", "hidden_act": "relu", "logit_scale": 2})");
  EXPECT_THAT(both, HasSubstr("hidden_act"));
  EXPECT_THAT(both, HasSubstr("logit_scale"));
}

TEST(HuggingFaceConfig, BalanceLossOnlyWhereTransformersAddsIt) {
  const PublishedModel off = read(R"({"model_type": "mixtral", "router_aux_loss_coef": 0.02})");
  EXPECT_EQ(off.model.moe.aux_loss, 0);
  EXPECT_THAT(off.notes, Contains(StartsWith("router_aux_loss_coef")));
  const Moe on =
      read(R"({"model_type": "mixtral", "router_aux_loss_coef": 0.02, "output_router_logits": true})")
          .model.moe;
  EXPECT_EQ(on.aux_loss, 0.02);
  EXPECT_EQ(on.aux_loss_type, BalanceLoss::pooled);
}

TEST(HuggingFaceConfig, AModelIsPublishedAsTheFamilyThatCanSayIt) {
  const auto model = [](const std::string& keys) {
    return *parse_text(cat(R"({"model": {"type": "llama", "seq_length": 8, "hidden_size": 16, "num_layers": 2,
        "num_heads": 4)",
                           keys, "}}"))
                .model;
  };
  EXPECT_EQ(published_as(model("")), family_named("llama"));
  EXPECT_EQ(published_as(model(R"(, "sliding_window": 4)")), family_named("mistral"));
  EXPECT_EQ(published_as(model(R"(, "qkv_bias": true)")), family_named("qwen2"));
  EXPECT_EQ(published_as(model(R"(, "qk_norm": true)")), family_named("qwen3"));
  EXPECT_EQ(published_as(model(R"(, "moe": {"experts": 4})")), family_named("mixtral"));
  EXPECT_EQ(published_as(model(R"(, "qk_norm": true, "moe": {"experts": 4, "first_dense": 1})")),
            family_named("qwen3_moe"));
  expect_error(ErrorKind::config, "model.moe.shared_experts",
               [&] { published_as(model(R"(, "moe": {"experts": 4, "shared_experts": 1})")); });
  EXPECT_EQ(published_as(model(R"(, "bias": true, "mlp_bias": false)")), family_named("llama"));
  for (const char* part :
       {R"("attention_multiplier": 0.3)", R"("attention_multiplier": 0.01, "rope_scaling":
       {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 4})",
        R"("attention_multiplier": 0.3, "rope_scaling": {"rope_type": "linear", "factor": 4})"})
    expect_error(ErrorKind::config, "model.attention_multiplier", [&] {
      published_as(model(cat(R"(, "mla": {"kv_lora_rank": 8}, "moe": {"experts": 4, "shared_experts": 1,
                                 "norm_topk": false}, )",
                             part)));
    });
  EXPECT_EQ(published_as(model(R"(, "mla": {"kv_lora_rank": 8}, "moe": {"experts": 4, "shared_experts": 1,
                                   "norm_topk": false})")),
            family_named("deepseek_v2"));
  EXPECT_EQ(published_as(model(R"(, "mla": {"kv_lora_rank": 8}, "moe": {"experts": 4, "shared_experts": 1,
                                   "router": "sigmoid", "bias_update": 1e-3})")),
            family_named("deepseek_v3"));
  expect_error(ErrorKind::config, "model.mla",
               [&] { published_as(model(R"(, "mla": {"kv_lora_rank": 8})")); });
  expect_error(ErrorKind::config, "model.attention_sinks true",
               [&] { published_as(model(R"(, "attention_sinks": true)")); });
}

TEST(HuggingFaceConfig, KeysOfTheModelsOwnFileStay) {
  const Model m = read(llama3).model;
  const std::string text = to_hugging_face(m, 128256, "bfloat16", llama3);
  EXPECT_THAT(text, HasSubstr("\"eos_token_id\": 128001"));
  EXPECT_THAT(text, HasSubstr("\"rope_theta\": 500000.0"));
  EXPECT_EQ(read(text).model, m);
  Model longer = m;
  longer.rope_scaling = {};
  EXPECT_THAT(to_hugging_face(longer, 128256, "float32", llama3), HasSubstr("\"rope_scaling\": null"));
}

}  // namespace
}  // namespace sherd::models
