#include "sharding/parallel/moe.h"

#include <algorithm>
#include <cmath>

#include "autograd/elementwise.h"
#include "base/excerpt.h"
#include "device/meta.h"
#include "sharding/parallel/collectives.h"

namespace sherd::parallel {
namespace {

using tensor::Tensor;

void check(const MoeOptions& o) {
  const tensor::Routing& r = o.routing;
  const auto config = [](bool holds, const auto&... text) {
    if (!holds) fail(ErrorKind::config, "experts: ", text...);
  };
  config(o.hidden > 0 && o.ffn_hidden > 0 && o.experts > 0, "hidden ", o.hidden, ", ffn_hidden ",
         o.ffn_hidden, " and experts ", o.experts, " must all be positive");
  config(r.groups >= 1 && r.groups <= tensor::most_expert_groups && o.experts % r.groups == 0, o.experts,
         " cannot lie in ", counted(r.groups, "equal group"));
  config(r.top_groups >= 1 && r.top_groups <= r.groups, "a token cannot take ", r.top_groups, " of ",
         counted(r.groups, "group"));
  const std::int64_t open = o.experts / r.groups * r.top_groups;
  config(r.top_k >= 1 && r.top_k <= open, "a token cannot take ", r.top_k, " of ", open);
  config(r.top_k > 1 || (!r.normalize && r.scores != tensor::RouterScores::softmax_of_chosen),
         "the weight of a token's only expert would always be the same, and the router get no gradient: take "
         "softmax scores over all experts without normalizing them, or more experts per token");
  config(r.scale > 0 && std::isfinite(r.scale), "weights cannot be multiplied by ", r.scale);
  config(o.capacity_factor >= 0, "a capacity factor of ", o.capacity_factor, " is negative");
}

/// Rows of [batch, rows, width], over which the stream is cut.
constexpr int row_dim = -2;

std::vector<double> host_values(Tape& tape, const Tensor& x) {
  std::vector<double> out(static_cast<std::size_t>(x.numel()));
  if (tape.device().kind() == device::Kind::meta) return out;
  Tensor wide = tape.empty(x.shape(), DType::f64);
  tape.kernels().copy(x, wide);
  const Tensor here = tensor::to_host(tape.device(), wide);
  std::copy_n(here.data<double>(), out.size(), out.begin());
  return out;
}

}  // namespace

std::int64_t expert_capacity(const MoeOptions& options, std::int64_t tokens) {
  if (options.capacity_factor == 0) return -1;
  const double share =
      static_cast<double>(tokens) * options.routing.top_k / static_cast<double>(options.experts);
  return static_cast<std::int64_t>(std::ceil(share * options.capacity_factor));
}

Moe::Moe(const MoeOptions& options, const Layout& layout) : options_(options), layout_(layout) {
  check(options);
  router_ =
      add("router", std::make_shared<nn::Linear>(options.hidden, options.experts,
                                                 nn::LinearOptions{.bias = false, .init = options.init}));
  experts_ = add("experts", std::make_shared<Experts>(options, layout));
}

std::vector<bool> Moe::dropped(Tape& tape, const autograd::Routed& routed, std::int64_t tokens) const {
  const MoeOptions& o = options_;
  const std::int64_t capacity = expert_capacity(o, tokens);
  if (capacity < 0) return {};
  std::vector<double> weights;
  if (o.drop == Drop::by_weight) weights = host_values(tape, routed.weights.value());
  return dropped_choices(routed.chosen, o.experts, o.routing.top_k, capacity, o.drop, weights);
}

Var Moe::forward(Tape& tape, const Var& x) {
  const MoeOptions& o = options_;
  // Tensor ranks route all of the inner part's tokens, and each gives what its slices make of them.
  const Var inner = layout_.cuts_stream() ? gather(x, row_dim, layout_.tensor, path() + " input") : x;
  const std::int64_t tokens = inner.shape().rows();
  const Var rows = autograd::reshape(inner, {tokens, x.shape().back()});
  const Var logits = autograd::router_logits(rows, tape.parameter(router_->weight()));
  const autograd::Routed routed = autograd::route(logits, {}, o.routing, o.losses);
  const Dispatch plan =
      plan_dispatch(routed.chosen, o.experts, o.routing.top_k, dropped(tape, routed, tokens));
  if (tape.training && tape.recording())
    count(tape, logits, routed, std::ssize(routed.chosen) - std::ssize(plan.sources));
  const Var made = (*experts_)(tape, copy_to(rows, layout_.tensor, path() + " tokens"),
                               copy_to(routed.weights, layout_.tensor, path() + " weights"), plan);
  const Var out = autograd::reshape(made, inner.shape());
  return layout_.cuts_stream() ? reduce_scatter(out, row_dim, layout_.tensor, path() + " output")
                               : all_reduce(out, layout_.tensor, path() + " output");
}

void Moe::count(Tape& tape, const Var& logits, const autograd::Routed& routed, std::int64_t dropped) {
  RoutingTotals& all = totals_;
  all.per_expert.resize(routed.per_expert.size());
  for (std::size_t e = 0; e < all.per_expert.size(); ++e) all.per_expert[e] += routed.per_expert[e];
  all.choices += std::ssize(routed.chosen), all.dropped += dropped, ++all.micro_batches;
  const autograd::RouterLossValues losses =
      autograd::router_losses(tape, logits.value(), routed, options_.routing);
  all.balance += losses.balance, all.z += losses.z;
}

RoutingTotals Moe::take_totals() {
  return std::exchange(totals_, {});
}

}  // namespace sherd::parallel
