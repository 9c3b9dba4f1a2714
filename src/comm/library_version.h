#pragma once

#include <string>

namespace sherd::comm {

/// The NCCL that this build was compiled for, e.g. "2.28.3", and the one that the process has loaded where
/// that is another: "2.28.3 (2.29.1 loaded)". Empty in builds without NCCL.
std::string nccl_version();

}  // namespace sherd::comm
