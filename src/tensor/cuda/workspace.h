#pragma once

#include <algorithm>
#include <cstdint>

#include "device/cuda/target.h"
#include "tensor/argument_checks.h"
#include "tensor/exact_sum.h"
#include "tensor/extents.h"

// Bytes of Category::workspace that the CUDA kernels hold at most during one call, and the cuts of the work
// that decide it: the kernels' own plan, and what a meta device that stands for a GPU charges in their place.
// In the device tier where nothing else is said. No tensor is read.

namespace sherd::tensor::SHERD_CUDA {

/// Ceiling for one product by cuBLASLt (what NVIDIA advises for Hopper). What its heuristic takes of it, only
/// a GPU tells; a meta device charges all of it.
inline constexpr std::size_t most_matmul_workspace = std::size_t{32} << 20;

/// Beside it, sums in fp32 of a product in FP8 whose result lacks the rows by which a is padded.
inline std::size_t fp8_sums_workspace(const Matmul& args, const MatmulExtents& e) {
  if (!args.fp8_a || e.m % fp8_alignment == 0 || e.k == 0) return 0;
  return static_cast<std::size_t>(fp8_padded(e.m) * e.n) * sizeof(float);
}

/// Rows that one block of sum_rows adds up. A function of the shape alone, so that a sum has one order on
/// every GPU.
inline std::int64_t rows_per_part(std::int64_t rows) {
  constexpr std::int64_t least = 64, most_parts = 128;
  return std::max(least, (rows + most_parts - 1) / most_parts);
}
inline std::size_t sum_rows_workspace(const Tensor& x, const Tensor& out) {
  const std::int64_t rows = x.shape().rows(), part = rows_per_part(rows);
  return static_cast<std::size_t>((rows + part - 1) / part * out.numel()) * size_of(compute_type(x.dtype()));
}

/// Rows whose contributions to dweight and dbias one block of a norm sums: eight, a warp's each where they
/// are short, or more, and no more than 512 such groups. Depends on the shape alone.
inline std::int64_t rows_per_group(std::int64_t rows) {
  return std::max<std::int64_t>(8, (rows + 511) / 512);
}
/// layer_norm_backward and rms_norm_backward.
inline std::size_t norm_backward_workspace(const Tensor& x, const Tensor& dweight, const Tensor& dbias) {
  const std::int64_t rows = x.shape().rows(), group = rows_per_group(rows);
  const std::int64_t parts = (dweight ? 1 : 0) + (dbias ? 1 : 0);
  return static_cast<std::size_t>((rows + group - 1) / group * parts * x.shape().back()) *
         size_of(compute_type(x.dtype()));
}

/// The sort of embedding_backward: keys and rows twice, and how often each digit comes in each block's tile
/// of rows.
inline constexpr int sort_digits = 1 << 8, sort_tile = 8 * 32 * 8;
inline std::size_t embedding_backward_workspace(const Tensor& ids) {
  const std::int64_t n = ids.numel();
  return static_cast<std::size_t>(4 * n + sort_digits * ((n + sort_tile - 1) / sort_tile)) * 4;
}

/// Elements whose squared differences one block sums; the blocks' sums are added in order. Depends on nothing
/// else.
inline constexpr std::int64_t squares_per_block = 16384;
inline std::size_t mean_squared_error_workspace(const Tensor& x) {
  return static_cast<std::size_t>((x.numel() + squares_per_block - 1) / squares_per_block) * sizeof(double);
}

inline std::size_t mean_squared_error_backward_workspace(const Tensor& dx) {
  return dx.numel() > 0 ? size_of(compute_type(dx.dtype())) : 0;
}

/// Bytes of sum_of_squares() in each of the tiers device and host.
inline constexpr std::size_t sum_of_squares_workspace = (ExactSum::words + 1) * sizeof(std::int64_t);

/// Ceiling for cuDNN's gradient of attention, which holds rows of scores to be repeatable; more sequences
/// than fit are taken in parts. More than 1 GiB, for beside scores, which are often powers of two, are
/// gradients of keys and values.
inline constexpr std::size_t most_attention_workspace = (std::size_t{5} << 30) / 4;
/// Whether cuDNN is asked for attention. The dropout mask is Sherd's own, so it never is with dropout; nor is
/// it for scores that are capped, with masks but that of whole causal sequences, or for what it would have to
/// prepare for again and again.
inline bool attention_by_library(const AttentionExtents& e, const Attention& geometry, DType dtype) {
  if (geometry.documents || geometry.lengths_vary || geometry.cap > 0) return false;
  const bool known_mask = !e.windowed() && (!e.causal() || e.seen.ahead == 1);
  return known_mask && size_of(dtype) == 2 && geometry.dropout == 0 && e.dim % 8 == 0 && e.dim <= 256 &&
         e.seq >= 2;
}

/// Whether no one stride leads from query head to query head as they lie (Attention): several of them in
/// several groups. cuDNN then takes one sequence at a time, or several regrouped (regroup_heads()).
inline bool regroups(const AttentionExtents& e) {
  return e.group() > 1 && e.kv_heads > 1;
}
/// Bytes that `sequences` regrouped ones take: their projections, and backward their gradient.
inline std::size_t regrouped_bytes(const AttentionExtents& e, std::int64_t sequences, bool backward) {
  return static_cast<std::size_t>(sequences * e.seq * e.width()) * 2 * (backward ? 2 : 1);
}

/// The most that cuDNN itself wants for one call's gradient, as version 9 counts it (tests/cudnn asks it):
/// rows of scores in 16 bits, in squares of 64, where the gradient is to be repeatable, else fp32 sums (which
/// Hopper does without); and where query heads share a key head, each one's gradient of keys and values.
inline std::size_t cudnn_backward_workspace(std::int64_t batch, std::int64_t heads, std::int64_t kv_heads,
                                            std::int64_t seq, std::int64_t dim, bool deterministic) {
  constexpr std::int64_t alignment = 256;
  const std::int64_t padded = (seq + 63) / 64 * 64, rows = batch * heads * seq;
  const std::int64_t sums = deterministic ? batch * heads * padded * padded * 2 : rows * dim * 4;
  return static_cast<std::size_t>(sums + (heads > kv_heads ? 2 * rows * dim * 2 : 0) + alignment);
}

/// How many sequences one call of cuDNN takes, of as many as there are, where `bytes_of(n)` is what n want
/// beside the caller's.
template <class BytesOf>
std::int64_t sequences_within_limit(std::int64_t all, const BytesOf& bytes_of) {
  while (bytes_of(all) > most_attention_workspace && all > 1) all = (all + 1) / 2;
  return all;
}

inline std::size_t attention_workspace(const Tensor& qkv, const Attention& geometry) {
  const AttentionExtents e = attention_extents("attention", qkv, geometry);
  if (!attention_by_library(e, geometry, qkv.dtype())) return 0;
  constexpr std::size_t own = 256;
  const auto regrouped = [&](std::int64_t n) { return own + regrouped_bytes(e, n, false); };
  const std::int64_t n = regroups(e) ? sequences_within_limit(e.batch, regrouped) : 1;
  return n > 1 ? regrouped(n) : own;
}

/// By cuDNN where it is asked, else by the own kernels.
inline std::size_t attention_backward_workspace(const Tensor& qkv, const Attention& geometry,
                                                bool deterministic) {
  const AttentionExtents e = attention_extents("attention_backward", qkv, geometry);
  const auto numbers = [](std::int64_t elements, DType dtype) {
    return static_cast<std::size_t>(elements) * size_of(dtype);
  };
  if (!attention_by_library(e, geometry, qkv.dtype()))
    return numbers(e.batch * e.heads * e.seq, compute_type(qkv.dtype()));
  // Beside the library's the caller's: a sum per row, and fp32 gradients of the queries where atomics add up.
  const auto callers = [&](std::int64_t heads) {
    return numbers(heads * e.seq * (deterministic ? 1 : 1 + e.dim), DType::f32);
  };
  const auto library = [&](std::int64_t batch, std::int64_t heads, std::int64_t kv_heads) {
    return cudnn_backward_workspace(batch, heads, kv_heads, e.seq, e.dim, deterministic);
  };
  const auto whole = [&](std::int64_t n) {
    return library(n, e.heads, e.kv_heads) + (regroups(e) ? regrouped_bytes(e, n, true) : 0);
  };
  const std::int64_t n = sequences_within_limit(e.batch, whole);
  if (n > 1 || !regroups(e)) return whole(n) + callers(n * e.heads);
  const auto groups = [&](std::int64_t count) { return library(count, e.group(), 1); };
  const std::int64_t count = sequences_within_limit(e.kv_heads, groups);
  return groups(count) + callers(count * e.group());
}

/// How many sums make up the gradient of a sink, whatever the GPU.
inline std::int64_t sink_parts(const SinkExtents& e) {
  return std::clamp<std::int64_t>(e.batch * e.rows / 256, 1, 64);
}
inline std::size_t attention_sinks_backward_workspace(const Tensor& sinks, const Tensor& out,
                                                      const Tensor& lse) {
  const SinkExtents e = check_attention_sinks("attention_sinks_backward", sinks, out, lse);
  return static_cast<std::size_t>(e.heads * sink_parts(e)) * size_of(compute_type(out.dtype()));
}

/// Numbers in the compute type that delta_rule_backward() holds: parts of the gradients of queries and keys,
/// and the states before some rows.
inline std::int64_t delta_parts(const DeltaExtents& e) {
  return e.batch * e.rows * e.value_heads * 2 * e.key_dim;
}
inline std::int64_t delta_recent(const DeltaExtents& e) {
  return e.batch * e.value_heads * 16 * e.key_dim * e.value_dim;
}
/// The marks of rows at which documents begin.
inline std::size_t row_starts_workspace(const Documents* documents, std::int64_t rows) {
  return documents ? static_cast<std::size_t>(rows) * 4 : 0;
}
inline std::size_t delta_rule_workspace(const DeltaExtents& e, const Documents* documents, DType dtype,
                                        bool backward) {
  const std::int64_t numbers =
      2 * e.batch * e.rows * e.key_heads + (backward ? delta_parts(e) + delta_recent(e) : 0);
  return static_cast<std::size_t>(numbers) * size_of(compute_type(dtype)) +
         row_starts_workspace(documents, e.batch * e.rows);
}

/// Into how many parts short_conv_backward() cuts the rows, whatever the GPU.
inline std::int64_t conv_parts(const ConvExtents& e) {
  return std::clamp<std::int64_t>(e.batch * e.rows / 64, 1, 64);
}
inline std::size_t short_conv_backward_workspace(const ConvExtents& e, const Documents* documents,
                                                 DType dtype, bool weights) {
  const std::int64_t numbers =
      e.batch * e.rows * e.columns + (weights ? conv_parts(e) * e.columns * e.taps : 0);
  return static_cast<std::size_t>(numbers) * size_of(compute_type(dtype)) +
         row_starts_workspace(documents, e.batch * e.rows);
}

/// How attend_stored() cuts the keys that a row sees into chunks, of which a block attends to one at a time.
/// A function of the store and of the call's rows alone, so that sums have one order on every GPU and in any
/// batch. With more rows there are blocks enough, so that chunks grow with them: a sequence's rows have
/// together no more chunks than one row alone would have, and one more each.
struct StoredChunks {
  std::int64_t most_keys, keys, count;  ///< keys that a row sees; keys of a chunk; chunks

  explicit StoredChunks(const StoredExtents& e)
      : most_keys(std::min({e.window, e.capacity, std::int64_t{0x7fffffff}})),
        keys(std::min(most_keys, 128 * std::max<std::int64_t>(1, e.seq))),
        count((most_keys + keys - 1) / keys) {}
  /// Numbers that the chunks of all rows give: sums of values, the largest score, the sum of the weights.
  std::int64_t numbers(const StoredExtents& e) const {
    return e.batch * e.seq * e.heads * count * (e.dim + 2);
  }
};
inline std::size_t attend_stored_workspace(const Tensor& qkv, const Attention& geometry,
                                           const KeyStore& store, const Tensor& sinks, const Tensor& out) {
  const StoredExtents e = check_attend_stored(qkv, geometry, store, sinks, out);
  const StoredChunks cut(e);
  return out && cut.count > 1 ? static_cast<std::size_t>(cut.numbers(e)) * size_of(compute_type(qkv.dtype()))
                              : 0;
}

}  // namespace sherd::tensor::SHERD_CUDA
