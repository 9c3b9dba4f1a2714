#include "models/gpt_options.h"

#include <algorithm>

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
        {"hidden", o.hidden, config::most_hidden},
        {"layers", o.layers, config::most_layers},
        {"heads", o.heads, config::most_heads},
        {"head_dim", o.head_dim, config::most_hidden},
        {"heads x head_dim", std::int64_t{o.heads} * std::min(o.head_dim, config::most_hidden),
         config::most_ffn_hidden},
        {"ffn_hidden", o.ffn_hidden, config::most_ffn_hidden}})
    check(value <= most, name, " ", value, " is beyond ", most, ", the most there can be");
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
  check(o.positions != PositionKind::rotary || o.head_dim % 2 == 0,
        "rotary positions need an even head_dim, not ", o.head_dim);
  if (o.ffn_hidden == 0) o.ffn_hidden = o.mlp == Mlp::swiglu ? round_up(8 * o.hidden / 3, 64) : 4 * o.hidden;
  check(o.ffn_hidden > 0, "ffn_hidden ", o.ffn_hidden, " must be positive");
  for (const float p : {o.embedding_dropout, o.attention_dropout, o.hidden_dropout})
    check(p >= 0.0f && p < 1.0f, "a dropout probability must be in [0, 1), not ", p);
  check(o.norm_eps > 0, "norm_eps ", o.norm_eps, " must be positive");
  check(o.init_std > 0, "init_std ", o.init_std, " must be positive");
  check(o.rotary_base > 1, "rotary_base ", o.rotary_base, " must be above 1");
  return o;
}

std::int64_t GptOptions::padded_vocab() const {
  return round_up(vocab_size, vocab_multiple);
}

tensor::Attention GptOptions::geometry() const {
  tensor::Attention geometry;
  geometry.heads = heads;
  geometry.kv_heads = kv_heads;
  geometry.dropout = attention_dropout;
  return geometry;
}

std::int64_t GptOptions::num_parameters(bool padding) const {
  const GptOptions o = resolved();
  const std::int64_t rows = padding ? o.padded_vocab() : o.vocab_size;
  const std::int64_t norm_size = o.norm == Norm::layer_norm ? 2 * o.hidden : o.hidden;
  const std::int64_t attention_width = o.heads * o.head_dim;
  const std::int64_t up_width = o.mlp == Mlp::swiglu ? 2 * o.ffn_hidden : o.ffn_hidden;
  const std::int64_t weights = o.hidden * (o.qkv_width() + attention_width + up_width + o.ffn_hidden);
  const std::int64_t biases = o.bias ? o.qkv_width() + o.hidden + up_width + o.hidden : 0;
  const std::int64_t tables = rows * o.hidden * (o.tied_embeddings ? 1 : 2) +
                              (o.positions == PositionKind::learned ? o.max_seq * o.hidden : 0);
  return tables + o.layers * (weights + biases + 2 * norm_size) + norm_size;
}

double flops_per_token(const GptOptions& options, std::int64_t seq, AttentionFlops convention,
                       autograd::Recompute recompute) {
  const GptOptions o = options.resolved();
  const double h = static_cast<double>(o.hidden), f = static_cast<double>(o.ffn_hidden);
  const double attention_width = static_cast<double>(o.heads * o.head_dim);
  const double products = h * static_cast<double>(o.qkv_width()) + attention_width * h +
                          (o.mlp == Mlp::swiglu ? 3.0 : 2.0) * h * f;
  // Scores and their product with the values: one multiply-add each per pair of positions and column.
  const double pairs = static_cast<double>(seq) * (convention == AttentionFlops::full ? 1.0 : 0.5);
  const double block = 2.0 * products + 2.0 * 2.0 * pairs * attention_width;
  const double head = 2.0 * h * static_cast<double>(o.vocab_size);
  const double passes = recompute == autograd::Recompute::full ? 4.0 : 3.0;
  return passes * static_cast<double>(o.layers) * block + 3.0 * head;
}

}  // namespace sherd::models
