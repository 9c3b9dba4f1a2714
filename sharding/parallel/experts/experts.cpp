#include "sharding/parallel/experts/experts.h"

#include <algorithm>
#include <numeric>

#include "autograd/ops.h"
#include "base/text/excerpt.h"
#include "comm/gather.h"
#include "sharding/parallel/collectives.h"
#include "sharding/parallel/exchanges.h"
#include "sharding/parallel/linear.h"

namespace sherd::parallel {
namespace {

using tensor::Tensor;
using Counts = std::vector<std::int64_t>;

std::int64_t sum(const Counts& counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

/// A layer that holds weights and does not run.
template <class L>
struct Projection {
  std::shared_ptr<L> layer;

  Var operator()(Tape& tape, const Var& x, tensor::Activation activation, const Counts& sources,
                 bool adds_bias) const {
    const Var b = layer->bias() ? tape.parameter(layer->bias()) : Var(), w = tape.parameter(layer->weight());
    LinearAdapter* adapter = layer->adapter();
    if (!adapter || tape.without_adapters)
      return autograd::linear_by_source(x, w, b, activation, sources, adds_bias);
    const Var base = autograd::linear_by_source(x, w, b, tensor::Activation::none, sources, adds_bias),
              sum = adapter->output(tape, x, base, sources);
    return activation == tensor::Activation::none ? sum : autograd::activation(sum, activation);
  }
};

}  // namespace

class Experts::Expert : public nn::Module {
 public:
  Expert(const ExpertOptions& o, const Layout& layout, std::int64_t index, int expert_rank)
      : gated_(o.gated),
        glu_(o.glu),
        activation_(o.gated ? tensor::Activation::none : o.activation),
        adds_bias_(layout.tensor_rank() == 0),
        up_{add("up", std::make_shared<ColumnLinear>(
                          o.hidden, o.gated ? 2 * o.ffn_hidden : o.ffn_hidden, layout,
                          nn::LinearOptions{.bias = o.bias, .init = o.init, .packing = packing(o)},
                          o.gated ? Counts{o.ffn_hidden, o.ffn_hidden} : Counts{}))},
        down_{add("down",
                  std::make_shared<RowLinear>(o.ffn_hidden, o.hidden, layout,
                                              nn::LinearOptions{.bias = o.bias, .init = o.output_init}))} {
    for (const nn::ParameterPtr& parameter : parameters())
      parameter->partial_gradient = false;  // tensor ranks have the same rows
    if (o.adapter_of) {
      up_.layer->set_adapter(o.adapter_of(index, ExpertLayer::up));
      down_.layer->set_adapter(o.adapter_of(index, ExpertLayer::down));
    }
    for (const nn::ParameterPtr& parameter : parameters()) parameter->expert_rank = expert_rank;
    mark_block();
    mark_on_demand();
  }

  /// It will run, or take part in what the others do with its parameters.
  void announce(Tape& tape) const {
    if (scope()) scope()->announce(tape);
  }
  /// Its block, with no rows here.
  void pass_by(Tape& tape) const {
    tape.enter(scope());
    tape.leave(scope());
  }
  /// Not as a block that recomputes: the block around it does that.
  Var operator()(Tape& tape, const Var& x, const Counts& sources) const {
    tape.enter(scope());
    Var wide = up_(tape, x, activation_, sources, true);
    if (gated_) wide = autograd::glu(wide, glu_);
    Var out = down_(tape, wide, tensor::Activation::none, sources, adds_bias_);
    out.pin();
    tape.leave(scope());
    return out;
  }

 private:
  /// The rows of gate and up.
  static autograd::Packing packing(const ExpertOptions& o) {
    if (!o.gated) return {};
    return {{{{0, o.ffn_hidden}}, {{o.ffn_hidden, 2 * o.ffn_hidden}}}};
  }

