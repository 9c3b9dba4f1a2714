// config.json of models with latent and linear attention, as published.
#include <gtest/gtest.h>

#include <cmath>

#include "config/config.h"
#include "models/gpt_config.h"
#include "models/hub/config_json.h"

namespace sherd::models {
namespace {

using config::Model;
using config::parse_text;
using config::section_of;

PublishedModel read(const char* text) {
  return from_hugging_face(text, "config.json");
}

/// config.json as published, but for ids; parameters as transformers counts them.
TEST(PublishedConfigs, MixturesOfLatentAttentionAndSharedExperts) {
  const auto parameters = [](const Model& m) {
    return gpt_config(parse_text(section_of(m)), m.vocab_size).num_parameters(false);
  };
  const PublishedModel v3 = read(R"({
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "ep_size": 1,
    "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168, "initializer_range": 0.02,
    "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
    "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
    "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": true, "num_attention_heads": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
      "weight_block_size": [128, 128]}, "rms_norm_eps": 1e-06,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
      "original_max_position_embeddings": 4096, "type": "yarn"}, "rope_theta": 10000,
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": false, "topk_group": 4,
    "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "transformers_version": "4.33.1",
    "use_cache": true, "v_head_dim": 128, "vocab_size": 129280})");
  EXPECT_EQ(parameters(v3.model), 671'026'404'352);
  EXPECT_EQ(v3.model.head_dim, 192);
  EXPECT_EQ(v3.model.moe.router, RouterScores::sigmoid);
  EXPECT_TRUE(v3.model.moe.correction_bias);
  const double mscale = 0.1 * std::log(40.0) + 1;
  EXPECT_NEAR(v3.model.attention_multiplier, mscale * mscale / std::sqrt(192.0), 1e-12);
  const PublishedModel v2 = read(R"({
    "model_type": "deepseek_v2", "aux_loss_alpha": 0.001, "seq_aux": true, "ep_size": 1, "pretraining_tp": 1,
    "first_k_dense_replace": 1, "hidden_size": 5120, "intermediate_size": 12288, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "moe_intermediate_size": 1536, "moe_layer_freq": 1, "n_group": 8,
    "n_routed_experts": 160, "n_shared_experts": 2, "norm_topk_prob": false, "num_attention_heads": 128,
    "num_experts_per_tok": 6, "num_hidden_layers": 60, "num_key_value_heads": 128, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
      "original_max_position_embeddings": 4096, "type": "yarn"}, "rope_theta": 10000,
    "routed_scaling_factor": 16.0, "scoring_func": "softmax", "topk_group": 3,
    "topk_method": "group_limited_greedy", "v_head_dim": 128, "vocab_size": 102400})");
  EXPECT_EQ(v2.model.mla.norm_epsilon, 1e-6);
  EXPECT_EQ(parameters(v2.model), 235'741'434'880);
  EXPECT_EQ(v2.model.moe.top_groups, 3);
  const PublishedModel glm = read(R"({
    "model_type": "glm4_moe", "attention_bias": true, "head_dim": 128, "hidden_size": 5120,
    "partial_rotary_factor": 0.5, "intermediate_size": 12288, "max_position_embeddings": 131072,
    "moe_intermediate_size": 1536, "norm_topk_prob": true, "num_attention_heads": 96, "n_group": 1,
    "topk_group": 1, "n_routed_experts": 160, "n_shared_experts": 1, "routed_scaling_factor": 2.5,
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "num_hidden_layers": 92,
    "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-05, "rope_scaling": null,
    "rope_theta": 1000000, "tie_word_embeddings": false, "use_qk_norm": true, "vocab_size": 151552})");
  EXPECT_EQ(parameters(glm.model), 352'797'814'784);
  const PublishedModel qwen = read(R"({
    "model_type": "qwen2_moe", "decoder_sparse_step": 1, "hidden_size": 2048, "intermediate_size": 5632,
    "max_position_embeddings": 8192, "max_window_layers": 21, "moe_intermediate_size": 1408,
    "norm_topk_prob": false, "num_attention_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
    "num_hidden_layers": 24, "num_key_value_heads": 16, "output_router_logits": false,
    "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 5632,
    "sliding_window": 32768, "use_sliding_window": false, "vocab_size": 151936})");
  EXPECT_EQ(parameters(qwen.model), 14'315'784'192);
  EXPECT_EQ(qwen.model.moe.shared_experts, 4);
}

