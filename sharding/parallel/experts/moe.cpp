#include "sharding/parallel/experts/moe.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "autograd/ops.h"
#include "base/text/excerpt.h"
#include "comm/gather.h"
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
  config(r.top_k > 1 || (!r.normalize && r.scores != RouterScores::softmax_of_chosen),
         "the weight of a token's only expert would always be the same, and the router get no gradient: take "
         "softmax scores over all experts without normalizing them, or more experts per token");
  config(r.scale > 0 && std::isfinite(r.scale), "weights cannot be multiplied by ", r.scale);
  config(o.capacity_factor >= 0, "a capacity factor of ", o.capacity_factor, " is negative");
  config(o.jitter >= 0 && o.jitter < 1, "a jitter of ", o.jitter, " is not in [0, 1)");
  config(o.bias_update >= 0 && std::isfinite(o.bias_update), "biases cannot move by ", o.bias_update);
  config(o.losses.kind != BalanceLoss::pooled || o.pooled, "a loss over all layers needs what these share");
}

/// On the processor, where those that are no number come last (dropped_choices() compares them).
std::vector<double> host_values(Tape& tape, const Tensor& x) {
  std::vector<double> out(static_cast<std::size_t>(x.numel()));
  const Tensor here = tape.on_host(x, DType::f64);
  std::replace_copy_if(
      here.data<double>(), here.data<double>() + out.size(), out.begin(),
      [](double value) { return std::isnan(value); }, -1.0);
  return out;
}

/// All ranks' numbers, one rank's after the other's.
std::vector<double> gathered(Tape& tape, std::span<const double> own, comm::Communicator& group,
                             const std::string& label) {
  const auto n = static_cast<std::int64_t>(own.size());
  std::vector<double> out(own.size() * static_cast<std::size_t>(group.size()));
  const Tensor mine = Tensor::of<double>(tape.device(), {n}, own);
  const Tensor all = tape.empty({n * group.size()}, DType::f64);
  group.all_gather({{mine, all}}, {.label = label}).wait();
  const Tensor here = tensor::to_host(tape.device(), all);
  std::copy_n(here.data<double>(), out.size(), out.begin());
  return out;
}

/// Which of the whole micro-batch's tokens are those of a context rank, [batch, rows].
std::vector<std::size_t> places_of(const Layout& layout, std::int64_t batch, std::int64_t rows, int rank) {
  const tensor::Positions at = layout.inner_positions(rows, rank);
  std::vector<std::size_t> out;
  for (std::int64_t b = 0; b < batch; ++b)
    for (std::int64_t row = 0; row < rows; ++row)
      out.push_back(static_cast<std::size_t>(b * rows * layout.context_size() + at.at(row)));
  return out;
}

std::int64_t choices(const autograd::Routed& routed) {
  return std::accumulate(routed.per_expert.begin(), routed.per_expert.end(), std::int64_t{0});
}

double sum_of_products(const std::vector<double>& a, const std::vector<double>& b) {
  return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
}

}  // namespace

/// The numbers of which the losses of a micro-batch in this layer are made, once it has chosen.
struct Moe::MicroBatch {
  RandomKey key;
  double tokens = 0;      ///< on all context ranks, as are those of n
  std::vector<double> n;  ///< the choices of each expert that the balance loss counts
  /// Σ_t P(t, i) of this rank's tokens, until the balance loss is told; empty: it need not be.
  std::vector<double> probabilities;
};

void RoutingTotals::add(const RoutingTotals& more) {
  per_expert.resize(more.per_expert.size());
  for (std::size_t e = 0; e < per_expert.size(); ++e) per_expert[e] += more.per_expert[e];
  choices += more.choices, dropped += more.dropped, micro_batches += more.micro_batches;
  balance += more.balance, z += more.z;
}

double RoutingTotals::imbalance() const {
  if (choices == 0) return 0;
  return static_cast<double>(*std::max_element(per_expert.begin(), per_expert.end())) *
         static_cast<double>(per_expert.size()) / static_cast<double>(choices);
}

double RoutingTotals::dropped_share() const {
  return choices == 0 ? 0 : static_cast<double>(dropped) / static_cast<double>(choices);
}

