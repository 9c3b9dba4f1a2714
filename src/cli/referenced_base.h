#pragma once

#include <filesystem>
#include <string>

#include "engine/checkpoint/frozen/referenced_base.h"
#include "engine/checkpoint/manifest.h"

// Checkpoints that do not hold the weights beside which an adapter is trained (training.adapter.save_base).
namespace sherd::cli {

/// The files of weights to begin with, `folder`, Hugging Face's or a checkpoint, with their sizes; those
/// whose checksum is 0 have none yet. A checkpoint may refer to a base itself.
engine::BaseReference base_files(const std::string& folder);

/// engine::BaseOpener: the weights as a run began with them.
engine::OpenedBase open_base(const engine::CheckpointReader& reader);

}  // namespace sherd::cli