/// Where a file says no scaling, the class has its own.
TEST(PublishedConfigs, EncodersInFrontOfDecoders) {
  const auto parameters = [](const Model& m) {
    return gpt_config(parse_text(section_of(m)), m.vocab_size).num_parameters(false);
  };
  const Model small = read(R"({
    "architectures": ["T5ForConditionalGeneration"], "d_ff": 2048, "d_kv": 64, "d_model": 512,
    "decoder_start_token_id": 0, "dropout_rate": 0.1, "eos_token_id": 1, "initializer_factor": 1.0,
    "is_encoder_decoder": true, "layer_norm_epsilon": 1e-06, "model_type": "t5", "n_positions": 512,
    "num_heads": 8, "num_layers": 6, "output_past": true, "pad_token_id": 0,
    "relative_attention_num_buckets": 32, "task_specific_params": {"summarization": {"max_length": 200}},
    "vocab_size": 32128})")
                          .model;
  EXPECT_EQ(parameters(small), 60'506'624);
  EXPECT_EQ(small.num_layers, 12);
  EXPECT_EQ(small.encoder, (config::Encoder{6, 512}));
  EXPECT_TRUE(small.tied());
  EXPECT_DOUBLE_EQ(small.logits_scaling, std::sqrt(512.0));
  EXPECT_EQ(small.ffn_dropout, 0.1);
  const Model mt5 = read(R"({
    "architectures": ["MT5ForConditionalGeneration"], "d_ff": 1024, "d_kv": 64, "d_model": 512,
    "decoder_start_token_id": 0, "dropout_rate": 0.1, "eos_token_id": 1, "feed_forward_proj": "gated-gelu",
    "initializer_factor": 1.0, "is_encoder_decoder": true, "layer_norm_epsilon": 1e-06, "model_type": "mt5",
    "num_decoder_layers": 8, "num_heads": 6, "num_layers": 8, "pad_token_id": 0,
    "relative_attention_num_buckets": 32, "tie_word_embeddings": false, "tokenizer_class": "T5Tokenizer",
    "use_cache": true, "vocab_size": 250112})")
                        .model;
  EXPECT_EQ(parameters(mt5), 300'176'768);
  EXPECT_FALSE(mt5.tied());
  // Files of transformers 4 and 5 describe the head differently.
  const auto of = [](const std::string& keys) {
    return read((R"({"model_type": "t5", "feed_forward_proj": "gated-gelu", "num_decoder_layers": 4)" + keys +
                 "}")
                    .c_str())
        .model;
  };
  const Model flan = of(R"(, "tie_word_embeddings": false)");
  EXPECT_FALSE(flan.tied());
  EXPECT_EQ(flan.logits_scaling, 1);
  EXPECT_EQ(flan.num_layers, 10);
  EXPECT_EQ(of(R"(, "tie_word_embeddings": true, "scale_decoder_outputs": false)"), flan) << "written by 5";
  const Model scaled = of(R"(, "tie_word_embeddings": false, "scale_decoder_outputs": true)");
  EXPECT_FALSE(scaled.tied());
  EXPECT_DOUBLE_EQ(scaled.logits_scaling, std::sqrt(512.0));
  Model tied = flan;
  tied.tie_embeddings = true;
  for (const Model& each : {small, flan, scaled, tied, mt5}) {
    const std::string text = to_hugging_face(each, each.vocab_size, "float32", "");
    Model back = read(text.c_str()).model;
    if (each == tied) back.tie_embeddings = true;  // which the files decide
    EXPECT_EQ(back, each) << text;
  }
  EXPECT_THROW(of(R"(, "dense_act_fn": "relu")"), Error);
  EXPECT_THROW(of(R"(, "is_gated_act": false)"), Error);
  EXPECT_EQ(of(R"(, "dense_act_fn": "gelu_new", "is_gated_act": true)"), of(""));
  Model other = flan;
  other.activation = config::FfnActivation::geglu;
  EXPECT_THROW(to_hugging_face(other, 37, "float32", ""), Error)
      << "no word of transformers is exact GELU here";
  other.activation = config::FfnActivation::relu2;
  EXPECT_THROW(to_hugging_face(other, 37, "float32", ""), Error);
}

