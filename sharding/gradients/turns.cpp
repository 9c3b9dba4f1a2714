#include "sharding/gradients/turns.h"

#include <algorithm>

namespace sherd::sharding {

Turns::Turns(const TurnShape& shape) {
  const std::size_t turn = shape.overlap ? 1 : 0;
  const auto replicas = static_cast<std::size_t>(shape.replicas),
             replica = static_cast<std::size_t>(shape.replica);
  issue_lag_ = shape.chained ? replica * turn : 0;
  pass_lag_ = issue_lag_ + turn;
  settle_lag_ = shape.chained ? replicas * turn + replicas - 1 - replica : 2 * turn;
}

std::vector<Turn> Turns::launch() {
  ++launched_;
  const auto due = [&](std::size_t lag) { return launched_ - std::min(launched_, lag); };
  return until(due(issue_lag_), due(pass_lag_), due(settle_lag_));
}

std::vector<Turn> Turns::drain() {
  return until(launched_, launched_, launched_);
}

/// Sums go on before any result is waited for.
std::vector<Turn> Turns::until(std::size_t issued, std::size_t passed, std::size_t settled) {
  std::vector<Turn> turns;
  while (issued_ < issued || passed_ < passed) {
    if (issued_ < issued) turns.push_back({Turn::Op::issue, issued_++});
    if (passed_ < std::min(issued_, passed)) turns.push_back({Turn::Op::pass_on, passed_++});
  }
  for (std::size_t bucket = settled_; bucket < settled; ++bucket)
    turns.push_back({Turn::Op::pass_back, bucket});
  for (; settled_ < settled; ++settled_) turns.push_back({Turn::Op::settle, settled_});
  return turns;
}

}  // namespace sherd::sharding