std::int64_t expert_capacity(const MoeOptions& options, std::int64_t tokens) {
  if (options.capacity_factor == 0) return -1;
  const double share =
      static_cast<double>(tokens) * options.routing.top_k / static_cast<double>(options.experts);
  return static_cast<std::int64_t>(std::ceil(share * options.capacity_factor));
}

Moe::Moe(const MoeOptions& options, const Layout& layout) : options_(options), layout_(layout) {
  check(options);
  router_ =
      add("router", std::make_shared<nn::Linear>(
                        options.hidden, options.experts,
                        nn::LinearOptions{.bias = options.router_bias, .init = options.init, .fp8 = false}));
  experts_ = add("experts", std::make_shared<Experts>(options, layout));
  if (options.pooled) layer_ = options.pooled->add_layer();
  if (options.correction_bias || options.bias_update > 0)
    bias_.resize(static_cast<std::size_t>(options.experts));
}

Var Moe::forward(Tape& tape, const Var& x) {
  const MoeOptions& o = options_;
  // Tensor ranks route all of the inner part's tokens, and each gives what its slices make of them.
  const Var inner = layout_.cuts_stream() ? gather(x, row_dim, layout_.tensor, path() + " input") : x;
  const Var rows = autograd::reshape(inner, {inner.shape().rows(), x.shape().back()});
  const Var logits =
      autograd::router_logits(router_input(tape, rows, inner.shape()), tape.parameter(router_->weight()),
                              router_->bias() ? tape.parameter(router_->bias()) : Var());
  const std::vector<bool> filling = filling_of(tape, inner.shape());
  const autograd::Routed routed = route(tape, logits, filling);
  const Dispatch plan = dispatch(tape, routed, inner.shape());
  if (tape.training && tape.recording()) totals_.dropped += choices(routed) - plan.rows();
  const Var made = (*experts_)(tape, copy_to(rows, layout_.tensor, path() + " tokens"),
                               copy_to(routed.weights, layout_.tensor, path() + " weights"), plan);
  const Var out = autograd::reshape(made, inner.shape());
  return layout_.cuts_stream() ? reduce_scatter(out, row_dim, layout_.tensor, path() + " output")
                               : all_reduce(out, layout_.tensor, path() + " output");
}

/// Which rows of the inner part hold no token; empty: all hold one.
std::vector<bool> Moe::filling_of(const Tape& tape, const tensor::Shape& inner) const {
  if (!tape.filling) return {};
  const std::int64_t rows = inner.rank() == 2 ? inner[0] : inner[-2], batch = inner.rows() / rows;
  require(std::ssize(*tape.filling) == inner.rows() * layout_.context_size(), path(), ": ",
          tape.filling->size(), " marks of what fills sequences up for ", inner.rows(), " rows");
  std::vector<bool> out;
  for (const std::size_t place : places_of(layout_, batch, rows, layout_.context_rank()))
    out.push_back((*tape.filling)[place]);
  return out;
}

/// Tokens of the micro-batch on all context ranks, each of which has so many rows.
std::int64_t Moe::tokens_of(const Tape& tape, std::int64_t rows) const {
  if (!tape.filling) return rows * layout_.context_size();
  return std::count(tape.filling->begin(), tape.filling->end(), false);
}

/// Numbers go by the element of the whole micro-batch, so that they do not depend on who computes it.
Var Moe::router_input(Tape& tape, const Var& rows, const tensor::Shape& inner) const {
  if (options_.jitter == 0 || !tape.training) return rows;
  require(!path().empty(),
          "a router's jitter is named after its path: call assign_names() on the model first");
  Layout uncut = layout_;
  uncut.sequence_parallel = false;
  return autograd::jitter(rows, options_.jitter, tape.random.at(stable_hash(path() + ".jitter")),
                          inner.rank() == 3 ? uncut.stream_slice(inner) : tensor::Slice());
}

Tensor Moe::bias_tensor(Tape& tape, DType dtype) const {
  if (bias_.empty()) return {};
  if (dtype == DType::f32) return Tensor::of<float>(tape.device(), {std::ssize(bias_)}, bias_);
  const std::vector<double> wide(bias_.begin(), bias_.end());
  return Tensor::of<double>(tape.device(), {std::ssize(bias_)}, wide);
}

