#include "sharding/gradients/gradients.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "comm/gather.h"

namespace sherd::sharding {
namespace {

/// Squares of the gradients of all copies, and what they would be if each were like the first one. Native
/// reductions may differ in last bits.
void require_alike(const tensor::ExactSum& found, const tensor::ExactSum& expected) {
  if (found.non_finite + expected.non_finite > 0) return;  // an overflow, which is told elsewhere
  const double is = found.value(), should_be = expected.value();
  require(std::abs(is - should_be) <= 1e-6 * std::max(is, should_be),
          "tensor ranks have found different gradients for parameters that each of them holds whole: nothing "
          "was updated. What runs on a part of the sequence takes its parameters through "
          "parallel::on_stream(), and what comes before a layer that is cut goes through parallel::copy_to() "
          "(docs/parallel.md)");
}

}  // namespace

Gradients::Gradients(tensor::Kernels& kernels, comm::Communicator& model_ranks, const ReducerOptions& options)
    : kernels_(kernels), model_ranks_(model_ranks), options_(options) {
  if (model_ranks.size() == 1 && kernels.device().has_own_memory())
    traffic_ = std::make_unique<GradientTraffic>(kernels.device());
}

Gradients::~Gradients() = default;

void Gradients::add(Segment& segment) {
  segments_.push_back(&segment);
  reducer_of(segment);
}

Reducer& Gradients::reducer_of(const Segment& segment) {
  const RankGroups groups = segment.gradient_groups();
  for (Reducer& reducer : reducers_)
    if (reducer.serves(groups)) return reducer;
  return reducers_.emplace_back(groups, kernels_, options_, complete_, stats_);
}

bool Gradients::has_sum(const Segment& segment) const {
  return std::find(summed_.begin(), summed_.end(), &segment) != summed_.end();
}

Gradients::Open Gradients::open(Segment& segment, ExchangePool& pool) {
  const bool fold = segment.folds_gradients() && options_.reduction == Reduction::ordered;
  Open open;
  open.onto = has_sum(segment);
  if (!open.onto) segment.keep_own_gradients(keeps_own_ && keeps_own_(segment));
  if (traffic_ && segment.gradients_staged()) open.full = open.sum = traffic_->open(segment, open.onto);
  TurnCounts& turns = turns_[&segment];
  const int sources = segment.sources();
  // Sums have the order of the micro-batches: nobody folds before an earlier one is complete.
  if (fold && (kernels_.folds_gradients() || sources > 1) && segment.gradient_groups().alone() &&
      turns.opened == turns.closed)
    open.fold = options_.rounding;
  // The first micro-batch of a step may write to where the sum forms; what is folded onto it comes from
  // elsewhere.
  if ((segment.gradients_staged() && !open.sum) || (fold && open.onto) || sources > 1)
    open.full = pool.take(segment.layout().padded() * (open.fold ? 1 : sources), segment.gradients().dtype());
  if (!open.onto) summed_.push_back(&segment);
  open.shared = open.in_place() && !fold;
  open.turn = turns.opened++;
  if (!open.in_place() || !open.onto)
    open.written.assign(segment.layout().parameters().size(), Written::nowhere);
  return open;
}

void Gradients::close(Segment& segment, Open open, bool last, std::span<const Segment::Range> apart) {
  require(
      open.turn == turns_[&segment].closed++, "gradients of '", segment.name(),
      "' are complete out of turn: micro-batches come back, and compute their weight gradients, in the order "
      "in which their backward began");
  if (!open.sum) {
    const bool fold = open.full && open.onto;
    // Stages close what they share at different times, and in different orders: finish() lets them agree.
    const bool agrees = last && !segment.groups().over_stages;
    if (agrees) agreed_.insert(&segment);
    if (segment.folds_gradients() || agrees)
      reducer_of(segment).submit(segment, std::move(open.full), fold, agrees, apart);
    return;
  }
  const DType rounding = options_.rounding;
  if (!open.in_place() || (!open.onto && rounding != open.sum->dtype()))
    kernels_.fold(*open.full, rounding, *open.sum, !open.in_place());
  traffic_->send(segment, *open.sum);
  if (last) agreed_.insert(&segment), complete_.push_back(&segment);
}

/// For what several stages share; or for a block that has run in an earlier micro-batch and not in the last,
/// which is when replicated gradients are reduced, and replicas agree.
void Gradients::agree(Segment& segment) {
  Reducer& reducer = reducer_of(segment);
  const Segment::Range whole{0, segment.layout().padded()};
  if (!segment.folds_gradients())
    reducer.submit(segment, nullptr, false, !segment.groups().over_stages, {&whole, 1});
  if (segment.folds_gradients() || segment.groups().over_stages) reducer.submit_sum(segment);
}

void Gradients::settle() {
  for (Reducer& reducer : reducers_) reducer.settle();
}

void Gradients::finish() {
  for (Segment* segment : segments_)
    if (has_sum(*segment) && agreed_.insert(segment).second) agree(*segment);
  for (Reducer& reducer : reducers_) reducer.finish();
  if (traffic_) traffic_->join();
  fill_missing();
}

/// A gradient that no micro-batch of the step wrote is zero, for whoever reads it first: the norm, or an
/// update that began early.
void Gradients::fill_missing() {
  for (Segment* segment : segments_) {
    if (has_sum(*segment)) continue;
    kernels_.fill(segment->gradients().tensor(), 0);
    segment->keep_own_gradients(keeps_own_ && keeps_own_(*segment));
    summed_.push_back(segment);
  }
}

tensor::ExactSum Gradients::sum_of_squares() {
  fill_missing();
  std::vector<Tensor> counted, copied;
  std::map<int, std::vector<Tensor>> own;  // by the number of replicas
  const comm::Communicator* copies = nullptr;
  for (const Segment* segment : segments_) {
    const RankGroups& groups = segment->groups();
    if (segment->keeps_own_gradients()) {
      if (!groups.copies || groups.copies->rank() == 0)
        own[groups.replicas()].push_back(segment->own_gradients());
    } else if (groups.holder() == 0) {
      counted.push_back(segment->own_gradients());
    }
    if (!groups.copies || groups.replica_index() > 0) continue;
    copied.push_back(segment->own_gradients());
    copies = groups.copies;
  }
  std::array<tensor::ExactSum, 3> sums;  // of all, of every copy, and of these if each were like the first
  kernels_.sums_of_squares(counted, sums[0]);
  for (const auto& [replicas, gradients] : own) {
    tensor::ExactSum of_own;
    kernels_.sums_of_squares(gradients, of_own);
    for (int i = 0; i < replicas; ++i) sums[0].add(of_own);
  }
  if (model_ranks_.size() == 1) return sums[0];
  if (copies) {
    kernels_.sums_of_squares(copied, sums[1]);
    for (int i = 0; copies->rank() == 0 && i < copies->size(); ++i) sums[2].add(sums[1]);
  }
  std::string label = "gradient norm";
  if (!options_.compare_replicas)
    for (const Reducer& reducer : reducers_) label += reducer.agreed_on();
  sum_over_ranks(sums, label);
  require_alike(sums[1], sums[2]);
  return sums[0];
}

void Gradients::sum_over_ranks(std::span<tensor::ExactSum> sums, const std::string& label) {
  if (model_ranks_.size() == 1) return;
  std::vector<std::int64_t> words;
  for (const tensor::ExactSum& sum : sums) {
    const std::vector<std::int64_t> more = sum.to_words();
    words.insert(words.end(), more.begin(), more.end());
  }
  comm::reduce_values(model_ranks_, kernels_.device(), std::span(words), label);
  const std::size_t each = words.size() / sums.size();
  for (std::size_t i = 0; i < sums.size(); ++i)
    sums[i] = tensor::ExactSum::from_words(std::span(words).subspan(i * each, each));
}

void Gradients::clear() {
  summed_.clear();
  turns_.clear();
  agreed_.clear();
  complete_.clear();
  for (Reducer& reducer : reducers_) reducer.clear();
  for (Segment* segment : segments_)
    for (const ParameterPtr& parameter : segment->layout().parameters()) parameter->grad_written = false;
}

void Gradients::abandon() {
  for (Reducer& reducer : reducers_) reducer.abandon();
  complete_.clear();
  turns_.clear();
}

}  // namespace sherd::sharding
