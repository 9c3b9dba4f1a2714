#include "models/families/family.h"

namespace sherd::models {
namespace {

using config::FfnActivation;
using M = config::Model;

JsonKeys keys() {
  return {whole("n_positions", &M::max_positions, 1, config::most_positions).alias("max_position_embeddings"),
          whole("n_embd", &M::hidden_size, 1, config::most_hidden).alias("hidden_size"),
          whole("n_layer", &M::num_layers, 1, config::most_layers).alias("num_hidden_layers"),
          whole("n_head", &M::num_heads, 1, config::most_heads).alias("num_attention_heads"),
          whole("n_inner", &M::ffn_hidden_size, 1, config::most_ffn_hidden)
              .written([](const Published& p) {
                const std::int64_t ffn = p.model.ffn_hidden_size;
                return ffn == 4 * p.model.hidden_size ? config::Node() : config::node_of(ffn);
              })
              .with(config::or_null),
          activation("activation_function",
                     {{"gelu_new", FfnActivation::gelu_tanh},
                      {"gelu", FfnActivation::gelu},
                      {"gelu_pytorch_tanh", FfnActivation::gelu_tanh},
                      {"gelu_fast", FfnActivation::gelu_tanh}},
                     "\"gelu_new\" and \"gelu\" are"),
          share("resid_pdrop", &M::dropout),
          share("embd_pdrop", &M::embedding_dropout),
          share("attn_pdrop", &M::attention_dropout),
          positive("layer_norm_epsilon", &M::norm_epsilon),
          only("scale_attn_weights", is_true, "scores are divided by the root of a head's size"),
          only("scale_attn_by_inverse_layer_idx", config::is_false, "all layers scale their scores alike")};
}

TensorNames names() {
  return {.prefix = "transformer.",
          .tokens = "wte",
          .positions = "wpe",
          .norm = "ln_f",
          .blocks = "h",
          .norm_1 = "ln_1",
          .norm_2 = "ln_2",
          .qkv = {"attn.c_attn"},
          .projection = "attn.c_proj",
          .up = {"mlp.c_fc"},
          .down = "mlp.c_proj",
          .transposed = true};
}

std::optional<std::string> gpt2_lacks(const M& m) {
  if (m.num_kv_heads != m.num_heads) return "model.num_kv_heads";
  if (m.head_dim * m.num_heads != m.hidden_size) return "model.head_dim";
  return std::nullopt;
}

}  // namespace

Family gpt2() {
  return {
      .name = "gpt2",
      .architecture = "GPT2LMHeadModel",
      .class_defaults =
          [](Published& p) {
            set_sizes(p.model, {50257, 768, 0, 12, 12, 0, 1024});
          },
      .keys = keys(),
      .names = names(),
      .lora_targets = {"c_attn"},
      .ia3_targets = {"c_attn", "mlp.c_proj"},
      .has = {},
      .lacks = gpt2_lacks,
      .gguf = {
          .architecture = "gpt2", .packed_qkv = true, .lacks = [](const M& m) -> std::optional<std::string> {
            if (m.activation != FfnActivation::gelu_tanh) return "model.activation \"gelu\"";
            return std::nullopt;
          }}};
}

}  // namespace sherd::models
