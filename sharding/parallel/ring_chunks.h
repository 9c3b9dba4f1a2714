#pragma once

#include <array>
#include <vector>

#include "sharding/parallel/layout.h"
#include "tensor/extents.h"
#include "tensor/kernels.h"

// How ring attention (ring.cpp) cuts its tensors.
namespace sherd::parallel {

using tensor::Shape;
using tensor::Tensor;

/// A chunk of this rank's queries and one of the keys that it has, both 0 or 1, as a call of attention, whose
/// masks count positions of the whole sequence (ScoreIndex).
struct RingPair {
  int query = 0, key = 0;
  tensor::Attention geometry;
};

/// The part of a chunk's tokens in some columns of a tensor: for each key-value head `width` elements,
/// `stride` after those of the head before; tokens follow each other.
struct RingColumns {
  Tensor tensor;
  std::int64_t first, width, stride;
  std::int64_t sequence_stride;  ///< from one sequence's first token to the next one's
};

/// One rank's two chunks of every sequence: r and 2c − 1 − r of 2c.
class RingChunks {
 public:
  /// Throws Error{usage} for an odd number of rows, and what tensor::attention_extents() throws.
  RingChunks(tensor::Kernels& kernels, int rank, int ranks, const Tensor& qkv,
             const tensor::Attention& geometry);

  /// The keys of rank `from` that this rank's queries see.
  std::vector<RingPair> pairs(int from) const;

  /// Keys and values of a rank, by chunk: what travels.
  Shape block() const { return {2, e_.batch, tokens_, 2 * e_.kv_heads * e_.dim}; }
  // Shapes for one chunk:
  Shape packed() const { return {e_.batch, tokens_, e_.width()}; }
  Shape heads() const { return {e_.batch, tokens_, e_.heads * e_.dim}; }
  Shape lse() const { return {e_.batch, e_.heads, tokens_}; }
  /// The heads of both.
  Shape all_heads() const { return {e_.batch, e_.seq, e_.heads * e_.dim}; }

  Tensor empty(const Shape& shape, DType dtype,
               device::Category category = device::Category::workspace) const;
  /// One by chunk.
  std::array<Tensor, 2> empty_pair(const Shape& shape, DType dtype,
                                   device::Category category = device::Category::workspace) const {
    return {empty(shape, dtype, category), empty(shape, dtype, category)};
  }

  // ---- one chunk's part of tensors of both ----
  RingColumns queries(const Tensor& qkv, int chunk) const;
  RingColumns keys(const Tensor& qkv, int chunk) const;  ///< and values
  RingColumns of_block(const Tensor& block, int chunk) const;
  RingColumns of_heads(const Tensor& heads, int chunk) const;
  // ---- tensors of one chunk ----
  RingColumns queries(const Tensor& packed) const;
  RingColumns keys(const Tensor& packed) const;
  RingColumns of_heads(const Tensor& heads) const;

  /// to (+)= from
  void copy(const RingColumns& from, const RingColumns& to, bool accumulate = false) const;
  /// Makes packed rows of one chunk's queries and one chunk of a block.
  void pack(const Tensor& qkv, const Tensor& block, const RingPair& pair, const Tensor& packed) const;
  /// This rank's keys and values.
  Tensor own_block(const Tensor& qkv) const;
  /// Heads of both chunks, each chunk's for itself (views where they can be), and the reverse.
  std::array<Tensor, 2> cut(const Tensor& all) const;
  void join(const std::array<Tensor, 2>& parts, const Tensor& all) const;

 private:
  std::int64_t query_width() const { return e_.group() * e_.dim; }
  std::int64_t key_width() const { return 2 * e_.dim; }

  tensor::Kernels& kernels_;
  int rank_, ranks_;
  tensor::Attention geometry_;
  tensor::AttentionExtents e_;
  std::int64_t tokens_;  ///< tokens in a chunk
};

}  // namespace sherd::parallel
