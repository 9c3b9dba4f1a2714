#pragma once

#include <cstdint>

#include "autograd/tape.h"
#include "sharding/parallel/adapters/token_rows.h"
#include "sharding/parallel/layout.h"

namespace sherd::parallel {

/// The label of a token that is no target.
inline constexpr std::int32_t no_label = -100;

/// The layer that makes the scores of the vocabulary: s = x·weightᵀ + bias, or cap·tanh(s/cap) where there is
/// a cap. weight: this tensor rank's rows of a table that ranks cut evenly, [n, hidden] with the ids from
/// tensor_rank·n on, of which those from `vocabulary` on are padding; bias: undefined, or as cut, [n].
struct VocabHead {
  autograd::Var weight, bias;
  std::int64_t vocabulary = 0;
  double cap = 0;            ///< 0: none
  TrainedRows trained = {};  ///< in the place of some of the weight's, which has no gradient then
};
/// Scores as a cap changes them, 0: none.
autograd::Var capped(const autograd::Var& scores, double cap);

/// The head of a language model and its loss: the mean of -log softmax(x·weightᵀ + bias)[label] over the
/// labels other than `no_label` of all context ranks, as [1] in fp32 (fp64 for fp64), the same bits on
/// all ranks of both groups.
///
/// x: this rank's part of the stream, [batch, rows, hidden]; labels: int32 [batch, inner rows] of this
/// context rank. Tensor ranks exchange two numbers per token, never logits (Shoeybi et al. 2019). The
/// gradients of weight and bias are those of this rank's tokens: context ranks' are yet to be summed.
///
/// Logits are the largest tensor of a step. As long as they take no more memory than twice the weight's
/// gradient in fp32 they are kept, and backward turns them into their gradient in place. Beyond that tokens
/// are taken in chunks whose logits take as much as that gradient at most. Gradients of chunks are computed
/// at once, so that no product runs twice: what is kept for backward is x's gradient, and the head's in fp32.
///
/// Throws Error{usage} for shapes that do not fit, Error{data} for a label outside the vocabulary,
/// Error{comm} where ranks do not come.
autograd::Var vocab_cross_entropy(const autograd::Var& x, const VocabHead& head, const tensor::Tensor& labels,
                                  const Layout& layout);

/// The parts of each label's score, [3, parts, labels] in fp32 (fp64 for fp64), the same bits on all
/// tensor ranks, each of which holds a part of the vocabulary: a part's log-sum-exp of logits, the label's
/// logit (0 in parts that do not have it), and the part's largest logit; all 0 for `no_label`. Arguments
/// and errors as of vocab_cross_entropy(); not recorded. Tokens are taken in chunks as there.
tensor::Tensor vocab_scores(const autograd::Var& x, const VocabHead& head, const tensor::Tensor& labels,
                            const Layout& layout);

}  // namespace sherd::parallel
