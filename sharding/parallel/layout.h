#pragma once

// This folder holds the layers that several ranks share: tensor, sequence, context and expert parallelism, as
// collectives on the tape and as layers. It knows no units and no engine.
//
// To change, look at:
// - which part of a layer, or of a sequence, a rank has: Layout, tensor_slice()
// - what ranks exchange in forward and backward: collectives.cpp; which of them a layer needs: Layout
// - attention over context ranks: the ring is ring.cpp, what it cuts ring_chunks.cpp; Ulysses, and heads over
//   tensor ranks: attention.cpp
// - logits: when they are kept, and when head and loss go in chunks of tokens: HeadCall, loss.cpp; parts of
//   the vocabulary in an evaluation: vocab_scores()
// - experts: experts/; adapters: adapters/

#include <cstdint>
#include <string>
#include <vector>

#include "autograd/parameter.h"
#include "base/choices.h"
#include "comm/process_groups.h"
#include "tensor/kernels.h"
#include "tensor/slice.h"

namespace sherd::parallel {

/// Which of a sequence's 2·ranks chunks a rank's chunk 0 or 1 is, under the ring.
constexpr int ring_chunk(int rank, int ranks, int chunk) {
  return chunk == 0 ? rank : 2 * ranks - 1 - rank;
}

/// The ranks with which this one computes one model: whose slices of layers fit its own, and how they cut
/// sequences. Parallel layers are made with it. A value; refers to communicators that somebody else owns
/// (comm::ProcessGroups). By default there is one rank, and every layer is its serial counterpart.
///
/// A sequence of S tokens is cut over context ranks first; what a rank then holds is its *inner* part, on
/// which column-parallel layers, attention and row-parallel layers work. Between those lies the *stream*
/// (residual, norms, dropout), of which sequence parallelism (Korthikanti et al. 2022) gives each tensor rank
/// an equal part, in order; without it, the stream is the inner part. With the ring each context rank has two
/// chunks of S/2c tokens, r and 2c − 1 − r, so that a causal mask leaves all the same work; with Ulysses one
/// of S/c.
struct Layout {
  comm::Communicator* tensor = nullptr;   ///< ranks that hold slices of the same layers; null: this one alone
  comm::Communicator* context = nullptr;  ///< ranks that hold pieces of the same sequences; null: likewise
  bool sequence_parallel = true;          ///< where there are several tensor ranks
  ContextMethod context_method = ContextMethod::ring;
  /// Groups of which layers of experts take communicators of their own, to exchange tokens by
  /// (ProcessGroups::apart()); null: this rank has all experts, and no other rank has them too.
  comm::ProcessGroups* groups = nullptr;

  int tensor_size() const { return tensor ? tensor->size() : 1; }
  int tensor_rank() const { return tensor ? tensor->rank() : 0; }
  int context_size() const { return context ? context->size() : 1; }
  int context_rank() const { return context ? context->rank() : 0; }
  /// Sequence parallelism is on.
  bool cuts_stream() const { return sequence_parallel && tensor_size() > 1; }

  /// The number that sequences must be a multiple of, so that all ranks get as many tokens.
  std::int64_t sequence_multiple() const;
  /// Positions of the inner part, of `rows` tokens, of this context rank or another; throws Error{usage}
  /// where these cannot be one.
  tensor::Positions inner_positions(std::int64_t rows) const { return inner_positions(rows, context_rank()); }
  tensor::Positions inner_positions(std::int64_t rows, int context_rank) const;
  /// Positions of this rank's part of the stream, of `rows` tokens.
  tensor::Positions stream_positions(std::int64_t rows) const;
  /// Which elements of the whole stream [batch, S, width] this rank's part, of that shape, holds.
  tensor::Slice stream_slice(const tensor::Shape& local) const;
  /// Which elements of the whole inner part [batch, S, width] this rank's features of it hold, of that shape.
  tensor::Slice inner_slice(const tensor::Shape& local) const;
};

/// Rows of [..., rows, features], over which the stream is cut.
inline constexpr int row_dim = -2;

/// The part that this rank holds of a tensor of shape `logical` whose dimension `dim` the tensor-parallel
/// ranks cut: the rank-th part of each of `blocks`, which add up to that dimension; of one block where there
/// are none. Throws Error{config}, naming `what` they cut, where the ranks do not divide a block, and
/// Error{usage} for blocks that do not add up.
tensor::Slice tensor_slice(const std::string& what, const tensor::Shape& logical, int dim,
                           const Layout& layout, std::vector<std::int64_t> blocks = {});

/// Gives a parameter that was declared in this rank's shape the slice of the whole that it is.
void set_slice(const autograd::ParameterPtr& parameter, tensor::Slice slice);

}  // namespace sherd::parallel
