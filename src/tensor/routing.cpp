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

}  // namespace sherd::tensor
