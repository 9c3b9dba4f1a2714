#pragma once

#include "device/cuda/lazy_library.h"

// The functions of NCCL that Sherd calls, loaded as it is called. Included by sources, behind <nccl.h>;
// tests/comm/nccl/fake has another in its place, for the NCCL that tests play.

namespace sherd::comm {

inline device::cuda::LazyLibrary nccl_library({.title = "NCCL",
                                               .stem = "nccl",
                                               .major = NCCL_MAJOR,
                                               .folder = SHERD_NCCL_FOLDER,
                                               .package = "NVIDIA's package libnccl2"});

SHERD_LAZY_FUNCTION(nccl_library, ncclGetVersion);
SHERD_LAZY_FUNCTION(nccl_library, ncclGetErrorString);
SHERD_LAZY_FUNCTION(nccl_library, ncclGetLastError);
SHERD_LAZY_FUNCTION(nccl_library, ncclGetUniqueId);
SHERD_LAZY_FUNCTION(nccl_library, ncclCommInitRankConfig);
SHERD_LAZY_FUNCTION(nccl_library, ncclCommSplit);
SHERD_LAZY_FUNCTION(nccl_library, ncclCommGetAsyncError);
SHERD_LAZY_FUNCTION(nccl_library, ncclCommFinalize);
SHERD_LAZY_FUNCTION(nccl_library, ncclCommDestroy);
SHERD_LAZY_FUNCTION(nccl_library, ncclCommAbort);
SHERD_LAZY_FUNCTION(nccl_library, ncclGroupStart);
SHERD_LAZY_FUNCTION(nccl_library, ncclGroupEnd);
SHERD_LAZY_FUNCTION(nccl_library, ncclAllGather);
SHERD_LAZY_FUNCTION(nccl_library, ncclBroadcast);
SHERD_LAZY_FUNCTION(nccl_library, ncclReduceScatter);
SHERD_LAZY_FUNCTION(nccl_library, ncclAllReduce);
SHERD_LAZY_FUNCTION(nccl_library, ncclSend);
SHERD_LAZY_FUNCTION(nccl_library, ncclRecv);

}  // namespace sherd::comm
