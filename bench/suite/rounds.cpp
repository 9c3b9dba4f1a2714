#include "bench/suite/rounds.h"

#include <time.h>

#include <algorithm>
#include <cstddef>
#include <utility>

#include "base/error.h"

namespace sherd::bench {

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

Rounds::Rounds(int rounds, Tell tell, Clock clock) : rounds_(rounds), tell_(std::move(tell)), clock_(clock) {
  require(rounds > 0, "rounds must be positive");
}

double Rounds::now() const {
  timespec time{};
  ::clock_gettime(clock_ == Clock::wall ? CLOCK_MONOTONIC : CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

void Rounds::run(const std::vector<Contender>& contenders, int warm_up) {
  for (int round = 1 - warm_up; round <= rounds_; ++round)
    for (const Contender& c : contenders) {
      if (tell_)
        tell_(round < 1 ? cat(c.name, ", warm-up") : cat(c.name, ", round ", round, " of ", rounds_));
      if (c.meet) c.meet();
      const double start = now();
      c.run();
      if (c.meet) c.meet();
      const double seconds = now() - start;
      if (round >= 1) seconds_[c.name].push_back(seconds);
    }
}

double Rounds::median_seconds(const std::string& name) const {
  return median(seconds_.at(name));
}

double Rounds::ratio(const std::string& of, const std::string& to) const {
  const std::vector<double>&above = seconds_.at(of), &below = seconds_.at(to);
  std::vector<double> ratios(above.size());
  for (std::size_t i = 0; i < ratios.size(); ++i) ratios[i] = above[i] / below.at(i);
  return median(std::move(ratios));
}

}  // namespace sherd::bench
