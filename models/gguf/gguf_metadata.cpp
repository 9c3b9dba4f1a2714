#include "models/gguf/gguf_metadata.h"

#include <algorithm>
#include <cmath>

#include "models/hub/config_json.h"

namespace sherd::models {
namespace {

using config::Model;

bool any_window(const Model& m) {
  for (std::int64_t i = 0; i < m.num_layers; ++i)
    if (m.slides(i)) return true;
  return false;
}

/// Graphs that have no windows are right as far as one reaches.
bool is_cut_at_window(const Model& m, const Family& family) {
  return !family.gguf.windows && any_window(m) && m.sliding_window < m.max_positions;
}

/// Tokens that a text may have.
std::int64_t context_of(const Model& m, const Family& family) {
  if (m.has_encoder()) return m.encoder.seq_length;
  return is_cut_at_window(m, family) ? m.sliding_window : m.max_positions;
}

/// A layer whose positions are those of layers without a window.
std::int64_t usual_layer(const Model& m) {
  for (std::int64_t i = 0; i < m.num_layers; ++i)
    if (m.rotates(i) && !m.linear(i) && !(m.sliding_rope && m.slides(i))) return i;
  return 0;
}

/// The first thing of the positions that graphs lack.
std::optional<std::string> lacks_positions(const Model& m, const Gguf& graph) {
  if (m.position != config::PositionType::rotary) return std::nullopt;
  const config::RopeScaling& rope = m.rope_scaling;
  const auto scaling = [&] { return cat("model.rope_scaling of type \"", config::name_of(rope.type), '"'); };
  if (m.sliding_rope && m.sliding_rope->rope_scaling.type != RotaryScaling::none)
    return "model.sliding_rope.rope_scaling";
  if (rope.type == RotaryScaling::yarn && (rope.beta_fast != 32 || rope.beta_slow != 1))
    return "model.rope_scaling.beta_fast and beta_slow that are not 32 and 1";
  if ((rope.type == RotaryScaling::llama3 || rope.type == RotaryScaling::longrope) && !graph.rope_factors)
    return scaling();
  if (rope.type == RotaryScaling::longrope && rope.long_factor.empty()) return scaling();
  return std::nullopt;
}

void describe_positions(GgufMetadata& to, const std::string& of, const GptConfig& m, const Family& family) {
  const config::Mla& mla = m.mla;
  const bool latent = mla.kv_lora_rank > 0;
  const std::int64_t turned =
      latent ? mla.qk_rope_head_dim : tensor::rotary_size({.share = m.partial_rotary_factor}, m.head_dim);
  to.set(of + "rope.dimension_count", turned);
  to.set(of + "rope.freq_base", m.rotary_base);
  if (family.gguf.windows)
    to.set(of + "rope.freq_base_swa", m.sliding_rope ? m.sliding_rope->rotary_base : m.rotary_base);
  if (family.gguf.tiled_values) {  // pairs by three axes in turn, along which texts have the same positions
    const auto half = static_cast<std::int32_t>(turned / 2);
    to.set(of + "rope.dimension_sections",
           std::vector<std::int32_t>{(half + 2) / 3, (half + 1) / 3, half / 3, 0});
  }
  const config::RopeScaling& rope = m.rope_scaling;
  const auto original = [&] {
    to.set(of + "rope.scaling.original_context_length", rope.original_max_positions);
  };
  const std::int64_t usual = usual_layer(m);
  const double scale = m.rotary(usual) ? tensor::attention_scale(*m.rotary(usual)) : 1;
  if (rope.type == RotaryScaling::linear) {
    to.set(of + "rope.scaling.type", "linear");
    to.set(of + "rope.scaling.factor", rope.factor);
  } else if (rope.type == RotaryScaling::longrope) {
    to.set(of + "rope.scaling.type", "longrope");
    to.set(of + "rope.scaling.attn_factor", scale);
    original();
  } else if (rope.type == RotaryScaling::yarn) {
    const double step = rope.factor > 1 ? 0.1 * std::log(rope.factor) : 0;
    to.set(of + "rope.scaling.type", "yarn");
    to.set(of + "rope.scaling.factor", rope.factor);
    original();
    if (latent && rope.factor > 1) {
      // Readers multiply scores by (1 + this·ln(factor))², and leave cosines as they are.
      const double all = std::sqrt(m.attention_multiplier * std::sqrt(static_cast<double>(m.head_dim)));
      to.set(of + "rope.scaling.yarn_log_multiplier", 0.1 * (all - 1) / step);
    } else {
      to.set(of + "rope.scaling.attn_factor", scale / (1 + step));  // readers multiply by the rest
    }
  }
  if (m.llama_4_scaling_beta != 0) {
    to.set(of + "attention.temperature_scale", m.llama_4_scaling_beta);
    if (rope.original_max_positions == 0)
      to.set(of + "rope.scaling.original_context_length", m.query_positions());
  }
}

void describe_attention(GgufMetadata& to, const std::string& of, const GptConfig& m, const Family& family) {
  const config::Mla& mla = m.mla;
  const bool latent = mla.kv_lora_rank > 0;
  to.set(of + "attention.head_count", m.num_heads);
  to.set(of + "attention.head_count_kv", latent ? 1 : m.num_kv_heads);
  to.set(of + "attention.key_length", latent ? mla.kv_lora_rank + mla.qk_rope_head_dim : m.head_dim);
  to.set(of + "attention.value_length", latent ? mla.kv_lora_rank : m.head_dim);
  if (latent) {
    to.set(of + "attention.q_lora_rank", mla.q_lora_rank);
    to.set(of + "attention.kv_lora_rank", mla.kv_lora_rank);
    to.set(of + "attention.key_length_mla", mla.qk_nope_head_dim + mla.qk_rope_head_dim);
    to.set(of + "attention.value_length_mla", mla.v_head_dim);
  }
  if (!m.causal) to.set(of + "attention.causal", GgufValue(false));
  if (family.gguf.windows && (any_window(m) || m.attn_logit_softcapping > 0 || m.attention_sinks)) {
    // A window to both sides has as many tokens on each, beside the query's own.
    const std::int64_t window = m.sliding_window > 0 ? m.sliding_window : m.max_positions;
    std::vector<bool> layers;
    for (std::int64_t i = 0; i < m.num_layers; ++i) layers.push_back(m.slides(i));
    to.set(of + "attention.sliding_window", m.causal ? window : 2 * (window - 1));
    to.set(of + "attention.sliding_window_pattern", layers);
  }
  if (m.attn_logit_softcapping > 0) to.set(of + "attn_logit_softcapping", m.attn_logit_softcapping);
  if (m.has_encoder()) {
    to.set(of + "attention.relative_buckets_count", m.relative_attention_num_buckets);
    to.set(of + "decoder_block_count", m.num_layers - m.encoder.num_layers);
    to.set(of + "decoder_start_token_id", m.decoder_start_token_id);
  }
  if (!m.any_linear()) return;
  const config::LinearAttention& linear = m.linear_attention;
  std::vector<bool> recurrent;
  for (std::int64_t i = 0; i < m.num_layers; ++i) recurrent.push_back(m.linear(i));
  to.set(of + "attention.recurrent_layers", recurrent);
  to.set(of + "ssm.conv_kernel", linear.conv_kernel_dim);
  to.set(of + "ssm.state_size", linear.key_head_dim);
  to.set(of + "ssm.group_count", linear.num_key_heads);
  to.set(of + "ssm.time_step_rank", linear.num_value_heads);
  to.set(of + "ssm.inner_size", linear.value_width());
}

void describe_experts(GgufMetadata& to, const std::string& of, const GptConfig& m) {
  const config::Moe& moe = m.moe;
  if (moe.experts == 0) return;
  to.set(of + "expert_count", moe.experts);
  to.set(of + "expert_used_count", moe.top_k);
  to.set(of + "expert_feed_forward_length", moe.ffn_hidden_size);
  to.set(of + "leading_dense_block_count", moe.first_dense);
  to.set(of + "expert_shared_count", moe.shared_experts);
  if (moe.shared_experts > 0)
    to.set(of + "expert_shared_feed_forward_length", moe.shared_experts * moe.ffn_hidden_size);
  to.set(of + "expert_gating_func", std::int64_t{moe.router == RouterScores::sigmoid ? 2 : 1});
  to.set(of + "expert_weights_norm", GgufValue(moe.norm_topk));
  if (moe.routed_scaling_factor != 1) to.set(of + "expert_weights_scale", moe.routed_scaling_factor);
  if (moe.groups > 1) {
    to.set(of + "expert_group_count", moe.groups);
    to.set(of + "expert_group_used_count", moe.top_groups);
  }
}

}  // namespace

void require_gguf(const GptConfig& m, const Family& family) {
  const auto refuse = [&](const auto&... what) {
    fail(ErrorKind::config, "llama.cpp does not compute ", what..., ", which this model of family ",
         family.name, " has: export it without --format gguf, for transformers");
  };
  if (!family.gguf.architecture) refuse("such models");
  const bool scores = m.head == config::Head::sequence_classification && !m.causal;
  if (m.scores_texts() && !scores)
    refuse("a head that scores texts or tokens (", config::name_of(m.head), ")");
  if (const auto lack = lacks_positions(m, family.gguf)) refuse(*lack);
  if (!family.gguf.lacks) return;
  if (const auto lack = family.gguf.lacks(m)) refuse(*lack);
}

void describe_gguf(GgufMetadata& to, const GptConfig& m, const Family& family) {
  const std::string of = cat(family.gguf.architecture, ".");
  const bool all_experts = m.moe.experts > 0 && m.moe.blocks(m.num_layers) == m.num_layers;
  to.set(of + "vocab_size", m.vocab_size);
  to.set(of + "context_length", context_of(m, family));
  to.set(of + "embedding_length", m.hidden_size);
  to.set(of + "block_count", m.has_encoder() ? m.encoder.num_layers : m.num_layers);
  to.set(of + "feed_forward_length", all_experts ? m.moe.ffn_hidden_size : m.ffn_hidden_size);
  to.set(of + (m.norm == config::Norm::rmsnorm ? "attention.layer_norm_rms_epsilon"
                                               : "attention.layer_norm_epsilon"),
         m.norm_epsilon);
  describe_attention(to, of, m, family);
  if (m.position == config::PositionType::rotary) describe_positions(to, of, m, family);
  describe_experts(to, of, m);
  if (m.final_logit_softcapping > 0) to.set(of + "final_logit_softcapping", m.final_logit_softcapping);
  if (family.can("residual_multiplier")) {
    to.set(of + "embedding_scale", m.embedding_multiplier);
    to.set(of + "residual_scale", m.residual_multiplier);
    to.set(of + "logit_scale", m.logits_scaling);
    if (m.attention_multiplier != 0) to.set(of + "attention.scale", m.attention_multiplier);
  }
  if (m.classifies()) {
    to.set(of + "classifier.output_labels", m.labels);
    to.set(of + "classifier.pooling_type", std::int64_t{2});  // by the first token
  }
  if (!m.causal) to.set(of + "pooling_type", std::int64_t{m.classifies() ? 4 : 1});  // by rank, by the mean
}

std::vector<std::pair<std::string, std::vector<float>>> position_tensors(const GptConfig& m,
                                                                         const Family& family) {
  const config::RopeScaling& rope = m.rope_scaling;
  if (!family.gguf.rope_factors || m.position != config::PositionType::rotary) return {};
  const auto narrow = [](const std::vector<double>& values) {
    return std::vector<float>(values.begin(), values.end());
  };
  if (rope.type == RotaryScaling::longrope)
    return {{"rope_factors_long.weight", narrow(rope.long_factor)},
            {"rope_factors_short.weight", narrow(rope.short_factor)}};
  if (rope.type != RotaryScaling::llama3) return {};
  tensor::Rotary scaled = *m.rotary(usual_layer(m)), plain = scaled;
  plain.scaling = RotaryScaling::none;
  const std::int64_t half = tensor::rotary_size(scaled, m.head_dim) / 2;
  std::vector<double> factors = tensor::rotary_frequencies(plain, half);
  const std::vector<double> own = tensor::rotary_frequencies(scaled, half);
  for (std::size_t i = 0; i < factors.size(); ++i) factors[i] /= own[i];
  return {{"rope_freqs.weight", narrow(factors)}};
}

std::vector<std::string> gguf_notes(const GptConfig& m) {
  const Family& family = family_of(published_as(m));
  std::vector<std::string> out;
  if (is_cut_at_window(m, family))
    out.push_back(cat("llama.cpp has no windows for ", family.name,
                      ": the file's context_length is the window, ", m.sliding_window,
                      ", up to which it computes the same"));
  if (m.rope_scaling.type == RotaryScaling::yarn && !m.rope_scaling.truncate)
    out.emplace_back(
        "llama.cpp rounds the bounds of yarn's ramp, which this model does not "
        "(model.rope_scaling.truncate false): its logits will differ a little");
  if (m.head == config::Head::mlm || m.head == config::Head::pretraining)
    out.emplace_back("llama.cpp has no head for masked tokens: the file is for embeddings alone");
  return out;
}

}  // namespace sherd::models
