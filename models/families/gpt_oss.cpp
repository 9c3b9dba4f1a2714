#include "models/families/family.h"
#include "tensor/glu.h"

// GPT-OSS, whose experts are published as one tensor of all, in MXFP4 or as they are.
namespace sherd::models {
namespace {

JsonKeys gpt_oss_keys() {
  JsonKeys keys = joined(
      decoder_sizes(
          activation("hidden_act", {{"silu", config::FfnActivation::swiglu_clamped}}, "\"silu\" is")),
      rope_keys(), window_keys({.listed = true, .always = true}),
      experts_keys("num_local_experts", "num_experts"),
      JsonKeys{
          only("attention_bias", is_true, "the projections of attention have biases here")
              .written([](const Published&) { return config::node_of(true); }),
          only("swiglu_limit", config::equals_number(tensor::clamped_glu_limit), "gates are clamped so"),
          only("swiglu_alpha", config::equals_number(tensor::clamped_glu_alpha), "gates are sharpened so"),
          idle("experts_per_token"), idle("initial_context_length")});
  write_expert_width(keys);
  return keys;
}

}  // namespace

Family gpt_oss() {
  return {.name = "gpt_oss",
          .architecture = "GptOssForCausalLM",
          .class_defaults =
              [](Published& p) {
                set_sizes(p.model, {201088, 2880, 2880, 36, 64, 8, 131072});
                p.model.head_dim = 64, p.model.norm_epsilon = 1e-5, p.window = 128;
                p.model.moe.experts = 128, p.model.moe.top_k = 4;
                p.rope_theta = 150000, p.rope.scaling.type = RotaryScaling::yarn;
                p.rope.scaling.factor = 32, p.rope.scaling.truncate = false;
                p.rope.scaling.original_max_positions = 4096;
              },
          .keys = gpt_oss_keys(),
          .names = {.router = "mlp.router", .expert_up = {"gate_up_proj"}, .stacked_experts = true},
          .ia3_targets = {"k_proj", "v_proj"},
          .has = {"sliding_window", "layer_types", "moe"},
          .lacks = lacks_mixture,
          .gguf = {
              .architecture = "gpt-oss", .own_head = true, .windows = true, .norm_2 = "post_attention_norm"}};
}

}  // namespace sherd::models