  bool gated_;
  tensor::Glu glu_;
  tensor::Activation activation_;
  bool adds_bias_;  ///< the one of the tensor ranks whose part of the sum has it
  Projection<ColumnLinear> up_;
  Projection<RowLinear> down_;
};

namespace {
/// The group of an axis, apart from what parameters and gradients go by; null where this rank is alone.
comm::Communicator* group_of(const Layout& layout, comm::Axis axis) {
  const bool several = layout.groups && layout.groups->grid().size(axis) > 1;
  return several ? &layout.groups->apart(axis) : nullptr;
}
}  // namespace

Experts::Experts(const ExpertOptions& options, const Layout& layout)
    : expert_(group_of(layout, comm::Axis::expert)), expert_data_(group_of(layout, comm::Axis::expert_data)) {
  if (expert_) rank_ = expert_->rank(), ranks_ = expert_->size();
  if (options.experts % ranks_ != 0) {
    std::string would_do;
    for (std::int64_t n = 1; n <= options.experts; ++n)
      if (options.experts % n == 0) would_do += cat(n > 1 ? ", " : "", n);
    fail(ErrorKind::config, "parallel.expert ", ranks_, " does not divide ", options.experts,
         " experts; sizes that do: ", would_do);
  }
  for (std::int64_t e = 0; e < options.experts; ++e) {
    const auto owner = static_cast<int>(e / (options.experts / ranks_));
    all_.push_back(
        add(std::to_string(e), std::make_shared<Expert>(options, layout, e, ranks_ > 1 ? owner : -1)));
  }
}

std::string Experts::label(const char* what) const {
  return cat(path().empty() ? "experts" : path(), " ", what);
}

/// How many rows every expert rank sends to each expert. Peers that are not there send as much as this one.
std::vector<Counts> Experts::gather_counts(Tape& tape, const Counts& own) const {
  const auto ranks = static_cast<std::size_t>(ranks_);
  std::vector<Counts> out(ranks, own);
  if (ranks == 1) return out;
  const std::int64_t experts = std::ssize(own);
  const Tensor mine = Tensor::of<std::int64_t>(tape.device(), {experts}, own);
  const Tensor all = tape.empty({ranks_ * experts}, DType::i64);
  expert_->all_gather({{mine, all}}, {.label = label("counts"), .scalar = true}).wait();
  if (tape.device().kind() == device::Kind::meta) return out;
  const Tensor here = tensor::to_host(tape.device(), all);
  for (std::size_t rank = 0; rank < ranks; ++rank)
    out[rank].assign(here.data<std::int64_t>() + static_cast<std::int64_t>(rank) * experts,
                     here.data<std::int64_t>() + static_cast<std::int64_t>(rank + 1) * experts);
  return out;
}

/// Whether any of the ranks that have the same experts has rows for them, replicas among them. Where
/// recompute will run the pass again, that holds what the first run found: in backward replicas may wait for
/// each other's gradients.
std::vector<bool> Experts::in_use(Tape& tape, const Counts& rows) {
  if (!tape.training || alone(expert_data_)) return ask_in_use(tape, rows);
  const std::pair key{tape.random.seed, tape.random.stream};
  if (tape.recording()) {
    const auto known = runs_again_.extract(key);
    return known.empty() ? ask_in_use(tape, rows) : known.mapped();
  }
  constexpr std::size_t most = 4096;  // far more than are under way: others were abandoned
  if (runs_again_.size() >= most) runs_again_.clear();
  return runs_again_[key] = ask_in_use(tape, rows);
}

std::vector<bool> Experts::ask_in_use(Tape& tape, Counts rows) const {
  if (!alone(expert_data_))
    comm::reduce_values(*expert_data_, tape.device(), std::span(rows), label("in use"));
  std::vector<bool> out;
  for (const std::int64_t n : rows) out.push_back(n > 0);
  return out;
}

/// `rows`: of this rank's experts, one after the other; `by_source`: how many of each, by where they are
/// from.
Var Experts::compute(Tape& tape, const Var& rows, const std::vector<Counts>& by_source) {
  const std::size_t first = static_cast<std::size_t>(rank_) * by_source.size();
  Counts counts;
  for (const Counts& sources : by_source) counts.push_back(sum(sources));
  const std::vector<bool> used = in_use(tape, counts);
  for (std::size_t e = 0; e < counts.size(); ++e)
    if (used[e]) all_[first + e]->announce(tape);
  const std::vector<Var> inputs = autograd::split_rows(rows, counts);
  std::vector<Var> outputs;
  for (std::size_t e = 0; e < counts.size(); ++e) {
    if (counts[e] > 0)
      outputs.push_back((*all_[first + e])(tape, inputs[outputs.size()], by_source[e]));
    else if (used[e])
      all_[first + e]->pass_by(tape);
  }
  Var made = outputs.empty() ? rows : autograd::join_rows(outputs);
  // Ranks' results take gradients alike, or some would wait for others' in backward: also those that have no
  // rows for experts that train.
  const auto trains = [](const auto& expert) {
    const std::vector<nn::ParameterPtr> all = expert->parameters();
    return std::any_of(all.begin(), all.end(), [](const auto& parameter) { return parameter->trainable; });
  };
  if (ranks_ > 1 && tape.recording() && !made.requires_grad() &&
      std::any_of(all_.begin(), all_.end(), trains))
    made = tape.variable(made.value());
  return made;
}

Var Experts::operator()(Tape& tape, const Var& rows, const Var& weights, const Dispatch& plan) {
  const std::size_t ranks = static_cast<std::size_t>(ranks_), local = all_.size() / ranks;
  require(plan.counts.size() == all_.size(), "rows for ", plan.counts.size(), " experts, of which there are ",
          all_.size());
  const Tensor places = autograd::row_numbers(tape, {rows.shape()[0], weights.shape()[1]}, plan.places);
  Var sorted = autograd::take_rows(rows, autograd::row_numbers(tape, {plan.rows()}, plan.sources));
  if (ranks == 1) {
    std::vector<Counts> by_source;
    for (const std::int64_t n : plan.counts) by_source.push_back({n});
    return autograd::combine_rows(compute(tape, sorted, by_source), places, weights);
  }
  const std::vector<Counts> all = gather_counts(tape, plan.counts);
  const auto part = [&](const Counts& counts, std::size_t rank) {
    const auto begin = counts.begin() + static_cast<std::ptrdiff_t>(rank * local);
    return Counts(begin, begin + static_cast<std::ptrdiff_t>(local));
  };
  Counts sent, received;
  std::vector<Counts> arriving, by_source(local);
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    sent.push_back(sum(part(plan.counts, rank)));
    arriving.push_back(part(all[rank], static_cast<std::size_t>(rank_)));
    received.push_back(sum(arriving.back()));
    for (std::size_t e = 0; e < local; ++e) by_source[e].push_back(arriving.back()[e]);
  }
  const bool dry = tape.device().kind() == device::Kind::meta;
  const Arrivals arrivals = dry ? Arrivals() : plan_arrivals(arriving);
  const Tensor order = autograd::row_numbers(tape, {sum(received)}, arrivals.order),
               inverse = autograd::row_numbers(tape, {sum(received)}, arrivals.inverse);
  const Var here = all_to_all_rows(sorted, sent, received, expert_, label("rows"));
  const Var made = compute(tape, autograd::permute_rows(here, order, inverse), by_source);
  const Var back = all_to_all_rows(autograd::permute_rows(made, inverse, order), received, sent, expert_,
                                   label("results"));
  return autograd::combine_rows(back, places, weights);
}

}  // namespace sherd::parallel
