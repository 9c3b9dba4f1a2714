#pragma once

#include <memory>

#include "simt/simt.h"
#include "tensor/kernels.h"

namespace sherd::test {

/// The CUDA kernels on the emulator, over the memory of a CPU device, which must outlive them.
std::unique_ptr<tensor::Kernels> make_emulated_kernels(device::Device& device);

}  // namespace sherd::test
