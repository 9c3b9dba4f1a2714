#include "models/latent_attention.h"

#include <cmath>

#include "autograd/key_cache.h"
#include "autograd/ops.h"
#include "sharding/parallel/collectives.h"

namespace sherd::models {
namespace {

using tensor::Tensor;

/// Elements [begin, end) of the last dimension.
Var columns(const Var& x, std::int64_t begin, std::int64_t end) {
  return autograd::slice(x, -1, begin, end);
}

}  // namespace

LatentAttention::LatentAttention(const GptConfig& c, std::int64_t layer, const parallel::Layout& layout)
    : layout_(layout),
      sizes_(c.mla),
      geometry_(c.attention(layer)),
      rotary_(c.rotary(layer)),
      head_dim_(c.head_dim) {
  const nn::LinearOptions plain{.bias = false, .init = c.init()};
  const auto down = [&](const char* name, std::int64_t rank) {
    return add(name, parallel::on_stream(std::make_shared<nn::Linear>(c.hidden_size, rank, plain), layout));
  };
  const auto norm = [&](const char* name, std::int64_t rank) {
    return add(name, parallel::on_stream(
                         std::make_shared<nn::RmsNorm>(rank, c.mla.norm_epsilon, c.norm_shift()), layout));
  };
  const auto up = [&](const char* name, std::int64_t rank, std::int64_t each) {
    return add(name, std::make_shared<parallel::ColumnLinear>(rank, c.num_heads * each, layout, plain));
  };
  if (sizes_.q_lora_rank > 0) {
    q_down_ = down("q_down", sizes_.q_lora_rank), q_norm_ = norm("q_norm", sizes_.q_lora_rank);
    q_ = up("q_up", sizes_.q_lora_rank, head_dim_);
  } else {
    q_ = up("q", c.hidden_size, head_dim_);
  }
  kv_down_ = down("kv_down", sizes_.kv_lora_rank + sizes_.qk_rope_head_dim);
  kv_norm_ = norm("kv_norm", sizes_.kv_lora_rank);
  kv_up_ = up("kv_up", sizes_.kv_lora_rank, sizes_.qk_nope_head_dim + sizes_.v_head_dim);
  projection_ = add("projection", std::make_shared<parallel::RowLinear>(
                                      c.num_heads * sizes_.v_head_dim, c.hidden_size, layout,
                                      nn::LinearOptions{.bias = false, .init = c.output_init()}));
  dropout_ = add("dropout", std::make_shared<nn::Dropout>(static_cast<float>(c.attention_dropout)));
}

Var LatentAttention::queries(Tape& tape, const Var& x) {
  return (*q_)(tape, q_down_ ? (*q_norm_)(tape, (*q_down_)(tape, x)) : x);
}

/// The attention of this rank's heads, each with keys and values of its own: [batch, rows, heads·v_head_dim].
Var LatentAttention::whole(Tape& tape, const Var& q, const Var& latent, const Var& turning) {
  tensor::Attention geometry = parallel::rank_heads(geometry_, layout_);
  const Var kv = (*kv_up_)(tape, latent);
  // All rows of the keys' rotary part, where tensor ranks cut them; backward adds up their heads' gradients.
  const Var shared = layout_.cuts_stream()
                         ? parallel::all_gather(turning, parallel::row_dim, layout_.tensor, path() + " keys")
                         : parallel::copy_to(turning, layout_.tensor, path() + " keys");
  const std::int64_t batch = q.shape()[0], rows = q.shape()[1], tokens = batch * rows, heads = geometry.heads;
  const auto by_head = [&](const Var& each) {
    return autograd::reshape(each, {tokens, heads, each.shape()[2] / heads});
  };
  const auto zeros = [&](std::int64_t width) {
    const Tensor out = tape.empty({tokens, heads, width}, q.dtype());
    tape.kernels().fill(out, 0);
    return tape.input(out);
  };
  const Var every = autograd::add(zeros(sizes_.qk_rope_head_dim),
                                  autograd::reshape(shared, {tokens, 1, sizes_.qk_rope_head_dim}));
  std::vector<Var> parts{by_head(q), every, by_head(kv)};
  if (sizes_.v_head_dim < head_dim_) parts.push_back(zeros(head_dim_ - sizes_.v_head_dim));
  Var packed = autograd::reshape(autograd::concat(parts, -1), {batch, rows, heads * 3 * head_dim_});
  geometry.positions = layout_.inner_positions(rows);
  if (tape.training && geometry.dropout > 0) geometry.key = dropout_->key(tape);
  Var out;
  {  // of texts that begin, whose latents are stored, the rows see nothing but each other
    autograd::KeyCache* const none = tape.device().has_own_memory() ? tape.key_cache : nullptr;
    const autograd::Replaced<autograd::KeyCache*> alone(tape.key_cache, none);
    if (rotary_) packed = autograd::rotary(packed, geometry, *rotary_);
    out = parallel::attention(packed, geometry, layout_);
  }
  if (sizes_.v_head_dim == head_dim_) return out;
  return autograd::reshape(columns(by_head(out), 0, sizes_.v_head_dim),
                           {batch, rows, heads * sizes_.v_head_dim});
}

/// Rows of `heads` query heads, which `packed` has, with the key head that a key cache holds: kv_lora_rank
/// elements behind those that turn, as key and as value.
Tensor LatentAttention::turned_latents(Tape& tape, const Tensor& packed, int heads, const Var& latent,
                                       const Var& turning) {
  tensor::Kernels& kernels = tape.kernels();
  const std::int64_t tokens = packed.shape().rows(), turn = sizes_.qk_rope_head_dim,
                     rank = sizes_.kv_lora_rank, wide = turn + rank, width = (heads + 2) * wide;
  kernels.copy_rows({turning.value(), 0, turn}, {packed, heads * wide, width}, tokens, turn);
  kernels.copy_rows({latent.value(), 0, rank}, {packed, heads * wide + turn, width}, tokens, rank);
  Tensor turned = packed;
  if (rotary_) {
    tensor::Rotary angles = *rotary_;
    angles.share = (static_cast<double>(turn) + 0.5) / static_cast<double>(wide);
    turned = autograd::rotary(tape.input(packed), {.heads = heads, .kv_heads = 1}, angles).value();
  }
  kernels.copy_rows({turned, heads * wide, width}, {turned, (heads + 1) * wide, width}, tokens, wide);
  return turned;
}

/// The same over a key cache.
Var LatentAttention::stored(Tape& tape, const Var& q, const Var& latent, const Var& turning) {
  tensor::Kernels& kernels = tape.kernels();
  const std::int64_t batch = q.shape()[0], rows = q.shape()[1], tokens = batch * rows;
  const std::int64_t turn = sizes_.qk_rope_head_dim, nope = sizes_.qk_nope_head_dim, v = sizes_.v_head_dim,
                     rank = sizes_.kv_lora_rank, wide = turn + rank;
  const int heads = parallel::rank_heads(geometry_, layout_).heads;
  tensor::Attention geometry = geometry_;
  geometry.heads = heads, geometry.kv_heads = 1, geometry.dropout = 0;
  if (geometry.scale == 0) geometry.scale = 1 / std::sqrt(static_cast<double>(head_dim_));
  const std::int64_t width = (heads + 2) * wide;
  const Tensor packed = tape.empty({batch, rows, width}, q.dtype());
  const auto copy = [&](const Tensor& from, std::int64_t first, std::int64_t stride, const Tensor& to,
                        std::int64_t at, std::int64_t to_stride, std::int64_t count) {
    kernels.copy_rows({from, first, stride}, {to, at, to_stride}, tokens, count);
  };
  const autograd::Var up = tape.parameter(kv_up_->weight());
  const auto rows_of_head = [&](std::int64_t h, std::int64_t first, std::int64_t count) {
    const std::int64_t begin = h * (nope + v) + first;
    return up.value().rows(begin, begin + count);
  };
  const Tensor part = tape.empty({tokens, nope}, q.dtype()), made = tape.empty({tokens, rank}, q.dtype());
  for (std::int64_t h = 0; h < heads; ++h) {
    copy(q.value(), h * head_dim_, heads * head_dim_, packed, h * wide, width, turn);
    copy(q.value(), h * head_dim_ + turn, heads * head_dim_, part, 0, nope, nope);
    kernels.matmul({.a = part, .b = rows_of_head(h, 0, nope), .c = made});
    copy(made, 0, rank, packed, h * wide + turn, width, rank);
  }
  const Tensor found =
      tape.key_cache->attend(tape, turned_latents(tape, packed, heads, latent, turning), geometry, {}, true);
  const Tensor out = tape.empty({batch, rows, heads * v}, q.dtype()),
               value = tape.empty({tokens, v}, q.dtype());
  for (std::int64_t h = 0; h < heads; ++h) {
    copy(found, h * wide + turn, heads * wide, made, 0, rank, rank);
    kernels.matmul({.a = made,
                    .b = rows_of_head(h, nope, v),
                    .c = value,
                    .trans_b = true,
                    .few_rows = tape.key_cache->one_row_each()});
    copy(value, 0, v, out, h * v, heads * v, v);
  }
  return tape.input(out);
}

Var LatentAttention::forward(Tape& tape, const Var& x) {
  const Var q = queries(tape, x), down = (*kv_down_)(tape, x);
  const Var latent = (*kv_norm_)(tape, columns(down, 0, sizes_.kv_lora_rank));
  const Var turning = columns(down, sizes_.kv_lora_rank, sizes_.kv_lora_rank + sizes_.qk_rope_head_dim);
  // A GPU's kernels take shorter heads: it stores each head's keys and values.
  if (!tape.key_cache || tape.device().has_own_memory())
    return (*projection_)(tape, whole(tape, q, latent, turning));
  if (!tape.key_cache->fresh()) return (*projection_)(tape, stored(tape, q, latent, turning));
  const Tensor packed =
      tape.empty(q.shape().with_back(3 * (sizes_.qk_rope_head_dim + sizes_.kv_lora_rank)), q.dtype());
  tape.kernels().fill(packed, 0);  // a query head that nobody looks at
  tape.key_cache->store(tape, turned_latents(tape, packed, 1, latent, turning), {.heads = 1, .kv_heads = 1},
                        true);
  return (*projection_)(tape, whole(tape, q, latent, turning));
}

}  // namespace sherd::models
