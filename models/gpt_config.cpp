#include "models/gpt_config.h"

#include <cmath>
#include <numeric>

#include "base/error.h"
#include "models/hub/adapter_targets.h"
#include "models/hub/config_json.h"

namespace sherd::models {
namespace {

/// Elements of a feed-forward network, and the multiply-adds of one token in it.
std::int64_t feed_forward_weights(const GptConfig& c, std::int64_t width) {
  return (c.gated() ? 3 : 2) * c.hidden_size * width;
}
/// Elements of the layer's matrices of attention, and the multiply-adds of one token with them.
std::int64_t attention_weights(const GptConfig& c, std::int64_t layer) {
  const config::Mla& mla = c.mla;
  if (const config::LinearAttention& linear = c.linear_attention; c.linear(layer))
    return c.hidden_size * (linear.width() + 2 * linear.value_width() + 2 * linear.num_value_heads);
  if (mla.kv_lora_rank == 0)
    return c.hidden_size * (c.qkv_width() + (c.attention_gate ? 2 : 1) * c.num_heads * c.head_dim);
  const std::int64_t queries = c.num_heads * c.head_dim, q = mla.q_lora_rank;
  return (q > 0 ? q * (c.hidden_size + queries) : c.hidden_size * queries) +
         c.hidden_size * (mla.kv_lora_rank + mla.qk_rope_head_dim) +
         mla.kv_lora_rank * c.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim) +
         c.num_heads * mla.v_head_dim * c.hidden_size;
}
/// Its other parameters: gains of norms, biases, sinks; convolutions and steps.
std::int64_t attention_vectors(const GptConfig& c, std::int64_t layer) {
  if (const config::LinearAttention& linear = c.linear_attention; c.linear(layer))
    return linear.width() * linear.conv_kernel_dim + 2 * linear.num_value_heads + linear.value_head_dim;
  const std::int64_t latents = c.mla.kv_lora_rank > 0 ? c.mla.kv_lora_rank + c.mla.q_lora_rank : 0;
  const std::int64_t gate = c.attention_gate ? c.num_heads * c.head_dim : 0;
  const std::int64_t biases = (c.has_qkv_bias() ? c.qkv_width() + gate : 0) + (c.bias ? c.hidden_size : 0);
  const std::int64_t head_gains = !c.qk_norm            ? 0
                                  : c.qk_norm_all_heads ? (c.num_heads + c.num_kv_heads) * c.head_dim
                                                        : 2 * c.head_dim;
  return latents + biases + head_gains + (c.attention_sinks ? c.num_heads : 0);
}
/// Elements of a decoder's attention to an encoder.
std::int64_t source_weights(const GptConfig& c, std::int64_t layer) {
  return c.has_encoder() && !c.encodes(layer) ? 4 * c.hidden_size * c.num_heads * c.head_dim : 0;
}
std::int64_t feed_forward_biases(const GptConfig& c, std::int64_t width) {
  return c.has_mlp_bias() ? (c.gated() ? 2 : 1) * width + c.hidden_size : 0;
}

/// Forward multiply-adds in the blocks of an encoder and a decoder, over all their `seq` tokens.
double encoder_decoder_products(const GptConfig& c, double seq, AttentionFlops convention) {
  const double source = seq * static_cast<double>(c.encoder.seq_length) / static_cast<double>(c.seq_length),
               target = seq - source, pair = static_cast<double>(2 * c.num_heads * c.head_dim),
               seen = convention == AttentionFlops::causal_half ? 0.5 * target : target;
  double sum = 0;
  for (std::int64_t layer = 0; layer < c.num_layers; ++layer) {
    const double own = static_cast<double>(attention_weights(c, layer) +
                                           feed_forward_weights(c, c.ffn_hidden_size)),
                 half = 0.5 * static_cast<double>(
                                  source_weights(c, layer));  // queries and results, or keys and values
    sum += c.encodes(layer) ? source * (own + source * pair)
                            : target * (own + half + (seen + source) * pair) + source * half;
  }
  return sum;
}

}  // namespace

