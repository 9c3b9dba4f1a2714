#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "config/machine.h"
#include "engine/estimate/step_time.h"
#include "planning/fit.h"
#include "planning/model_work.h"

// This room plans runs before they start: what fits a machine, what makes a run fit, and which layout of
// ranks trains fastest.
//
// To change, look at:
// - the time of a step: engine/estimate/step_time.h, by prices of work (price.h) that dry runs tell
//   (part_work.h); the rates: config/machine.h and configs/machines/
// - which layouts are tried: LayoutSearch, search.cpp
// - the time of generation: generation.h
// - rates corrected by steps that ran (`sherd tune`): correction.h
// - what a run needs and a machine has: fit.cpp; what makes it fit: changes.h, chosen by remedy.cpp

namespace sherd::planning {

/// The goal of a search: what the best layout is best at.
enum class Goal : std::uint8_t {
  time,            ///< a step
  tokens_per_day,  ///< the same per token, where the batch is open
  memory,          ///< of a device
  fewest_gpus      ///< the smallest world in which the model trains, and there the fastest
};

/// A layout of ranks, with all else that decides about time and memory and not about what is learned.
struct PlanLayout {
  int tensor = 1, context = 1, pipeline = 1, virtual_stages = 1, expert = 1;
  std::int64_t micro_batch = 1;
  int stage = 1;
  config::Schedule schedule = config::Schedule::automatic;
  Recompute recompute = Recompute::none;
  bool overlap_comm = false;  ///< gradients are reduced beside backward
  bool optimizer_on_host = false;
  int ranks = 1;

  /// "tensor 8 x context 1 x data 16 x pipeline 8 (3 chunks each)"
  std::string text(int data) const;
  /// The keys that say it.
  std::vector<std::pair<std::string, std::string>> keys() const;
  bool operator==(const PlanLayout&) const = default;
};

/// A layout with what it comes to.
struct Plan {
  PlanLayout layout;
  config::Config config;  ///< as it would run, batch sizes resolved
  engine::StepTime time;
  std::uint64_t memory = 0;       ///< of the fullest device, exactly; 0 where nobody has looked
  std::uint64_t host_memory = 0;  ///< of a machine, likewise
  std::string lacks{};            ///< what it has too little of, in words; empty: it fits
  double tokens_per_second() const;
  /// The keys that make a configuration this plan: its layout's, and the batch's.
  std::vector<std::pair<std::string, std::string>> keys() const;
};

struct SearchOptions {
  int ranks = 1;  ///< with Goal::fewest_gpus the most
  Goal goal = Goal::time;
  std::size_t top = 10;
  std::int64_t global_batch = 0;  ///< sequences, whatever the configuration says; 0: as it says
  /// Shows of each grid of ranks the best alone: its other micro-batches, chunks and tiers differ little.
  bool one_of_each_grid = true;
};

struct SearchResult {
  std::vector<Plan> best;     ///< the best first; empty: nothing fits
  std::size_t tried = 0;      ///< layouts that were priced
  std::size_t too_large = 0;  ///< of them, those that cannot fit
  std::string refused;        ///< why the first layout that a run would not accept is none; empty: all are
  std::string closest;        ///< where nothing fits: what the smallest lacks, in words
};

/// The best layouts of the GPT that a configuration describes. All that are possible are priced; of the best
/// the exact estimate decides whether they fit. Keys that the configuration's files give stay as they are:
/// `is_given` tells of a dotted key. Throws Error{config} where the batch is open, and what
/// engine::require_rates() throws.
SearchResult search(const Reparse& reparse, const std::function<bool(const std::string& key)>& is_given,
                    const config::Machine& machine, std::int64_t vocabulary, const SearchOptions& options);

/// The plan of a configuration as it is, whether it fits or not. Throws what engine::step_time() throws.
Plan plan_as_is(const config::Config& config, const config::Machine& machine, std::int64_t vocabulary,
                int ranks);

/// The capacity of a machine of that kind, for shortfalls().
MachineCapacity capacity_of(const config::Machine& machine);

}  // namespace sherd::planning
