#pragma once

#include "device/cuda/lazy_library.h"
#include "device/cuda/target.h"

// The functions of cuBLASLt that Sherd calls, loaded as it is called. Included by sources, behind
// <cublasLt.h>; tests/simt has another in its place, for products of the emulated GPU.

namespace sherd::tensor::SHERD_CUDA {

inline device::cuda::LazyLibrary cublas_lt_library({.title = "cuBLASLt",
                                                    .stem = "cublasLt",
                                                    .major = CUBLAS_VER_MAJOR,
                                                    .folder = SHERD_CUBLASLT_FOLDER,
                                                    .package = "the CUDA toolkit's cuBLAS"});

SHERD_LAZY_FUNCTION(cublas_lt_library, cublasLtGetVersion);
SHERD_LAZY_FUNCTION(cublas_lt_library, cublasLtGetStatusName);
SHERD_LAZY_FUNCTION(cublas_lt_library, cublasLtGetStatusString);
SHERD_LAZY_FUNCTION(cublas_lt_library, cublasLtCreate);
SHERD_LAZY_FUNCTION(cublas_lt_library, cublasLtDestroy);
SHERD_LAZY_FUNCTION(cublas_lt_library, cublasLtMatrixLayoutCreate);
SHERD_LAZY_FUNCTION(cublas_lt_library, cublasLtMatrixLayoutDestroy);
SHERD_LAZY_FUNCTION(cublas_lt_library, cublasLtMatmulDescCreate);
SHERD_LAZY_FUNCTION(cublas_lt_library, cublasLtMatmulDescDestroy);
SHERD_LAZY_FUNCTION(cublas_lt_library, cublasLtMatmulDescSetAttribute);
SHERD_LAZY_FUNCTION(cublas_lt_library, cublasLtMatmulPreferenceCreate);
SHERD_LAZY_FUNCTION(cublas_lt_library, cublasLtMatmulPreferenceDestroy);
SHERD_LAZY_FUNCTION(cublas_lt_library, cublasLtMatmulPreferenceSetAttribute);
SHERD_LAZY_FUNCTION(cublas_lt_library, cublasLtMatmulAlgoGetHeuristic);
SHERD_LAZY_FUNCTION(cublas_lt_library, cublasLtMatmul);

}  // namespace sherd::tensor::SHERD_CUDA
