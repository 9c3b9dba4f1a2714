#pragma once

#include <array>
#include <cstdint>

#include "device/cuda/target.h"

namespace sherd::tensor::SHERD_CUDA {

/// The errors that a kernel can find in the data that it was given.
enum class DataError : std::uint8_t { embedding_id, loss_target };
inline constexpr int data_error_kinds = 2;

/// Where kernels leave word of one kind of error: the position (upper half) and the value (lower half) of the
/// first element that was wrong, and the limit that it broke. Written by raise() of tensor/cuda/families.cuh.
struct DataErrorSlot {
  unsigned long long first;  ///< none_wrong until something is
  unsigned long long limit;
};
inline constexpr unsigned long long none_wrong = ~0ull;

/// The slots of one device, in memory of the host that kernels write to only when something is wrong, so that
/// looking costs nothing.
class DataErrors {
 public:
  explicit DataErrors(device::Device& device);
  /// For kernels.
  DataErrorSlot* slot(DataError kind) const { return slots_ + static_cast<int>(kind); }
  /// Throws Error{data} for an error left by work that has finished, and forgets it.
  void check();

 private:
  device::Storage memory_;
  DataErrorSlot* slots_;
};

}  // namespace sherd::tensor::SHERD_CUDA
