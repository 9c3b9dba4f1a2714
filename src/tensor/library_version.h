#pragma once

#include <cstddef>
#include <string>

namespace sherd::tensor {

/// Who makes the CPU's matrix products, with the library as loaded now: "own tiles; bf16 on AMX: oneDNN 2.6.3
/// (OpenMP)".
std::string matmul_library();

/// The cuDNN that this build was compiled for, e.g. "9.13.0", and the one that the process has loaded where
/// that is another: "9.13.0 (9.14.0 loaded)". Empty in builds without cuDNN.
std::string cudnn_version();
/// The version that the loaded one says of itself, e.g. 91300; 0 where the process has loaded none.
std::size_t loaded_cudnn();

}  // namespace sherd::tensor
