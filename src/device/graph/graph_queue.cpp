#include "device/graph/graph_queue.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace sherd::device {

GraphQueue::GraphQueue(std::unique_ptr<StreamQueue> inner, std::unique_ptr<GraphMaker> maker)
    : GraphQueue(std::move(inner), std::move(maker), Limits{}) {}

GraphQueue::GraphQueue(std::unique_ptr<StreamQueue> inner, std::unique_ptr<GraphMaker> maker,
                       const Limits& limits)
    : limits_(limits), inner_(std::move(inner)), maker_(std::move(maker)) {
  require(inner_ && maker_, "a queue of graphs needs a queue and a maker");
}

GraphQueue::~GraphQueue() {
  try {
    hand_over();
  } catch (...) {
    // Nobody is left who would ask; later calls of the driver say so where it was its failure.
  }
}

std::shared_ptr<const StreamEvent> GraphQueue::record() {
  std::lock_guard lock(mutex_);
  hand_over();
  return inner_->record();
}

void GraphQueue::follow(const StreamEvent& event) {
  std::lock_guard lock(mutex_);
  hand_over();
  inner_->follow(event);
}

void* GraphQueue::native() {
  std::lock_guard lock(mutex_);
  hand_over();
  return inner_->native();
}

void GraphQueue::launch(const KernelLaunch& kernel) {
  std::lock_guard lock(mutex_);
  defer(kernel);
}

void GraphQueue::call(const LibraryCall& call) {
  std::lock_guard lock(mutex_);
  defer(call);
}

void GraphQueue::end_sequence() {
  std::lock_guard lock(mutex_);
  hand_over();
}

GraphCounts GraphQueue::counts() const {
  std::lock_guard lock(mutex_);
  return counts_;
}

template <class Work>
void GraphQueue::defer(const Work& work) {
  if (failure_) std::rethrow_exception(failure_);
  sequence_.add(work);
  if (sequence_.size() >= limits_.most_works) hand_over();
}

void GraphQueue::hand_over() {
  if (failure_) std::rethrow_exception(failure_);
  if (sequence_.empty()) return;
  ++sequences_;
  try {
    if (sequence_.size() < limits_.least_works || !run_as_graph()) run_one_by_one();
  } catch (...) {
    failure_ = std::current_exception();
    sequence_.clear();
    throw;
  }
  sequence_.clear();
}

void GraphQueue::run_one_by_one() {
  for (std::size_t i = 0; i < sequence_.size(); ++i) sequence_.run(i, *inner_);
  counts_.works_apart += sequence_.size();
}

bool GraphQueue::run_as_graph() {
  const auto [at, is_new] = known_.try_emplace(sequence_.fingerprint());
  Known& known = at->second;
  known.used = sequences_;
  if (is_new) {
    forget();
    return false;
  }
  if (known.hopeless) return false;
  if (!known.graph) {
    if (!has_room()) return false;
    known.graph = maker_->make(sequence_);
    known.hopeless = !known.graph;
    if (known.hopeless) return false;
    ++counts_.graphs, ++kept_graphs_;
    known.sequence = sequence_;
    forget();
  } else if (!known.sequence.same_works(sequence_)) {
    return false;  // two of one hash
  }
  for (std::size_t i = 0; i < sequence_.size(); ++i) {
    if (!sequence_.is_kernel(i) || known.sequence.same_arguments(i, sequence_)) continue;
    known.graph->set(i, sequence_);
    known.sequence.take_arguments(i, sequence_);
  }
  known.graph->launch();
  ++counts_.launches;
  counts_.works_in_graphs += sequence_.size();
  return true;
}

/// Whether one more graph may be kept; the longest unused goes for it.
bool GraphQueue::has_room() {
  if (kept_graphs_ < limits_.most_graphs) return true;
  if (sequences_ < full_until_) return false;
  auto oldest = known_.end();
  for (auto each = known_.begin(); each != known_.end(); ++each)
    if (each->second.graph && (oldest == known_.end() || each->second.used < oldest->second.used))
      oldest = each;
  if (oldest == known_.end()) return false;
  full_until_ = oldest->second.used + limits_.idle;
  if (sequences_ < full_until_) return false;
  retired_.push_back({std::move(oldest->second), inner_->record()});  // it may still run
  known_.erase(oldest);
  --kept_graphs_;
  return true;
}

/// Forgets graphs that have run for the last time, and sequences that came once, long ago.
void GraphQueue::forget() {
  std::erase_if(retired_, [](const Retired& each) { return each.after->reached(); });
  if (known_.size() - kept_graphs_ > 4 * limits_.most_graphs)
    std::erase_if(known_, [&](const auto& each) {
      return !each.second.graph && each.second.used + 2 * limits_.most_graphs < sequences_;
    });
}

}  // namespace sherd::device
