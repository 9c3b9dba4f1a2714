#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "support/temp_folder.h"

namespace sherd::testing {

/// Puts the tensors of a checkpoint's folder together, whole, by KIND.PARAMETER: an oracle that shares
/// nothing with the library, neither its reader of safetensors nor its arithmetic of slices. Elements that no
/// file holds are 0xcc; of those in blocks their values, in fp32, which but for int8 the library reads
/// (tests/tensor/stored_format_test.cpp has its values from others).
std::map<std::string, std::vector<std::byte>> whole_tensors(const std::filesystem::path& folder);

}  // namespace sherd::testing
