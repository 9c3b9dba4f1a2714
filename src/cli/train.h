#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "cli/fit.h"
#include "config/config.h"
#include "engine/distributed.h"
#include "engine/token_data.h"

namespace sherd::cli {

/// A request to `sherd train`.
struct TrainRequest {
  config::Config config;  ///< as reparse({}) gives it; train() reads it
  Reparse reparse;        ///< the configuration, with a few more keys
  int ranks = 0;        ///< 0: the launcher's, or one local rank; a launcher that started others is an error
  std::string trace;    ///< file for the trace of all ranks; empty: none
  std::string metrics;  ///< JSONL file; empty: none
  std::string plot;     ///< SVG of the losses, drawn at the end; empty: none
  bool resume = false;  ///< from training.save_dir's latest checkpoint
  std::string resume_tag;        ///< another tag
  bool resume_or_start = false;  ///< `resume` where there is a checkpoint; train() finds out
};

/// Reads the configuration and trains to its training.steps, on local ranks or the launcher's, who tell each
/// other what one of them lacks. Returns 0, or the signal that stopped the run, which is saved and reported
/// then as at its end. Throws the first Error of any rank; Error{memory} before anything begins when the run
/// cannot fit.
int train(TrainRequest request);

}  // namespace sherd::cli