GptConfig GptConfig::resolved() const {
  if (vocab_size <= 0) fail(ErrorKind::config, "model: the vocabulary must not be empty");
  GptConfig out = *this;
  try {
    static_cast<config::Model&>(out) = config::resolved(*this);
  } catch (const Error& error) {
    fail(error.kind(), "model: ", error.what());
  }
  if (has_encoder() && decoder_start_token_id >= vocab_size)
    fail(ErrorKind::config, "model: decoder_start_token_id ", decoder_start_token_id, " is none of ",
         vocab_size, " ids");
  if (out.max_text() <= 0)
    fail(ErrorKind::config, "model: sequences of ", seq_length, " tokens leave no room for text behind ",
         adapter.virtual_tokens(), " virtual ones");
  return out;
}

std::vector<std::int32_t> GptConfig::prompt() const {
  const std::int64_t prompts = adapter.has_prompt() ? adapter.prompt.prompts() : 1;
  require(prompts == 1, "texts of a model with ", prompts,
          " prompts are continued and scored by a model that has one of them (models::TaskPrompt)");
  std::vector<std::int32_t> out(static_cast<std::size_t>(adapter.virtual_tokens()));
  std::iota(out.begin(), out.end(), static_cast<std::int32_t>(padded_vocab()));
  return out;
}

tensor::Attention GptConfig::attention(std::int64_t layer) const {
  tensor::Attention out;
  out.heads = static_cast<int>(num_heads);
  out.kv_heads = static_cast<int>(num_kv_heads);
  out.dropout = static_cast<float>(attention_dropout);
  out.window = window(layer);
  out.scale = attention_multiplier;
  out.cap = static_cast<float>(attn_logit_softcapping);
  out.causal = causal && !encodes(layer);
  return out;
}

std::optional<tensor::Rotary> GptConfig::rotary(std::int64_t layer) const {
  if (!rotates(layer)) return std::nullopt;
  const bool own = sliding_rope && slides(layer);
  const config::RopeScaling& r = own ? sliding_rope->rope_scaling : rope_scaling;
  tensor::PairFactors factors;
  if (r.type == RotaryScaling::longrope)
    factors.values = std::make_shared<const std::vector<double>>(
        seq_length > r.original_max_positions ? r.long_factor : r.short_factor);
  // Half an element more than turn, whatever rounding makes of the quotient.
  const double share = mla.kv_lora_rank == 0 ? partial_rotary_factor
                                             : (static_cast<double>(mla.qk_rope_head_dim) + 0.5) /
                                                   static_cast<double>(head_dim);
  return tensor::Rotary{.base = own ? sliding_rope->rotary_base : rotary_base,
                        .share = share,
                        .scaling = r.type,
                        .factor = r.factor,
                        .low_freq_factor = r.low_freq_factor,
                        .high_freq_factor = r.high_freq_factor,
                        .beta_fast = r.beta_fast,
                        .beta_slow = r.beta_slow,
                        .truncate = r.truncate,
                        .original_positions = r.original_max_positions,
                        .factors = std::move(factors),
                        .query_beta = llama_4_scaling_beta,
                        .query_positions = llama_4_scaling_beta == 0 ? 0 : query_positions(),
                        .attention_factor = r.attention_factor};
}

tensor::Activation GptConfig::fused_activation() const {
  if (gated() || relu_power() > 0) return tensor::Activation::none;
  return activation == config::FfnActivation::gelu ? tensor::Activation::gelu_erf
                                                   : tensor::Activation::gelu_tanh;
}

double GptConfig::embedding_root(DType dtype) const {
  auto root = static_cast<float>(scale_embeddings ? std::sqrt(static_cast<double>(hidden_size)) : 1);
  if (dtype == DType::bf16) root = static_cast<float>(bf16(root));
  if (dtype == DType::f16) root = static_cast<float>(f16(root));
  return root;
}

tensor::Glu GptConfig::glu() const {
  switch (activation) {
    case config::FfnActivation::geglu_tanh:
      return tensor::Glu::geglu_tanh;
    case config::FfnActivation::swiglu_clamped:
      return tensor::Glu::swiglu_clamped;
    case config::FfnActivation::geglu:
      return tensor::Glu::geglu_erf;
    default:
      return tensor::Glu::swiglu;
  }
}

tensor::Activation GptConfig::head_activation() const {
  if (pools()) return tensor::Activation::none;
  return gated() ? tensor::Activation::gelu_erf : fused_activation();
}

