#pragma once

#include <cstdint>

#include "base/choices.h"
#include "tensor/tensor.h"

namespace sherd::tensor {

/// How a router chooses experts for a token, and what weighs their outputs. Scores are made of logits;
/// `top_k` experts with the highest are chosen, of equal ones the first; a bias counts for the choice alone.
/// Experts may lie in equal groups, of which only `top_groups` are looked at: those with the highest score,
/// or, for sigmoids, the highest sum of two (DeepSeek-AI 2024, "DeepSeek-V3 technical report", 2.1.2).
struct Routing {
  int top_k = 1;
  RouterScores scores = RouterScores::softmax;
  bool normalize = false;  ///< a token's weights add up to `scale`
  double scale = 1;        ///< multiplies the weights
  int groups = 1, top_groups = 1;
};

inline constexpr int most_expert_groups = 64;

/// Gradients that auxiliary losses add to those of logits; see Kernels::route_backward().
struct RouterLossGradients {
  Tensor balance;  ///< [experts] in the compute type: of the mean probabilities' sums; undefined: none
  double z = 0;    ///< multiplies the gradient of Σ over tokens of (log Σ exp logits)²
};

/// Extents of the routing kernels' arguments. The checks throw Error{usage} naming the kernel.
struct RoutingExtents {
  std::int64_t tokens, experts;
};
RoutingExtents check_routing(const char* kernel, const Routing& routing, const Tensor& logits,
                             const Tensor& chosen, const Tensor& weights, const Tensor& scores);
RoutingExtents check_route_backward(const Tensor& logits, const Routing& routing, const Tensor& scores,
                                    const Tensor& chosen, const Tensor& dweights,
                                    const RouterLossGradients& losses, const Tensor& dlogits);
/// The width of a row.
std::int64_t check_combine(const char* kernel, const Tensor& rows, const Tensor& places,
                           const Tensor& weights, const Tensor& out);
std::int64_t check_combine_backward(const Tensor& rows, const Tensor& places, const Tensor& weights,
                                    const Tensor& dout, const Tensor& drows, const Tensor& dweights);

}  // namespace sherd::tensor
