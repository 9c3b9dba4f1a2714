#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

namespace sherd {

/// All bytes of a file. Throws Error{io} where it cannot be read, Error{data} where it has more than `most`.
std::string read_file(const std::filesystem::path& path, std::uintmax_t most = std::uintmax_t{256} << 20);

}  // namespace sherd
