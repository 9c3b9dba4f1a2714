#pragma once

// This room is below all others: errors, the log, dtypes, random streams, threads, deadlines and files.
//
// To change, look at:
// - error kinds and texts: fail(), require(), error.h, called where it goes wrong; exit codes:
//   cli/program.cpp
// - how fp32 masters round to bf16: round_master_to_bf16(), dtype.h
// - random streams, which are counters: random.h
// - signals, Sherd's own threads and alternate stacks: threads.h; every std::thread gets an own_thread(), and
//   arenas' workers begin likewise
// - files that appear whole or not at all: files.h; one run at a time: run_lock.h

#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace sherd {

/// Streams every argument into one string.
template <class... Args>
std::string cat(const Args&... args) {
  std::ostringstream out;
  (out << ... << args);
  return std::move(out).str();
}

/// The kinds of errors, coarse enough to act on.
enum class ErrorKind {
  usage,       ///< a caller broke an interface's contract
  config,      ///< a configuration value is wrong or does not fit
  data,        ///< a file's content is not what it must be
  io,          ///< the operating system refused a file operation
  memory,      ///< a tier's limit would be exceeded
  comm,        ///< a peer failed, disagreed, or missed the deadline
  numerics,    ///< NaN or infinity where none may be
  interrupted  ///< a signal or cancellation asked to stop
};

/// The one exception type that Sherd throws. The message names the cause and the next step.
class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const noexcept { return kind_; }

 private:
  ErrorKind kind_;
};

/// Throws Error{kind} with the concatenated arguments.
template <class... Args>
[[noreturn]] void fail(ErrorKind kind, const Args&... args) {
  throw Error(kind, cat(args...));
}

/// Throws Error{usage} with the concatenated arguments unless `condition` holds.
template <class... Args>
void require(bool condition, const Args&... args) {
  if (!condition) [[unlikely]]
    fail(ErrorKind::usage, args...);
}

/// The candidate at the smallest edit_distance() from `word`; empty when none is near.
template <class Range>
std::string nearest(std::string_view word, const Range& candidates);

/// Letters wrong, missing, added or swapped, ignoring case; the largest size_t beyond slips of the pen.
std::size_t edit_distance(std::string_view a, std::string_view b);

template <class Range>
std::string nearest(std::string_view word, const Range& candidates) {
  std::string best;
  std::size_t best_distance = static_cast<std::size_t>(-1);
  for (const auto& candidate : candidates) {
    const std::size_t distance = edit_distance(word, candidate);
    if (distance < best_distance) best_distance = distance, best = candidate;
  }
  return best;
}

/// The mistakes of a configuration, gathered so that a person hears of all of it at once.
class Problems {
 public:
  /// Calls `check`; an Error{config} of it becomes a problem, and what comes next is checked too.
  void attempt(const std::function<void()>& check);
  void add(std::string message) { messages_.push_back(std::move(message)); }
  /// Calls `change(message)` for each of them.
  void for_each(const std::function<void(std::string&)>& change);
  std::size_t size() const { return messages_.size(); }
  /// Throws Error{config} with all problems, if there are any; of more than `most`, how many there are.
  void raise() const;
  static constexpr std::size_t most = 30;

 private:
  std::vector<std::string> messages_;
};

}  // namespace sherd
