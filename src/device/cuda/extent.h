#pragma once

#include <vector_types.h>

#include "device/stream.h"

namespace sherd::device::cuda {

inline dim3 dim3_of(const Extent3& extent) {
  return {extent.x, extent.y, extent.z};
}

}  // namespace sherd::device::cuda