autograd::Routed Moe::route(Tape& tape, const Var& logits, const std::vector<bool>& filling) {
  const MoeOptions& o = options_;
  const auto of = std::make_shared<MicroBatch>();
  autograd::Routed routed = autograd::route(
      logits, bias_tensor(tape, logits.dtype()), o.routing, [this, of] { return loss_factors(*of); },
      filling);
  if (!tape.training && !tape.recording()) return routed;
  std::vector<std::int64_t> counts = routed.per_expert;
  if (o.losses.kind == BalanceLoss::first_choices) {
    std::fill(counts.begin(), counts.end(), 0);
    const auto k = static_cast<std::size_t>(o.routing.top_k);
    for (std::size_t c = 0; c < routed.chosen.size(); c += k)
      if (routed.chosen[c] >= 0) ++counts[static_cast<std::size_t>(routed.chosen[c])];
  }
  counts = over_context(tape, std::move(counts));
  of->key = tape.random;
  of->tokens = static_cast<double>(std::max<std::int64_t>(1, tokens_of(tape, logits.shape()[0])));
  of->n.assign(counts.begin(), counts.end());
  if (o.losses.kind == BalanceLoss::pooled) o.pooled->put(of->key, layer_, of->n);
  if (tape.training && tape.recording()) count(tape, logits, routed, filling, *of);
  return routed;
}

std::vector<std::int64_t> Moe::over_context(Tape& tape, std::vector<std::int64_t> counts) const {
  const std::int64_t ranks = layout_.context_size();
  if (ranks == 1) return counts;
  if (tape.device().kind() == device::Kind::meta) {  // peers as this one
    for (std::int64_t& n : counts) n *= ranks;
    return counts;
  }
  comm::reduce_values(*layout_.context, tape.device(), std::span(counts), path() + " load");
  return counts;
}

std::vector<double> Moe::balance_weights(const MicroBatch& of) const {
  const MoeOptions& o = options_;
  const bool pooled = o.losses.kind == BalanceLoss::pooled;
  return parallel::balance_weights(o.losses.kind, pooled ? o.pooled->mean(of.key) : of.n, of.tokens,
                                   o.routing.top_k, pooled ? o.pooled->layers() : 1);
}

/// In backward: by then all layers have chosen.
autograd::RouterLossFactors Moe::loss_factors(const MicroBatch& of) {
  const MoeOptions& o = options_;
  autograd::RouterLossFactors out;
  out.z = o.losses.z / of.tokens;
  const bool pooled = o.losses.kind == BalanceLoss::pooled;
  if (!pooled && o.losses.balance == 0) return out;
  out.balance = balance_weights(of);
  if (pooled) totals_.balance += o.pooled->layers() * sum_of_products(of.probabilities, out.balance);
  for (double& weight : out.balance) weight *= o.losses.balance;
  if (pooled && layer_ == 0) o.pooled->forget(of.key);
  return out;
}

void Moe::count(Tape& tape, const Var& logits, const autograd::Routed& routed,
                const std::vector<bool>& filling, MicroBatch& of) {
  RoutingTotals& all = totals_;
  all.per_expert.resize(routed.per_expert.size());
  for (std::size_t e = 0; e < all.per_expert.size(); ++e) all.per_expert[e] += routed.per_expert[e];
  all.choices += choices(routed);
  if (layout_.context_rank() == 0) ++all.micro_batches;
  const autograd::RouterSums sums = autograd::router_sums(tape, logits.value(), options_.routing, filling);
  all.z += sums.z / of.tokens;
  of.probabilities = sums.probabilities;
  if (options_.losses.kind != BalanceLoss::pooled)
    all.balance += sum_of_products(of.probabilities, balance_weights(of));
}

/// Capacities are those of the whole micro-batch.
Dispatch Moe::dispatch(Tape& tape, const autograd::Routed& routed, const tensor::Shape& inner) const {
  std::int64_t capacity = expert_capacity(options_, tokens_of(tape, inner.rows()));
  // Texts that are generated come in batches that mean nothing: what one becomes must not depend on others.
  if (tape.key_cache || tape.texts_apart) capacity = -1;
  const std::int64_t ranks = layout_.context_size();
  if (tape.device().kind() == device::Kind::meta)
    return dry_dispatch(routed.per_expert, capacity < 0 ? -1 : (capacity + ranks - 1) / ranks);
  return plan_dispatch(routed.chosen, options_.experts, options_.routing.top_k,
                       dropped(tape, routed, inner, capacity));
}

