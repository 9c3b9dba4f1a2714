#include "tensor/routing.h"

#include "tensor/argument_checks.h"

namespace sherd::tensor {

RoutingExtents check_routing(const char* kernel, const Routing& routing, const Tensor& logits,
                             const Tensor& chosen, const Tensor& weights, const Tensor& scores) {
  require(logits.shape().rank() == 2 && logits.shape()[1] > 0, kernel,
          ": logits must be [tokens, experts], not ", logits.shape().str());
  const std::int64_t tokens = logits.shape()[0], experts = logits.shape()[1];
  require(logits.dtype() == compute_type(logits.dtype()), kernel, ": logits must be fp32 or fp64, not ",
          name_of(logits.dtype()));
  require(routing.groups >= 1 && routing.groups <= most_expert_groups && experts % routing.groups == 0,
          kernel, ": ", experts, " experts cannot lie in ", routing.groups, " groups");
  require(routing.top_groups >= 1 && routing.top_groups <= routing.groups, kernel, ": a token cannot take ",
          routing.top_groups, " of ", routing.groups, " groups");
  require(routing.top_k >= 1 && routing.top_k <= experts / routing.groups * routing.top_groups, kernel,
          ": a token cannot take ", routing.top_k, " of ", experts / routing.groups * routing.top_groups,
          " experts");
  require_vector(kernel, "the scores", scores, tokens * experts, logits.dtype());
  require_vector(kernel, "the choice", chosen, tokens * routing.top_k, DType::i32);
  require_vector(kernel, "the weights", weights, tokens * routing.top_k, logits.dtype());
  return {tokens, experts};
}

RoutingExtents check_route_backward(const Tensor& logits, const Routing& routing, const Tensor& scores,
                                    const Tensor& chosen, const Tensor& dweights,
                                    const RouterLossGradients& losses, const Tensor& dlogits) {
  constexpr const char* name = "route_backward";
  const RoutingExtents e = check_routing(name, routing, logits, chosen,
                                         dweights ? dweights : scores.range(0, chosen.numel()), scores);
  require_alike(name, logits, {&dlogits});
  if (losses.balance) require_vector(name, "balance", losses.balance, e.experts, logits.dtype());
  return e;
}

std::int64_t check_combine(const char* kernel, const Tensor& rows, const Tensor& places,
                           const Tensor& weights, const Tensor& out) {
  require(rows.shape().rank() == 2 && out.shape().rank() == 2 && rows.shape()[1] == out.shape()[1] &&
              places.shape().rank() == 2 && places.shape()[0] == out.shape()[0],
          kernel, ": rows ", rows.shape().str(), " at places ", places.shape().str(), " do not make ",
          out.shape().str());
  require_floating(kernel, "the rows", rows);
  require(out.dtype() == rows.dtype(), kernel, ": rows are ", name_of(rows.dtype()), ", the output ",
          name_of(out.dtype()));
  require_vector(kernel, "the places", places, places.numel(), DType::i32);
  require_vector(kernel, "the weights", weights, places.numel(), compute_type(rows.dtype()));
  return rows.shape()[1];
}

std::int64_t check_combine_backward(const Tensor& rows, const Tensor& places, const Tensor& weights,
                                    const Tensor& dout, const Tensor& drows, const Tensor& dweights) {
  constexpr const char* name = "combine_rows_backward";
  const std::int64_t width = check_combine(name, rows, places, weights, dout);
  if (drows) require_alike(name, rows, {&drows});
  if (dweights) require_vector(name, "dweights", dweights, places.numel(), weights.dtype());
  return width;
}

}  // namespace sherd::tensor
