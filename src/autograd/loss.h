#pragma once

#include "autograd/tape.h"

namespace sherd::autograd {

/// Mean over targets other than `ignore_index` of -log softmax(logits)[target]. logits: [..., vocab];
/// targets: int32, one per row; columns from `valid` on are padding and take no part (0: none). The loss:
/// [1], fp32 (fp64 for fp64). Throws Error{data} for a target outside the vocabulary.
///
/// Consumes the logits: backward turns their memory into their gradient, so that no second copy of the
/// largest tensor of a step exists. Whoever still holds them then (a Var kept by the caller, another
/// operation that saved them) keeps the values, at the price of that second copy.
Var cross_entropy(Var logits, const Tensor& targets, std::int64_t valid = 0,
                  std::int32_t ignore_index = -100);

/// The mean of -t·log(sigmoid(x)) - (1 - t)·log(1 - sigmoid(x)) over all logits x, formed without overflow,
/// for targets t of [0, 1]; [1], fp32 (fp64 for fp64). With `weights` it is Σ w·l / Σ w, 0 where they are all
/// 0 (unlike PyTorch's `weight`, whose mean divides by the number of elements). Targets and weights have the
/// logits' shape and take no gradient; dtypes may differ as in mean_squared_error().
Var binary_cross_entropy(const Var& logits, const Tensor& targets, const Tensor& weights = {});

/// mean((x - y)²), [1]; y takes no gradient. Where their dtypes differ (a prediction in bf16, a target in
/// fp32), both are compared in fp32 (fp64 for fp64 x), and x's gradient comes back in x's dtype.
Var mean_squared_error(const Var& x, const Tensor& y);

}  // namespace sherd::autograd
