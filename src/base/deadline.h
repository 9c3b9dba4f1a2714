#pragma once

#include <algorithm>
#include <chrono>

namespace sherd {

/// A point in time after which waiting must stop. Every wait in Sherd takes one.
class Deadline {
 public:
  using Clock = std::chrono::steady_clock;
  explicit Deadline(std::chrono::nanoseconds from_now) : at_(Clock::now() + from_now) {}
  /// Thirty years count as for ever: nanoseconds hold three hundred.
  static Deadline after_seconds(double seconds) {
    return Deadline(std::chrono::duration_cast<std::chrono::nanoseconds>(
        std::chrono::duration<double>(std::min(seconds, 1e9))));
  }
  bool passed() const { return Clock::now() >= at_; }
  Clock::time_point at() const { return at_; }

 private:
  Clock::time_point at_;
};

}  // namespace sherd
