#pragma once

#include <functional>
#include <vector>

#include "nn/text_loss.h"
#include "sharding/parallel/loss.h"

namespace sherd::parallel {

/// Rows of a stream whose targets are of one text: [begin, end) of those that labels have.
struct TextRows {
  std::int64_t begin = 0, end = 0;
  std::int32_t text = 0;
  double weight = 1;  ///< of their log-probabilities in TextScores::weighted
};

/// The value that `loss` gives for the scores of texts, as [1] in fp32 (fp64 for fp64), the same bits on all
/// tensor and context ranks. x, head, labels, layout: as of vocab_cross_entropy(). rows: runs that follow
/// each other and have all rows of the labels; `texts`: how many there are. The processor waits for the
/// scores.
///
/// Logits are kept where vocab_cross_entropy() keeps them. Beyond that they are made in chunks, and made
/// again in backward, unless nothing but x takes a gradient: then that is computed at once, and multiplied by
/// what its rows count for when that is known.
///
/// Throws as vocab_cross_entropy(), and Error{numerics} for a text without a finite score.
autograd::Var vocab_text_loss(const autograd::Var& x, const VocabHead& head, const tensor::Tensor& labels,
                              const std::vector<TextRows>& rows, std::int64_t texts,
                              const std::function<double(const nn::TextScores&, nn::TextGradients&)>& loss,
                              const Layout& layout);

/// The scores alone; not recorded.
nn::TextScores vocab_text_scores(const autograd::Var& x, const VocabHead& head, const tensor::Tensor& labels,
                                 const std::vector<TextRows>& rows, std::int64_t texts, const Layout& layout);

/// The log-probability of a token by its parts of the vocabulary: each one's log-sum-exp of logits, and the
/// token's logit (0 in parts that do not have it), `stride` apart. Throws Error{numerics} where it is not
/// finite.
double log_probability(const double* lse, const double* logit, std::int64_t parts, std::int64_t stride);

/// A loss of scores [texts, n], of which the first of each row counts, as vocab_text_loss().
autograd::Var score_loss(const autograd::Var& scores,
                         const std::function<double(const nn::TextScores&, nn::TextGradients&)>& loss);

}  // namespace sherd::parallel
