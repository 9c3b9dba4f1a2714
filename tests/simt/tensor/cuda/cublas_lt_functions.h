#pragma once

// Stands before src/tensor/cuda/cublas_lt_functions.h on the include path of the emulated GPU: there
// cuBLASLt's functions are linked, those of tests/emulated_gpu/cublas_lt.cpp, and none is loaded.
