#pragma once

#include <cstddef>
#include <cstdint>

/// The arithmetic of reductions, compiled once per instruction set (cmake/SherdRoom.cmake). Plain types only,
/// so that no inline function of a shared header is compiled with instructions that the machine may lack.
namespace sherd::comm {

/// Element types in the order of sherd::DType.
enum class Element : std::uint8_t { f32, bf16, f16, f64, i32, i64, u16, u8 };
enum class Combine : std::uint8_t { sum, max, min };

/// outs[k][i] (+)= round(factor · combine over r of sources[r][i]) for i in [begin, end), ranks in order.
struct ReduceArgs {
  const void* const* sources = nullptr;
  int ranks = 0;
  void* const* outs = nullptr;  ///< each receives the same values; may be among the sources
  int outputs = 0;
  std::int64_t begin = 0, end = 0;
  Element in = Element::f32, rounding = Element::f32, out = Element::f32;
  Combine combine = Combine::sum;
  double factor = 1;
  bool accumulate = false;  ///< outs[0] is read and added; only with one output
  /// Write past the caches: for one output that is not among the sources, is not added to, and is too large
  /// to be found in them later. Sums of fp32, bf16 and fp16 only.
  bool stream = false;
};

/// copy_past_caches(): memcpy for what is too large to be found in the caches later.
namespace portable {
void reduce(const ReduceArgs& args);
void copy_past_caches(void* to, const void* from, std::size_t bytes);
}  // namespace portable
namespace avx2 {
void reduce(const ReduceArgs& args);
void copy_past_caches(void* to, const void* from, std::size_t bytes);
}  // namespace avx2
namespace avx512 {
void reduce(const ReduceArgs& args);
void copy_past_caches(void* to, const void* from, std::size_t bytes);
}  // namespace avx512

}  // namespace sherd::comm