autograd::Init GptConfig::init_of(std::int64_t inputs) const {
  return width_scaled_init ? autograd::Init::normal(0, init_std / std::sqrt(static_cast<double>(inputs)))
                           : init();
}

autograd::Init GptConfig::output_init(std::int64_t inputs) const {
  if (width_scaled_init) return init_of(inputs);
  if (norm_placement == config::NormPlacement::post_residual) return init();  // the stream does not grow
  return autograd::Init::normal(0, init_std / std::sqrt(2.0 * static_cast<double>(num_layers)));
}

parallel::MoeOptions GptConfig::experts(std::shared_ptr<parallel::PooledChoices> pooled) const {
  parallel::MoeOptions out;
  out.hidden = hidden_size, out.ffn_hidden = moe.ffn_hidden_size, out.experts = moe.experts;
  out.routing = {.top_k = static_cast<int>(moe.top_k),
                 .scores = moe.router,
                 .normalize = moe.norm_topk,
                 .scale = moe.routed_scaling_factor,
                 .groups = static_cast<int>(moe.groups),
                 .top_groups = static_cast<int>(moe.top_groups)};
  out.losses = {.balance = moe.aux_loss, .z = moe.z_loss, .kind = moe.aux_loss_type};
  out.pooled = std::move(pooled);
  out.capacity_factor = moe.capacity_factor, out.drop = moe.drop;
  out.jitter = moe.jitter;
  out.correction_bias = moe.correction_bias, out.bias_update = moe.bias_update;
  out.gated = gated(), out.glu = glu(), out.activation = fused_activation();
  out.bias = has_mlp_bias(), out.router_bias = moe.router_bias;
  out.init = init(), out.output_init = output_init();
  return out;
}

GptConfig gpt_config(const config::Config& config, std::int64_t vocabulary) {
  if (!config.model)
    fail(ErrorKind::config,
         "there is no `model` section: add one to the configuration (docs/getting_started.md, \"Your first "
         "training run\"), or give a second file with --config");
  GptConfig out{*config.model};
  if (out.vocab_size == 0) out.vocab_size = vocabulary;
  if (config.learns_preferences())  // the policy is compared with the reference, without noise
    out.dropout = out.attention_dropout = out.embedding_dropout = out.ffn_dropout = out.moe.jitter = 0;
  out = out.resolved();
  if (config.training.adapter.type != config::AdapterType::none) {
    out.type = published_as(out);
    out.adapter = resolved_adapter(config.training.adapter, out);
    if (config.learns_preferences()) out.adapter.lora.dropout = 0;
    out.moe.bias_update = 0;  // the router stays as it is
  }
  return out;
}

std::int64_t GptConfig::num_parameters(bool padding) const {
  const GptConfig c = resolved();
  const std::int64_t rows = padding ? c.padded_vocab() : c.vocab_size, hidden = c.hidden_size;
  const std::int64_t norm_size = c.norm == config::Norm::layernorm && c.norm_bias ? 2 * hidden : hidden;
  const bool first_lacks_one =
      c.norm_placement != config::NormPlacement::post && c.final_norm() && !c.norm_before(0);
  std::int64_t attention = 0;
  for (std::int64_t layer = 0; layer < c.num_layers; ++layer)
    attention += attention_weights(c, layer) + attention_vectors(c, layer) + source_weights(c, layer);
  if (c.has_encoder())  // norms before these, the encoder's last, and the biases of both stacks
    attention += (c.num_layers - c.encoder.num_layers + 1) * norm_size +
                 2 * c.num_heads * c.relative_attention_num_buckets;
  const auto feed_forward = [&](std::int64_t width) {
    return width == 0 ? 0 : feed_forward_weights(c, width) + feed_forward_biases(c, width);
  };
  const config::Moe& e = c.moe;
  const std::int64_t with_experts = e.blocks(c.num_layers);
  std::int64_t beside = feed_forward(e.shared_experts * e.ffn_hidden_size);
  if (e.shared_experts > 0 && e.shared_expert_gate) beside += hidden;
  if (e.use_residual) beside += feed_forward(c.ffn_hidden_size) + 2 * hidden + 2;
  const std::int64_t networks =
      (c.num_layers - with_experts) * feed_forward(c.ffn_hidden_size) +
      with_experts *
          (e.experts * (feed_forward(e.ffn_hidden_size) + hidden + (e.router_bias ? 1 : 0)) + beside);
  const std::int64_t tables =
      (rows + (c.tied()           ? 0
               : c.scores_texts() ? (padding ? c.padded_scores() : c.scores())
                                  : rows)) *
          hidden +
      ((c.position == config::PositionType::learned ? c.max_positions : 0) + c.token_types) * hidden;
  const std::int64_t score_biases = !c.has_head_bias() ? 0
                                    : !c.classifies()  ? rows
                                    : padding          ? c.padded_scores()
                                                       : c.scores();
  const std::int64_t sentences = c.pairs_texts()
                                     ? hidden * hidden + (c.bias ? hidden : 0) +
                                           (padding ? padded_sentence_scores : sentence_scores) * (hidden + 1)
                                     : 0;
  const std::int64_t head =
      score_biases + sentences +
      (c.has_head_dense() ? hidden * hidden + (c.bias ? hidden : 0) + (c.pools() ? 0 : norm_size) : 0);
  return tables + attention + c.num_layers * c.block_norms() * norm_size + networks +
         ((c.final_norm() ? 1 : 0) + (c.embedding_norm ? 1 : 0) - (first_lacks_one ? 1 : 0)) * norm_size +
         head;
}

