#pragma once

#include <span>

#include "config/machine.h"
#include "engine/estimate/step_time.h"

namespace sherd::planning {

/// A step that was predicted, and then ran.
struct MeasuredStep {
  engine::StepTime predicted;
  double seconds = 0;
};

/// How much longer than by a machine's rates things take there: 1.1 is a tenth longer.
struct Correction {
  double kernels = 1;   ///< and the bubble of pipelines, which waits for them
  double exchange = 1;  ///< all that travels between ranks
  double update = 1;    ///< the optimizer, where its states are
};

/// The correction with which predictions are nearest to what was measured: least squares of errors as shares
/// of the predictions.
/// A part that takes little of these steps, or the same share of each, says little about its own rates: a
/// weak pull towards 1 (ridge regression, Hoerl and Kennard 1970) keeps such a factor there. Without steps
/// all are 1.
Correction correction_of(std::span<const MeasuredStep> steps);

/// The machine with rates that are slower by the correction's factors. Peaks, by which MFU counts, stay, so
/// that no share of them gets above 1.
config::Machine corrected(config::Machine machine, const Correction& by);

}  // namespace sherd::planning
