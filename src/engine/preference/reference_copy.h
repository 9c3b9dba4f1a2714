#pragma once

#include <memory>

#include "engine/engine.h"

namespace sherd::engine {

/// A second engine of this rank, with `model`, which it freezes: it is sharded and offloaded as the first,
/// has neither gradients nor optimizer, and files of its own on NVMe. `groups`: the first one's. Collective.
std::unique_ptr<Engine> make_reference_copy(Engine& first, std::shared_ptr<nn::Model> model,
                                            std::shared_ptr<comm::ProcessGroups> groups);

/// Gives `copy` the weights of `source`, from which `first` begins, to the same bits: those that train there
/// are rounded to bf16 as its fp32 masters are. Collective.
void load_reference_copy(Engine& copy, Engine& first, nn::WeightSource& source);

}  // namespace sherd::engine