double flops_per_token(const GptConfig& config, std::int64_t seq, AttentionFlops convention) {
  const GptConfig c = config.resolved();
  const double h = static_cast<double>(c.hidden_size);
  // The width of a key, and of a value, over all heads.
  const double pair_width = static_cast<double>(
      c.num_heads * (c.head_dim + (c.mla.kv_lora_rank > 0 ? c.mla.v_head_dim : c.head_dim)));
  const config::Moe& e = c.moe;
  const std::int64_t with_experts = e.blocks(c.num_layers);
  const std::int64_t gates =
      c.hidden_size *
      (e.experts + (e.shared_experts > 0 && e.shared_expert_gate ? 1 : 0) + (e.use_residual ? 2 : 0));
  const double networks =
      static_cast<double>(c.num_layers - with_experts) *
          static_cast<double>(feed_forward_weights(c, c.ffn_hidden_size)) +
      static_cast<double>(with_experts) *
          static_cast<double>(feed_forward_weights(c, (e.top_k + e.shared_experts) * e.ffn_hidden_size) +
                              gates + feed_forward_weights(c, e.use_residual ? c.ffn_hidden_size : 0));
  // Scores and their product with the values: one multiply-add each per pair of positions and column.
  // In a window of w of s tokens query i sees min(i + 1, w) keys: w - w²/2s on average. Without a causal
  // mask it sees as many behind it, and itself once.
  const double s = static_cast<double>(seq);
  double pairs = 0, products = 0;
  for (std::int64_t layer = 0; layer < c.num_layers; ++layer) {
    products += static_cast<double>(attention_weights(c, layer));
    if (const config::LinearAttention& linear = c.linear_attention; c.linear(layer)) {
      // A row reads its state twice and changes it once.
      products += 3.0 * static_cast<double>(linear.key_head_dim * linear.value_width());
      continue;
    }
    const bool window = c.slides(layer) && c.sliding_window < seq;
    const double w = static_cast<double>(c.sliding_window), causal = window ? w - w * w / (2 * s) : 0.5 * s;
    const double both = window ? 2 * causal : s;
    pairs += convention == AttentionFlops::causal_half && c.causal ? causal : both;
  }
  const bool both = c.has_encoder();
  const double blocks = 2.0 * (both ? encoder_decoder_products(c, s, convention) / s
                                    : products + pairs * pair_width + networks);
  const double scored = both ? static_cast<double>(c.target_length()) / static_cast<double>(c.seq_length) : 1;
  const double head = 2.0 * scored * h * (static_cast<double>(c.scores()) + (c.has_head_dense() ? h : 0.0));
  // Weights that stay as they are have no gradients.
  const double trained = c.adapter.type == config::AdapterType::none ? 3.0 : 2.0;
  return trained * blocks + trained * head;
}

}  // namespace sherd::models
