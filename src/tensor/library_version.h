#pragma once

#include <string>

namespace sherd::tensor {

/// The library behind the CPU's matrix products as loaded now, e.g. "oneDNN 2.6.3 (OpenMP)".
std::string matmul_library();

}  // namespace sherd::tensor