TEST(PublishedConfigs, PositionsOfGptOss) {
  const Model m = read(R"({"model_type": "gpt_oss", "rope_theta": 10000.0, "rope_scaling": null})").model;
  EXPECT_EQ(m.rotary_base, 10000);
  EXPECT_EQ(m.rope_scaling.type, RotaryScaling::yarn);
  EXPECT_EQ(m.rope_scaling.factor, 32);
  Model plain = m;
  plain.rope_scaling = {};
  const std::string text = to_hugging_face(plain, plain.vocab_size, "float32", "");
  EXPECT_EQ(read(text.c_str()).model, plain) << text;
}

TEST(PublishedConfigs, ModelsOfLinearAttention) {
  const auto parameters = [](const Model& m) {
    return gpt_config(parse_text(section_of(m)), m.vocab_size).num_parameters(false);
  };
  const Model next = read(R"({
    "architectures": ["Qwen3NextForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
    "decoder_sparse_step": 1, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu",
    "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5120, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128, "max_position_embeddings": 262144, "mlp_only_layers": [],
    "model_type": "qwen3_next", "moe_intermediate_size": 512, "norm_topk_prob": true,
    "num_attention_heads": 16, "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 48,
    "num_key_value_heads": 2, "output_router_logits": false, "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 10000000, "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
    "transformers_version": "4.57.0.dev0", "use_cache": true, "use_sliding_window": false,
    "vocab_size": 151936})")
                         .model;
  EXPECT_EQ(parameters(next), 79'674'391'296);
  EXPECT_EQ(next.layer_types.size(), 4u);
  EXPECT_TRUE(next.linear(46));
  EXPECT_FALSE(next.linear(47));
  EXPECT_EQ(next.rotary_base, 1e7);
  const PublishedModel whole = read(R"({
    "model_type": "qwen3_5", "vision_config": {}, "tie_word_embeddings": false, "image_token_id": 248056,
    "text_config": {"attention_bias": false, "attn_output_gate": true, "output_gate_type": "swish",
      "full_attention_interval": 4, "head_dim": 256, "hidden_size": 5120, "intermediate_size": 17408,
      "linear_num_value_heads": 48, "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144,
      "mlp_only_layers": [], "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1,
      "mtp_use_dedicated_embeddings": false, "num_attention_heads": 24, "num_hidden_layers": 64,
      "num_key_value_heads": 4, "partial_rotary_factor": 0.25,
      "rope_parameters": {"mrope_interleaved": true, "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default"},
      "vocab_size": 248320}})");
  EXPECT_EQ(parameters(whole.model), 26'895'998'464);
  EXPECT_EQ(whole.model.partial_rotary_factor, 0.25);
  const Model moe = read(R"({"model_type": "qwen3_5_moe_text", "partial_rotary_factor": 0.25})").model;
  EXPECT_EQ(parameters(moe), 34'660'610'688);
  // As the classes of transformers have it where the file says nothing.
  EXPECT_EQ(moe.rotary_base, 10000);
  // A pattern that differs from the family's comes back.
  const Model full = read(R"({"model_type": "qwen3_5_text", "full_attention_interval": 1})").model;
  EXPECT_FALSE(full.any_linear());
  for (const Model& m : {next, whole.model, moe, full}) EXPECT_EQ(*parse_text(section_of(m)).model, m);
}

}  // namespace
}  // namespace sherd::models
