#include "models/gpt_options.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "config/model.h"

namespace sherd::models {
namespace {

template <class... Args>
void check(bool holds, const Args&... args) {
  if (!holds) fail(ErrorKind::config, "model: ", args...);
}

std::int64_t round_up(std::int64_t value, std::int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

/// The bounds of config/model.h, which keep every product of extents far from overflow.
void check_bounds(const GptOptions& o) {
  struct Bound {
    const char* name;
    std::int64_t value, most;
  };
  for (const auto& [name, value, most] :
       {Bound{"vocab_size", o.vocab_size, config::most_vocabulary},
        {"vocab_multiple", o.vocab_multiple, config::most_vocabulary},
        {"max_seq", o.max_seq, config::most_positions},
        {"position_rows", o.position_rows, config::most_positions},
        {"hidden", o.hidden, config::most_hidden},
        {"layers", o.layers, config::most_layers},
        {"heads", o.heads, config::most_heads},
        {"head_dim", o.head_dim, config::most_hidden},
        {"heads x head_dim", std::int64_t{o.heads} * std::min(o.head_dim, config::most_hidden),
         config::most_ffn_hidden},
        {"ffn_hidden", o.ffn_hidden, config::most_ffn_hidden}})
    check(value <= most, name, " ", value, " is beyond ", most, ", the most there can be");
}

/// Elements of a feed-forward network, and the multiply-adds of one token in it.
std::int64_t feed_forward_weights(const GptOptions& o, std::int64_t width) {
  return (o.mlp == Mlp::swiglu ? 3 : 2) * o.hidden * width;
}
std::int64_t feed_forward_biases(const GptOptions& o, std::int64_t width) {
  return o.bias ? (o.mlp == Mlp::swiglu ? 2 : 1) * width + o.hidden : 0;
}

void resolve_experts(GptOptions& o) {
  ExpertsOptions& e = o.experts;
  if (e.count == 0) return;
  if (e.ffn_hidden == 0) e.ffn_hidden = o.ffn_hidden;
  check(e.count > 0 && e.count <= config::most_experts, e.count, " experts: there may be 1 to ",
        config::most_experts);
  check(e.ffn_hidden > 0 && e.ffn_hidden <= config::most_ffn_hidden, "an expert's width of ", e.ffn_hidden,
        " is beyond ", config::most_ffn_hidden, ", the most there can be");
  check(e.every >= 1 && e.first_dense >= 0 && e.shared >= 0, "experts in every ", e.every, "th block behind ",
        e.first_dense, " dense ones, ", e.shared, " of them shared, make no sense");
  check(!e.residual || e.shared == 0, "shared experts and a residual part are both a dense part beside the ",
        "experts: take one");
  check(e.shared <= config::most_ffn_hidden / e.ffn_hidden, e.shared, " shared experts are too many");
  check(e.blocks(o.layers) > 0, "no block of ", o.layers, " has experts: the first ", e.first_dense,
        " have none, and of the others every ", e.every, "th has");
}

}  // namespace

GptOptions GptOptions::llama() {
  GptOptions o;
  o.norm = Norm::rms_norm;
  o.positions = PositionKind::rotary;
  o.mlp = Mlp::swiglu;
  o.bias = false;
  o.tied_embeddings = false;
  return o;
}

GptOptions GptOptions::resolved() const {
  GptOptions o = *this;
  check(o.vocab_size > 0, "the vocabulary must not be empty");
  check(o.vocab_multiple > 0, "the vocabulary cannot be padded to a multiple of ", o.vocab_multiple);
  check(o.max_seq > 0 && o.hidden > 0 && o.layers > 0 && o.heads > 0, "max_seq ", o.max_seq, ", hidden ",
        o.hidden, ", layers ", o.layers, " and heads ", o.heads, " must all be positive");
  check_bounds(o);
  if (o.kv_heads == 0) o.kv_heads = o.heads;
  check(o.kv_heads > 0 && o.heads % o.kv_heads == 0, o.heads, " heads cannot share ", o.kv_heads,
        " key-value heads evenly");
  if (o.head_dim == 0) {
    check(o.hidden % o.heads == 0, "hidden ", o.hidden, " is not a multiple of heads ", o.heads,
          "; set head_dim to have them differ");
    o.head_dim = o.hidden / o.heads;
  }
  check(o.head_dim > 0, "head_dim ", o.head_dim, " must be positive");
  if (o.position_rows == 0) o.position_rows = o.max_seq;
  check(o.position_rows >= o.max_seq, "sequences of ", o.max_seq, " tokens are longer than the ",
        o.position_rows, " positions there are");
  if (o.bias) o.qkv_bias = true;
  check(o.sliding_window >= 0, "a sliding window of ", o.sliding_window, " tokens makes no sense");
  check(o.positions != PositionKind::rotary || o.head_dim % 2 == 0,
        "rotary positions need an even head_dim, not ", o.head_dim);
  if (o.ffn_hidden == 0) o.ffn_hidden = o.mlp == Mlp::swiglu ? round_up(8 * o.hidden / 3, 64) : 4 * o.hidden;
  check(o.ffn_hidden > 0, "ffn_hidden ", o.ffn_hidden, " must be positive");
  resolve_experts(o);
  check(o.adapter.virtual_tokens >= 0 && o.max_text() > 0, "sequences of ", o.max_seq,
        " tokens leave no room for ", "text behind ", o.adapter.virtual_tokens, " virtual ones");
  for (const float p : {o.embedding_dropout, o.attention_dropout, o.hidden_dropout})
    check(p >= 0.0f && p < 1.0f, "a dropout probability must be in [0, 1), not ", p);
  check(o.norm_eps > 0, "norm_eps ", o.norm_eps, " must be positive");
  check(o.init_std > 0, "init_std ", o.init_std, " must be positive");
  check(o.rotary.base > 1, "a base of rotary positions of ", o.rotary.base, " must be above 1");
  return o;
}

std::int64_t GptOptions::padded_vocab() const {
  return round_up(vocab_size, vocab_multiple);
}

std::vector<std::int32_t> GptOptions::prompt() const {
  require(adapter.prompts == 1, "texts of a model with ", adapter.prompts,
          " prompts are continued and scored by a model that has one of them (models::TaskPrompt)");
  std::vector<std::int32_t> out(static_cast<std::size_t>(adapter.virtual_tokens));
  std::iota(out.begin(), out.end(), static_cast<std::int32_t>(padded_vocab()));
  return out;
}

tensor::Activation fused_activation(Mlp mlp) {
  switch (mlp) {
    case Mlp::gelu_tanh:
      return tensor::Activation::gelu_tanh;
    case Mlp::gelu_erf:
      return tensor::Activation::gelu_erf;
    case Mlp::swiglu:
      break;
  }
  return tensor::Activation::none;
}

autograd::Init GptOptions::output_init() const {
  return autograd::Init::normal(0, init_std / std::sqrt(2.0 * static_cast<double>(layers)));
}

tensor::Attention GptOptions::geometry() const {
  tensor::Attention geometry;
  geometry.heads = heads;
  geometry.kv_heads = kv_heads;
  geometry.dropout = attention_dropout;
  geometry.window = sliding_window;
  return geometry;
}

parallel::MoeOptions GptOptions::moe(std::shared_ptr<parallel::PooledChoices> pooled) const {
  parallel::MoeOptions out;
  out.hidden = hidden, out.ffn_hidden = experts.ffn_hidden, out.experts = experts.count;
  out.routing = experts.routing, out.losses = experts.losses;
  out.pooled = std::move(pooled);
  out.capacity_factor = experts.capacity_factor, out.drop = experts.drop;
  out.jitter = experts.jitter, out.bias_update = experts.bias_update;
  out.gated = mlp == Mlp::swiglu, out.activation = fused_activation(mlp);
  out.bias = bias;
  out.init = autograd::Init::normal(0, init_std), out.output_init = output_init();
  return out;
}

std::int64_t GptOptions::num_parameters(bool padding) const {
  const GptOptions o = resolved();
  const std::int64_t rows = padding ? o.padded_vocab() : o.vocab_size;
  const std::int64_t norm_size = o.norm == Norm::layer_norm ? 2 * o.hidden : o.hidden;
  const std::int64_t attention_width = o.heads * o.head_dim;
  const std::int64_t weights = o.hidden * (o.qkv_width() + attention_width);
  const std::int64_t biases = (o.qkv_bias ? o.qkv_width() : 0) + (o.bias ? o.hidden : 0);
  const std::int64_t head_gains = o.qk_norm ? 2 * o.head_dim : 0;
  const auto feed_forward = [&](std::int64_t width) {
    return width == 0 ? 0 : feed_forward_weights(o, width) + feed_forward_biases(o, width);
  };
  const ExpertsOptions& e = o.experts;
  const std::int64_t with_experts = e.blocks(o.layers);
  std::int64_t beside = feed_forward(e.shared * e.ffn_hidden);
  if (e.shared > 0 && e.shared_gate) beside += o.hidden;
  if (e.residual) beside += feed_forward(o.ffn_hidden) + 2 * o.hidden + 2;
  const std::int64_t networks = (o.layers - with_experts) * feed_forward(o.ffn_hidden) +
                                with_experts * (e.count * (feed_forward(e.ffn_hidden) + o.hidden) + beside);
  const std::int64_t tables = rows * o.hidden * (o.tied_embeddings ? 1 : 2) +
                              (o.positions == PositionKind::learned ? o.position_rows * o.hidden : 0);
  return tables + o.layers * (weights + biases + head_gains + 2 * norm_size) + networks + norm_size;
}

double flops_per_token(const GptOptions& options, std::int64_t seq, AttentionFlops convention,
                       autograd::Recompute recompute) {
  const GptOptions o = options.resolved();
  const double h = static_cast<double>(o.hidden);
  const double attention_width = static_cast<double>(o.heads * o.head_dim);
  const double products = h * static_cast<double>(o.qkv_width()) + attention_width * h;
  const ExpertsOptions& e = o.experts;
  const std::int64_t with_experts = e.blocks(o.layers);
  const std::int64_t gates =
      o.hidden * (e.count + (e.shared > 0 && e.shared_gate ? 1 : 0) + (e.residual ? 2 : 0));
  const double networks =
      static_cast<double>(o.layers - with_experts) *
          static_cast<double>(feed_forward_weights(o, o.ffn_hidden)) +
      static_cast<double>(with_experts) *
          static_cast<double>(feed_forward_weights(o, (e.routing.top_k + e.shared) * e.ffn_hidden) + gates +
                              feed_forward_weights(o, e.residual ? o.ffn_hidden : 0));
  // Scores and their product with the values: one multiply-add each per pair of positions and column.
  // In a window of w of s tokens query i sees min(i + 1, w) keys: w - w²/2s on average.
  const double s = static_cast<double>(seq), w = static_cast<double>(o.sliding_window);
  const bool window = o.sliding_window > 0 && o.sliding_window < seq;
  const double causal = window ? w - w * w / (2 * s) : 0.5 * s;
  const double pairs = convention == AttentionFlops::causal_half ? causal : window ? 2 * causal : s;
  const double blocks =
      static_cast<double>(o.layers) * (2.0 * products + 2.0 * 2.0 * pairs * attention_width) + 2.0 * networks;
  const double head = 2.0 * h * static_cast<double>(o.vocab_size);
  // Weights that stay as they are have no gradients.
  const double trained = o.adapter.type == config::AdapterType::none ? 3.0 : 2.0;
  const double passes = recompute == autograd::Recompute::full ? trained + 1 : trained;
  return passes * blocks + trained * head;
}

}  // namespace sherd::models
