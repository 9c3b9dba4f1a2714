#pragma once

#include <string>
#include <vector>

#include "planning/fit.h"

namespace sherd::cli {

/// Everything that `sherd estimate` has to say.
struct EstimateReport {
  config::Config config;
  std::int64_t parameters = 0;
  planning::World world;
  planning::MachineCapacity machine;
  int rank = 0;                     ///< the one that is looked at
  int stage = 0;                    ///< the pipeline stage of that rank
  planning::StageEstimates stages;  ///< for the ranks with its place in each stage
  const engine::Estimate& estimate() const { return stages[static_cast<std::size_t>(stage)]; }
  std::vector<planning::Shortfall> missing;  ///< empty: it fits
  planning::Remedy remedy;                   ///< where it does not fit; without keys when none helps
  config::Machine rates;                     ///< by which remedies are priced
  double step_seconds = 0;                   ///< by these rates; 0: nobody named a machine, or:
  std::string not_priced;                    ///< why they tell no time
};

/// For people: a table by tier and category, sums for a machine and the whole world, what there is, and what
/// to change.
std::string text_of(const EstimateReport& report);
/// The same as one JSON object; bytes as numbers.
std::string json_of(const EstimateReport& report);

}  // namespace sherd::cli
