#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "config/config.h"
#include "engine/checkpoint/checkpoint.h"
#include "nn/module.h"

namespace sherd::engine {

/// Logical shapes by name.
using ParameterShapes = std::map<std::string, std::vector<std::int64_t>>;
ParameterShapes shapes_of(const std::vector<nn::ParameterPtr>& parameters);

/// Throws Error{data} unless the checkpoint has exactly these parameters, in their logical shapes:
/// naming those that differ and, where `config` made the model, the keys of its `model` section that differ
/// from the saved run's. `config` may be null. `part`: which of the checkpoint's are meant, by name; null:
/// all.
void require_same_model(const CheckpointReader& reader, const ParameterShapes& shapes,
                        const config::Config* config,
                        const std::function<bool(const std::string&)>& part = nullptr);

}  // namespace sherd::engine
