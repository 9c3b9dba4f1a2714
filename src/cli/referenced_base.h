#pragma once

#include <filesystem>
#include <string>

#include "engine/checkpoint/manifest.h"
#include "engine/checkpoint/referenced_base.h"

// Checkpoints that do not hold the weights beside which an adapter is trained (training.adapter.save_base).
namespace sherd::cli {

/// The files of weights to begin with, `folder`, Hugging Face's or checkpoints, with their sizes and without
/// checksums. Of a checkpoint that refers to a base itself they are the base's, checksums and all.
engine::BaseReference base_files(const std::string& folder);

/// engine::BaseOpener: the weights as a run began with them.
engine::OpenedBase open_base(const engine::CheckpointReader& reader);

}  // namespace sherd::cli
