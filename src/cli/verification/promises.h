#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "comm/grid.h"
#include "config/config.h"
#include "engine/checkpoint/manifest.h"
#include "engine/report/step_record.h"

namespace sherd::cli {

/// All that decides about the bits of a run, as far as its configuration tells ("Equal to the bit",
/// docs/guarantees.md).
struct RunShape {
  config::Config config;
  std::int64_t tensor = 1, context = 1, data = 1, pipeline = 1, expert = 1, replicas = 1;
  std::int64_t accumulation = 1;  ///< micro-batches of a data rank in a step

  /// The shape of the run that saved, whose configuration this is.
  static RunShape of(const config::Config& config, const engine::Manifest& saved);
  /// The shape of a run on `ranks`. Throws Error{config} for ranks that cannot share the batch out.
  static RunShape of(const config::Config& config, int ranks);
};

/// Why a run of the second shape need not have the bits of the first: which promise is missing, a line each.
/// None: it has them.
std::vector<std::string> missing_promises(const RunShape& saved, const RunShape& here);

/// The same by the machines and libraries that the runs compute on.
std::vector<std::string> missing_promises(const engine::RunFacts& saved, const engine::RunFacts& here);

}  // namespace sherd::cli
