#pragma once

#include "engine/engine.h"

namespace sherd::engine {

/// Rank 0's lines of a step that steps_per_print asks for: losses and rates, and with wall_clock_breakdown
/// and memory_breakdown the times of phases and what the device holds.
void log_step(const Engine& engine);

}  // namespace sherd::engine