/// All context ranks' choices lie in the order of the micro-batch's tokens.
std::vector<bool> Moe::dropped(Tape& tape, const autograd::Routed& routed, const tensor::Shape& inner,
                               std::int64_t capacity) const {
  if (capacity < 0) return {};
  const MoeOptions& o = options_;
  const std::int64_t rows = inner.rank() == 2 ? inner[0] : inner[-2], batch = inner.rows() / rows;
  const int ranks = layout_.context_size(), k = o.routing.top_k;
  std::vector<double> weights;
  if (o.drop == Drop::by_weight) weights = host_values(tape, routed.weights.value());
  if (ranks == 1) return dropped_choices(routed.chosen, o.experts, k, capacity, o.drop, weights);
  std::vector<double> own(routed.chosen.begin(), routed.chosen.end());
  own.insert(own.end(), weights.begin(), weights.end());
  const std::vector<double> all = gathered(tape, own, *layout_.context, path() + " choices");
  const std::size_t n = routed.chosen.size(), width = static_cast<std::size_t>(k);
  std::vector<std::int32_t> chosen(n * static_cast<std::size_t>(ranks));
  std::vector<double> of_all(weights.empty() ? 0 : chosen.size());
  std::vector<std::size_t> mine;
  for (int rank = 0; rank < ranks; ++rank) {
    const double* from = all.data() + static_cast<std::size_t>(rank) * own.size();
    const std::vector<std::size_t> places = places_of(layout_, batch, rows, rank);
    for (std::size_t c = 0; c < n; ++c) {
      const std::size_t to = places[c / width] * width + c % width;
      chosen[to] = static_cast<std::int32_t>(from[c]);
      if (!weights.empty()) of_all[to] = from[n + c];
      if (rank == layout_.context_rank()) mine.push_back(to);
    }
  }
  const std::vector<bool> gone = dropped_choices(chosen, o.experts, k, capacity, o.drop, of_all);
  std::vector<bool> out;
  for (const std::size_t at : mine) out.push_back(gone[at]);
  return out;
}

RoutingTotals Moe::take_totals() {
  return std::exchange(totals_, {});
}

// ---- once per step ----

std::vector<double> Moe::counted() const {
  const RoutingTotals& t = totals_;
  std::vector<double> out(t.per_expert.begin(), t.per_expert.end());
  out.resize(static_cast<std::size_t>(options_.experts));
  for (const std::int64_t n : {t.choices, t.dropped, t.micro_batches}) out.push_back(static_cast<double>(n));
  out.push_back(t.balance), out.push_back(t.z);
  return out;
}

void Moe::end_step(std::span<const double> sums, bool applied) {
  const auto experts = static_cast<std::size_t>(options_.experts);
  require(sums.size() == experts + 5, path(), ": ", sums.size(), " sums of ", experts, " experts");
  drop_step();
  RoutingTotals& t = last_step_;
  t.per_expert.assign(sums.begin(), sums.begin() + options_.experts);
  const auto count = [&](std::size_t i) { return static_cast<std::int64_t>(sums[experts + i]); };
  t.choices = count(0), t.dropped = count(1), t.micro_batches = count(2);
  t.balance = sums[experts + 3], t.z = sums[experts + 4];
  if (!applied) return;
  for (std::size_t e = 0; e < bias_.size() && options_.bias_update > 0; ++e) {
    const std::int64_t above = t.per_expert[e] * options_.experts - t.choices;  // the mean, times the experts
    if (above != 0) bias_[e] += static_cast<float>(above < 0 ? options_.bias_update : -options_.bias_update);
  }
}

void Moe::drop_step() {
  totals_ = {};
  if (options_.pooled) options_.pooled->clear();
}

void Moe::restore(std::span<const float> values) {
  require(values.size() == bias_.size(), path(), ": ", values.size(), " biases for ", bias_.size());
  bias_.assign(values.begin(), values.end());
}

std::vector<std::pair<std::string, Moe*>> layers_of_experts(nn::Module& model) {
  std::vector<std::pair<std::string, Moe*>> out;
  model.for_each([&](nn::Module& module) {
    if (auto* layer = dynamic_cast<Moe*>(&module)) out.emplace_back(module.path(), layer);
  });
  return out;
}

}  // namespace sherd::parallel
