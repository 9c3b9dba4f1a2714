#pragma once

#include <cstddef>

#include "device/device.h"
#include "device/stream.h"

// The innermost namespace of everything that launches kernels. Sources compiled for the emulator call it
// `simt`, so that a program may hold both.
#ifndef SHERD_CUDA
#define SHERD_CUDA cuda
#endif

namespace sherd::device::SHERD_CUDA {

/// Where kernels run and what they may know of it. Plain, so that sources which launch kernels can also run
/// on the emulator (tests/simt), whose device is a CPU's.
struct Target {
  Device& device;                 ///< gives the memory; outlives the target
  StreamQueue* stream = nullptr;  ///< the compute stream's; outlives the target. The emulator has none
  int processors = 1;             ///< streaming multiprocessors: how many blocks make a full grid
  std::size_t shared_per_block = 48 << 10;  ///< bytes of shared memory that a block may ask for
  int ordinal = 0;                          ///< the GPU's number among those that the driver shows
  int capability = 90;                      ///< compute capability: 10 times the major number, and the minor
};

}  // namespace sherd::device::SHERD_CUDA
