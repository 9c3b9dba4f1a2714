#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "config/machine.h"
#include "planning/fit.h"
#include "planning/model_work.h"

// The changes of keys by which a run takes less memory, and what each costs a step: remedy.cpp chooses.

namespace sherd::planning {

/// "a.b.c" and values.
using Keys = std::vector<std::pair<std::string, std::string>>;

/// One step down a ladder.
struct Change {
  double slow_down = 0;  ///< by Prices
  std::string reason;
  Keys keys;
  bool back = false;    ///< moves states into a tier that is faster than theirs
  bool shares = false;  ///< more ranks share a model
};

/// A change of which there may be less: `key` takes a number from `least` to `most`, each of which slows a
/// step down by the change's.
struct GradedChange {
  Change each;
  std::string key;
  std::int64_t least = 1, most = 0;

  Change by(std::int64_t number) const;
};

/// How much longer a step takes by a machine's rates when keys are changed.
class Prices {
 public:
  Prices(const Reparse& reparse, std::int64_t vocabulary, const World& world, const config::Machine& machine);

  /// The time that the keys add, as a share of the step; 0 where it takes no longer, as for keys without a
  /// price: sizes of buckets, and checkpoints. Infinite where a run would not accept the keys, and 0 for all
  /// where it does not accept the configuration.
  double slow_down(const Keys& keys);
  /// Whether the machine's rates tell the configuration's time.
  bool known() const { return before_ != never; }

 private:
  static constexpr double never = std::numeric_limits<double>::infinity();

  double seconds(const Keys& keys);

  const Reparse& reparse_;
  config::Machine machine_;
  int ranks_;
  GptWork work_;
  double before_ = 0;
};

/// All changes that are known of a configuration.
struct Changes {
  std::vector<Change> all;  ///< in the order of their reach, in which several follow each other
  std::vector<GradedChange> graded;
  /// The cheapest first; of those that cost the same in the order of their reach.
  std::vector<Change> by_price() const;
};

/// `room_is_known`: of the device tier, into which nothing is moved else. `config` outlives the call alone.
Changes known_changes(const config::Config& config, const World& world, bool room_is_known, Prices& prices);

}  // namespace sherd::planning
