#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cli/verification/course.h"
#include "config/config.h"
#include "engine/checkpoint/compare.h"
#include "engine/checkpoint/manifest.h"
#include "engine/distributed.h"
#include "engine/token_data.h"
#include "planning/fit.h"

namespace sherd::cli {

/// An interval of a run's steps, with what it takes to run them again.
struct Replay {
  Interval interval;
  engine::Manifest manifest;  ///< of the checkpoint where it ends, whose run trained these steps
  config::Config saved;       ///< that run's
  config::Config config;      ///< as reparse({}) gives it: that one, on the ranks and the machine here
  planning::Reparse reparse;
  int ranks = 1;
  bool announced = true;  ///< rank 0 prints what is promised, before it begins
};

/// Reads what the interval takes. `ranks`: 0 for as many as saved. `overrides`: of keys that decide about no
/// number. Throws Error{usage} for others, and Error{config} for ranks that cannot share the batch out.
Replay prepare_replay(const Interval& interval, const engine::RecordedSteps& record, int ranks,
                      const std::vector<std::string>& overrides);

/// A step that did not go as it is recorded.
struct StepDifference {
  std::int64_t step = 0;
  std::string what;            ///< "loss", "gradient norm", …
  std::string recorded, here;  ///< values
};

/// The result of replaying an interval: the same on all ranks, but for texts, which rank 0 has.
struct ReplayReport {
  /// Why bits are not promised to be equal; none: they are.
  std::vector<std::string> missing;
  std::string unread;  ///< why a checkpoint cannot be read, so that nothing was compared; empty: they can
  std::vector<std::int64_t> lost;  ///< steps whose lines the record should have
  /// The record has steps of the interval, and not the start of the run that saved its end: whose steps they
  /// are is not known, and they are not compared.
  bool start_lost = false;
  std::int64_t steps = 0, compared_steps = 0;  ///< replayed; of these, how many the record knows
  std::optional<StepDifference> step;          ///< the first that differs
  std::string data;                            ///< how the dataset differs from that of the run; empty: not
  engine::Comparison states;
  double loss_error = 0, norm_error = 0;  ///< the largest, relative

  /// Whether all of it could be compared.
  bool is_whole() const { return unread.empty() && lost.empty() && !start_lost; }
  bool agrees() const { return !step && data.empty() && states.agrees(); }
  /// Whether it is as near as runs come to each other that compute the same in another order.
  bool agrees_nearly(DType compute) const;
};

/// Trains the steps of the interval again and compares them, and what they end with, with what was saved.
/// Writes nothing into the run's folder. Collective. A checkpoint that is damaged is the report's `unread`;
/// for one that was removed meanwhile this throws Error{io}.
ReplayReport run_replay(const DistributedPtr& dist, const Replay& replay, const engine::RecordedSteps& record,
                        const std::shared_ptr<const engine::TokenData>& data);

}  // namespace sherd::cli
