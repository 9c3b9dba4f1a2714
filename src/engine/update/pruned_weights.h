#pragma once

#include "engine/update/pass_runner.h"

namespace sherd::engine {

/// Makes a pass that moves weights over a view, or over `most` elements of it after each other, so that
/// weights that are pruned (autograd::Parameter::pruned) are so afterwards, and no others. Gradients of the
/// view are used up.
void update_pruned(const UpdateView& view, std::int64_t most, const PassRunner::Work& work,
                   device::Device& device, optim::FiniteCheck& check);

}  // namespace sherd::engine
