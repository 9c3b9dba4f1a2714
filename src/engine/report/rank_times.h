#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/waits.h"

namespace sherd {
class Engine;
}

namespace sherd::engine {

/// How long parts of a rank's step took, in milliseconds. A rank waits for others inside of its collectives
/// and receives; all else is its own.
struct RankTimes {
  enum Part : std::uint8_t { forward, backward, update, data, storage, rest };
  static constexpr int part_count = 6;
  std::array<float, part_count>
      parts{};     ///< its own; forward, backward and update without what they wait for
  float wait = 0;  ///< for other ranks, and for what they send

  float own() const;
  void add(const RankTimes& other);
};
/// "forward", "reads from NVMe", …
std::string_view name_of(RankTimes::Part part);

/// Finds ranks that take longer than their peers for many steps. A pipeline's ranks have peers on their own
/// stage, as stages differ by design.
class StragglerWatch {
 public:
  /// Steps after which it judges; a rank is slow whose time, in their median, is beyond `factor` times its
  /// peers' median, and by `least_ms` at least.
  static constexpr int window = 20;
  static constexpr double factor = 1.2, least_ms = 1;

  /// `stages`: by rank.
  explicit StragglerWatch(std::vector<int> stages);

  /// Takes a step of all ranks; gives what is to be told: each slow rank once, and again where it has been
  /// slow at something else for two windows, or as fast as its peers for five.
  std::vector<std::string> add(std::span<const RankTimes> ranks);

  /// The part of a step at which a rank loses most against its peers, where these times say that it is slow.
  std::optional<RankTimes::Part> slow_at(std::span<const RankTimes> ranks, std::size_t rank) const;

 private:
  /// The lower middle of what `value` gives for the rank's peers and itself.
  template <class Value>
  double median(std::size_t count, std::size_t rank, const Value& value) const;
  std::vector<std::string> judge();

  std::vector<int> stages_;
  std::vector<std::vector<double>> ratios_, excess_;  ///< of the window's steps, by rank
  std::vector<RankTimes> sums_;                       ///< of the window
  /// The slowness of a rank: the part that was told, another that the last window found, and for how many
  /// windows the rank has been as fast as its peers.
  struct Known {
    std::optional<RankTimes::Part> told, found;
    int fast = 0;
  };
  bool is_news(Known& known, std::optional<RankTimes::Part> part) const;
  std::vector<Known> known_;
  int steps_ = 0;
};

/// Measures one rank's steps, and tells all ranks' on rank 0. It does nothing in a world of one rank, nor on
/// GPUs, where the thread is ahead of its GPU and collectives wait there.
class RankWatch {
 public:
  explicit RankWatch(Engine& engine);

  void begin_step();
  /// Collective. `seconds`: of the step.
  void end_step(double seconds);

  /// The last step's, by rank; empty: not measured.
  const std::vector<RankTimes>& last() const { return last_; }
  /// Means of all steps so far, a row for each rank; of large worlds the slowest, and the median. Empty: not
  /// measured.
  std::string table() const;

 private:
  Engine& engine_;
  const bool measures_;
  std::unique_ptr<StragglerWatch> stragglers_;
  WaitTotals before_;
  std::vector<int> stages_;
  std::vector<RankTimes> last_, totals_;
  std::int64_t steps_ = 0;
};

/// RankWatch::table() of these sums over `steps` steps.
std::string ranks_table(std::span<const RankTimes> totals, std::vector<int> stages, std::int64_t steps);

}  // namespace sherd::engine
