#pragma once

// The part of the door from kernels to CUDA (launch.cuh) that needs sm_80 or newer: products by tensor cores,
// and what brings their operands.

#include "device/cuda/launch.cuh"

namespace sherd::device::SHERD_CUDA {

/// d[16, 8] += a[16, 16]·b[16, 8], of elements bf16 or f16, by a warp whose lanes all take part. Each holds
/// the elements that the PTX ISA says under "Matrix fragments for mma.m16n8k16 with floating point type".
__device__ inline void mma_16x8x16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], bf16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ inline void mma_16x8x16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2], f16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/// Four 8 x 8 matrices of 16-bit elements from shared memory (ldmatrix.x4). Lane 8·i + j gives the address of
/// the eight elements that are row j of matrix i, aligned to 16 bytes; to[i] becomes the lane's pair of
/// matrix i, or of what that is with rows and columns exchanged.
template <bool transposed, class T>
__device__ inline void load_matrices(unsigned (&to)[4], const T* row) {
  static_assert(sizeof(T) == 2);
  const auto at = static_cast<unsigned>(__cvta_generic_to_shared(row));
  if constexpr (transposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(at)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(at)
                 : "memory");
}

/// Starts to copy one T of 4 or 16 bytes from global to shared memory, or to put zeros there unless `there`;
/// `from` is then not read. Who has started copies finds them done after finish_copies(), others after a
/// barrier behind that.
template <class T>
__device__ inline void start_copy(T* to, const T* from, bool there) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 16);
  const auto at = static_cast<unsigned>(__cvta_generic_to_shared(to));
  const unsigned bytes = there ? sizeof(T) : 0;
  if constexpr (sizeof(T) == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(at), "l"(__cvta_generic_to_global(from)), "r"(bytes)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                 :
                 : "r"(at), "l"(__cvta_generic_to_global(from)), "r"(bytes)
                 : "memory");
}
__device__ inline void finish_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

/// Two numbers rounded to 16 bits, to nearest, ties to even; `low` in the lower half.
template <class T>
__device__ inline unsigned narrow_pair(float low, float high) {
  unsigned pair;
  if constexpr (std::is_same_v<T, bf16>)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

}  // namespace sherd::device::SHERD_CUDA
