#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

namespace sherd::bench {

/// Something that is timed again and again.
struct Contender {
  std::string name;
  std::function<void()> run;
  /// Ranks wait for each other here before the clock starts and before it stops.
  std::function<void()> meet{};
};

/// Told before each run what is measured now ("fused, round 3 of 9"); may be empty.
using Tell = std::function<void(const std::string&)>;

/// Times of contenders that take turns: machines change their speed within seconds, so only times of the same
/// round are compared, and the median over rounds of those ratios is what counts.
class Rounds {
 public:
  enum class Clock { wall, thread_cpu };  ///< thread_cpu: of the calling thread, which others disturb less
  explicit Rounds(int rounds, Tell tell = {}, Clock clock = Clock::wall);

  /// Runs all contenders in turn, round by round, after `warm_up` rounds that do not count.
  void run(const std::vector<Contender>& contenders, int warm_up = 1);

  int count() const { return rounds_; }
  bool has(const std::string& name) const { return seconds_.contains(name); }
  double median_seconds(const std::string& name) const;
  /// Median over rounds of the time of `of` by the time of `to`.
  double ratio(const std::string& of, const std::string& to) const;

 private:
  double now() const;
  int rounds_;
  Tell tell_;
  Clock clock_;
  std::map<std::string, std::vector<double>> seconds_;  // by contender and round
};

/// The middle value; the upper one of two. Not of nothing.
double median(std::vector<double> values);

}  // namespace sherd::bench
