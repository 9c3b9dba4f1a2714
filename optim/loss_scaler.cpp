#include "optim/loss_scaler.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>

#include "base/error.h"

namespace sherd::optim {

LossScaler::LossScaler(const config::LossScaling& settings) : settings_(settings) {
  state_.scale = settings.initial_scale();
  state_.hysteresis = settings.hysteresis;
}

void LossScaler::update(bool overflow) {
  if (settings_.dynamic()) overflow ? on_overflow() : on_clean_step();
  if (overflow) state_.last_overflow = state_.iteration;
  ++state_.iteration;
}

void LossScaler::on_overflow() {
  if (settings_.hysteresis > 1 && state_.hysteresis > 1) {
    --state_.hysteresis;
    return;
  }
  if (state_.scale <= settings_.min_loss_scale)
    fail(ErrorKind::numerics, "fp16 gradients overflow although the loss scale is at its minimum ",
         state_.scale,
         ": training has diverged; lower the learning rate, use bf16, or resume from an earlier checkpoint");
  state_.scale = std::max(state_.scale / 2, settings_.min_loss_scale);
}

void LossScaler::on_clean_step() {
  if (settings_.consecutive_hysteresis) state_.hysteresis = settings_.hysteresis;
  const std::int64_t clean = state_.iteration - state_.last_overflow - 1;
  if (clean <= 0 || clean % settings_.loss_scale_window != 0) return;
  state_.hysteresis = settings_.hysteresis;
  state_.scale *= 2;
}

std::string LossScaler::save() const {
  char line[160];
  std::snprintf(line, sizeof line, "scale=%a iteration=%" PRId64 " last_overflow=%" PRId64 " hysteresis=%d",
                state_.scale, state_.iteration, state_.last_overflow, state_.hysteresis);
  return line;
}

void LossScaler::restore(const std::string& saved) {
  State state;
  int end = 0;
  const int read =
      std::sscanf(saved.c_str(), "scale=%la iteration=%" SCNd64 " last_overflow=%" SCNd64 " hysteresis=%d%n",
                  &state.scale, &state.iteration, &state.last_overflow, &state.hysteresis, &end);
  const bool good = read == 4 && static_cast<std::size_t>(end) == saved.size() && state.scale > 0 &&
                    std::isfinite(state.scale) && state.iteration >= 0 &&
                    state.last_overflow < state.iteration && state.hysteresis >= 1;
  if (!good)
    fail(ErrorKind::data, "\"", saved,
         "\" is no saved loss scaler; the checkpoint is damaged or of another program");
  state_ = state;
}

}  // namespace sherd::optim
