#pragma once

#include <gtest/gtest.h>

#include <cstdlib>

#include "device/cuda.h"

/// At the start of a test that needs a GPU: skips it, with the reason, where there is none.
#define SHERD_NEEDS_GPU()                                                   \
  if (const auto status = ::sherd::device::cuda_status(); !status.usable()) \
  GTEST_SKIP() << "no GPU: " << status.why_not

namespace sherd::test {

/// Whether the GPU is played by the processor (emulated_gpu/), some ten thousand times slower.
inline bool on_emulated_gpu() {
  const device::CudaStatus status = device::cuda_status();
  return status.usable() && status.gpus.front().name == "Emulated GPU";
}

/// Whether this is a run in which tests of kernels take a GPU in place of the emulator (sherd_tests_on_gpu()
/// in tests/CMakeLists.txt).
inline bool gpu_run() {
  return std::getenv("SHERD_TEST_GPU") != nullptr;
}

/// Whether tests of kernels leave out the emulator, whose are the same for every instruction set of the
/// processor (scripts/test, as on AVX2).
inline bool cpu_run() {
  return std::getenv("SHERD_TEST_CPU") != nullptr;
}

/// The first GPU, or nothing, and then the running test is marked as skipped.
inline std::shared_ptr<device::Accelerator> first_gpu_or_skip() {
  const auto skip = [] { SHERD_NEEDS_GPU(); };
  skip();
  const device::CudaStatus status = device::cuda_status();
  if (!status.usable()) return nullptr;
  return device::make_cuda_device({.ordinal = status.gpus.front().ordinal});
}

}  // namespace sherd::test
