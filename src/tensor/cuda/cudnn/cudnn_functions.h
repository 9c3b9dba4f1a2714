#pragma once

#include "device/cuda/lazy_library.h"
#include "device/cuda/target.h"

// The functions of cuDNN that Sherd calls, loaded as it is called. Included by sources, behind
// <cudnn_graph.h>.

namespace sherd::tensor::SHERD_CUDA {

inline device::cuda::LazyLibrary cudnn_library({.title = "cuDNN",
                                                .stem = "cudnn",
                                                .major = CUDNN_MAJOR,
                                                .folder = SHERD_CUDNN_FOLDER,
                                                .package = "NVIDIA's cuDNN 9"});

SHERD_LAZY_FUNCTION(cudnn_library, cudnnGetVersion);
SHERD_LAZY_FUNCTION(cudnn_library, cudnnGetErrorString);
SHERD_LAZY_FUNCTION(cudnn_library, cudnnGetLastErrorString);
SHERD_LAZY_FUNCTION(cudnn_library, cudnnCreate);
SHERD_LAZY_FUNCTION(cudnn_library, cudnnDestroy);
SHERD_LAZY_FUNCTION(cudnn_library, cudnnSetStream);
SHERD_LAZY_FUNCTION(cudnn_library, cudnnBackendCreateDescriptor);
SHERD_LAZY_FUNCTION(cudnn_library, cudnnBackendDestroyDescriptor);
SHERD_LAZY_FUNCTION(cudnn_library, cudnnBackendSetAttribute);
SHERD_LAZY_FUNCTION(cudnn_library, cudnnBackendGetAttribute);
SHERD_LAZY_FUNCTION(cudnn_library, cudnnBackendFinalize);
SHERD_LAZY_FUNCTION(cudnn_library, cudnnBackendExecute);

}  // namespace sherd::tensor::SHERD_CUDA
