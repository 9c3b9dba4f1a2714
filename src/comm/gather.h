#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "base/error.h"
#include "comm/communicator.h"

// Small things that every rank tells all others: lists of numbers, records of plain data, and how its part of
// a common task went. All are collective over `ranks` and counted as scalars; `label` says in errors what
// for.

namespace sherd::comm {

/// Every rank's list of numbers, however long, in rank order; through memory of `device`. On a device that
/// only tracks memory all ranks have this one's.
std::vector<std::vector<std::int64_t>> gather_lists(Communicator& ranks, device::Device& device,
                                                    std::vector<std::int64_t> mine, const std::string& label);

/// Adds the ranks' values up, or combines them as `op` says, in place; through memory of `device`. On a
/// device that only tracks memory they stay as they are.
template <class T>
void reduce_values(Communicator& ranks, device::Device& device, std::span<T> values, const std::string& label,
                   ReduceOp op = ReduceOp::sum) {
  if (ranks.size() == 1) return;
  const auto all =
      tensor::Tensor::of<T>(device, {std::ssize(values)}, std::span<const T>(values.data(), values.size()));
  ranks.all_reduce(all, op, 1, {.label = label, .scalar = true}).wait();
  if (device.kind() == device::Kind::meta) return;
  const tensor::Tensor here = tensor::to_host(device, all);
  std::copy_n(here.data<T>(), values.size(), values.begin());
}

/// Does what gather_records() does, with the bytes of the records.
std::vector<std::byte> gather_bytes(Communicator& ranks, std::span<const std::byte> mine,
                                    const std::string& label);

/// The root's text, however long, on every rank; through the host's memory.
std::string broadcast_text(Communicator& ranks, std::string mine, int root, const std::string& label);

/// Every rank's `mine`, equally many on each, in rank order; through the host's memory, before the ranks are
/// bound to a device and after.
template <class Record>
requires std::is_trivially_copyable_v<Record> std::vector<Record> gather_records(Communicator& ranks,
                                                                                 std::span<const Record> mine,
                                                                                 const std::string& label) {
  const std::vector<std::byte> bytes = gather_bytes(ranks, std::as_bytes(mine), label);
  std::vector<Record> all(bytes.size() / sizeof(Record));
  if (!bytes.empty()) std::memcpy(all.data(), bytes.data(), bytes.size());
  return all;
}
/// The same of one record from each.
template <class Record>
requires std::is_trivially_copyable_v<Record> std::vector<Record> gather_records(Communicator& ranks,
                                                                                 const Record& mine,
                                                                                 const std::string& label) {
  return gather_records(ranks, std::span<const Record>(&mine, 1), label);
}

/// How a rank's part of a common task went, as it is told to the others.
struct PartOutcome {
  bool failed = false;
  ErrorKind kind = ErrorKind::io;
  char message[1000] = {};

  /// The outcome that `error` tells.
  static PartOutcome of(const std::exception_ptr& error) noexcept;
  /// Throws the error that rank `rank` met, naming it.
  [[noreturn]] void rethrow(std::size_t rank) const;
};

/// Runs `part` on every rank and returns what each gave, in rank order. Where it throws on one, all ranks
/// throw: that rank what it threw, the others the same kind of Error naming the rank; no rank is left to wait
/// for a deadline, and the ranks can go on together. `part` makes no collective calls.
template <class Part>
auto gather_results(Communicator& ranks, const std::string& label, const Part& part) {
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
  const std::vector<Result> all = gather_records(ranks, mine, label);
  if (error) std::rethrow_exception(error);
  std::vector<Record> values;
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].outcome.failed) all[rank].outcome.rethrow(rank);
    values.push_back(all[rank].value);
  }
  return values;
}

}  // namespace sherd::comm
