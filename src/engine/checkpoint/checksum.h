#pragma once

#include <filesystem>

#include "engine/checkpoint/manifest.h"

namespace sherd::engine {

/// Reads the whole file. Throws Error{io}.
FileChecksum checksum_file(const std::filesystem::path& path);

}  // namespace sherd::engine
