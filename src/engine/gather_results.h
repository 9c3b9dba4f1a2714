#pragma once

#include <exception>
#include <string>
#include <type_traits>
#include <vector>

#include "base/error.h"
#include "engine/gather_records.h"

namespace sherd::engine {

/// How a rank's part of a common task went, as it is told to the others.
struct PartOutcome {
  bool failed = false;
  ErrorKind kind = ErrorKind::io;
  char message[1000] = {};

  /// What `error` holds.
  static PartOutcome of(const std::exception_ptr& error) noexcept;
  /// Throws what rank `rank` met, naming it.
  [[noreturn]] void rethrow(std::size_t rank) const;
};

/// Runs `part` on every rank and returns what each gave, in rank order. Where it throws on one, all ranks
/// throw: that rank what it threw, the others the same kind of Error naming the rank; no rank is left to wait
/// for a deadline, and the ranks can go on together. `part` makes no collective calls. Collective; `label` as
/// in gather_records().
template <class Part>
auto gather_results(const Distributed& dist, const std::string& label, const Part& part) {
  using Record = std::invoke_result_t<Part>;
  struct Result {
    PartOutcome outcome;
    Record value;
  };
  Result mine{};
  std::exception_ptr error;
  try {
    mine.value = part();
  } catch (...) {
    error = std::current_exception();
    mine.outcome = PartOutcome::of(error);
  }
  const std::vector<Result> all = gather_records(dist, mine, label);
  if (error) std::rethrow_exception(error);
  std::vector<Record> values;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].outcome.failed) all[rank].outcome.rethrow(rank);
    values.push_back(all[rank].value);
  }
  return values;
}

}  // namespace sherd::engine
