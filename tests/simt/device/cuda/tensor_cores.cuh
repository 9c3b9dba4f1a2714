#pragma once

// Stands before src/device/cuda/tensor_cores.cuh, as launch.cuh does.

#include "simt/device/cuda/launch.cuh"
#include "simt/tensor_cores.h"

namespace sherd::device::SHERD_CUDA {

template <class T>
void mma_16x8x16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], T) {
  ::sherd::simt::multiply_fragments(d, a, b, [](std::uint16_t bits) {
    T x;
    x.bits = bits;
    return static_cast<float>(x);
  });
}

template <bool transposed, class T>
void load_matrices(unsigned (&to)[4], const T* row) {
  static_assert(sizeof(T) == 2);
  check_alignment(row, 16);
  std::uint64_t halves[2];
  std::memcpy(halves, row, sizeof halves);
  ::sherd::simt::deal_matrices(to, halves, transposed);
}

template <class T>
void start_copy(T* to, const T* from, bool there) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 16);
  check_alignment(to, sizeof(T));
  if (there) check_alignment(from, sizeof(T));
  ::sherd::simt::start_copy(to, there ? from : nullptr, sizeof(T));
}
inline void finish_copies() {
  ::sherd::simt::finish_copies();
}

template <class T>
unsigned narrow_pair(float low, float high) {
  return narrow<T>(low).bits | static_cast<unsigned>(narrow<T>(high).bits) << 16;
}

}  // namespace sherd::device::SHERD_CUDA
