#include "models/families/family.h"

// Phi-3 and Phi-4: Llama with fused projections, longer models with LongRoPE.
namespace sherd::models {
namespace {

using M = config::Model;

/// The first length of LongRoPE, which in this class goes before what rope_scaling says.
JsonKey first_positions() {
  const auto write = [](const Published& p) {
    const std::int64_t first = p.model.rope_scaling.original_max_positions;
    return config::node_of(first > 0 ? first : p.model.max_positions);
  };
  return whole("original_max_position_embeddings", &Published::first_positions, 1, config::most_positions)
      .written(write);
}

/// transformers 4 takes LongRoPE's section with three keys alone, and finds the rest as this does.
JsonKeys phi3_rope() {
  JsonKeys keys = rope_keys({.partial = true});
  for (JsonKey& key : keys)
    if (key.name == "rope_scaling")
      key.write = [plain = key.write](const Published& p, config::Selection selection) {
        config::Node out = plain(p, selection);
        config::Model bare = p.model;
        bare.rope_scaling.attention_factor = 0;
        const bool usual = config::resolved(bare).rope_scaling == p.model.rope_scaling;
        if (p.model.rope_scaling.type != RotaryScaling::longrope || !usual) return out;
        std::erase_if(out.members, [](const auto& member) {
          return !member.first.ends_with("_factor") || member.first == "attention_factor";
        });
        out.members.emplace_back("type", config::node_of(std::string("longrope")));
        return out;
      };
  return keys;
}

std::optional<std::string> phi3_lacks(const M& m) {
  const RotaryScaling type = m.rope_scaling.type;
  if (type == RotaryScaling::none || type == RotaryScaling::longrope) return std::nullopt;
  return cat("model.rope_scaling of type \"", config::name_of(type), '"');
}

}  // namespace

Family phi3() {
  return {.name = "phi3",
          .architecture = "Phi3ForCausalLM",
          .class_defaults =
              [](Published& p) {
                set_sizes(p.model, {32064, 3072, 8192, 32, 32, 0, 4096});
                p.model.norm_epsilon = 1e-5, p.first_positions = 4096;
              },
          .keys = joined(
              decoder_sizes(),
              JsonKeys{share("resid_pdrop", &M::dropout), share("embd_pdrop", &M::embedding_dropout),
                       first_positions(), only("lm_head_bias", config::is_false, "the head has no bias"),
                       only("full_attn_mod", config::equals_number(1), "all layers attend alike"),
                       only("interpolate_factor", config::equals_number(1),
                            "positions stay as they are"),  // By default the class has 32000, which a smaller
                                                            // vocabulary does not have.
                       idle("pad_token_id")
                           .written([](const Published&) { return config::Node(); })
                           .with(config::or_null)},
              no_biases(false, false), phi3_rope(), window_keys()),
          .names = {.qkv = {"self_attn.qkv_proj"}, .up = {"mlp.gate_up_proj"}},
          .lora_targets = {"qkv_proj"},
          .ia3_targets = {"qkv_proj", "down_proj"},
          .has = {"sliding_window", "partial_rotary_factor"},
          .lacks = phi3_lacks,
          .gguf = {.architecture = "phi3",
                   .packed_qkv = true,
                   .packed_up = true,
                   .rope_factors = true,
                   .lacks = lacks_other_heads}};
}

}  // namespace sherd::models
