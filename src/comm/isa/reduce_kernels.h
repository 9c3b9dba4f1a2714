#pragma once

#include <cstddef>
#include <cstdint>

/// The arithmetic of reductions, compiled once per instruction set (cmake/SherdRoom.cmake). Plain types only,
/// so that no inline function of a shared header is compiled with instructions that the machine may lack.
namespace sherd::comm {

/// Element types in the order of sherd::DType.
enum class Element : std::uint8_t { f32, bf16, f16, f64, i32, i64, u16, u8 };
enum class Combine : std::uint8_t { sum, max, min };

/// outs[k][i] = factor · (onto[i] + Σ_r round(sources[r][i])) for i in [begin, end), ranks in order, rounded
/// once to `out`; without `onto` the sum begins with the first source. The extremes take no `onto`.
struct ReduceArgs {
  const void* const* sources = nullptr;
  int ranks = 0;
  void* const* outs = nullptr;  ///< each receives the same values; may be among the sources, and `onto`
  int outputs = 0;
  std::int64_t begin = 0, end = 0;
  const void* onto = nullptr;  ///< the sum begins with it; may be null
  Element in = Element::f32, rounding = Element::f32, out = Element::f32;
  Element onto_type = Element::f32;  ///< fp32 or `out`
  Combine combine = Combine::sum;
  double factor = 1;
  /// Write past the caches: for one output that is not among the sources, is not `onto`, and is too large
  /// to be found in them later. Sums of fp32, bf16 and fp16 only.
  bool stream = false;
};

/// copy_past_caches() is a memcpy of memory that is too large to be found in the caches later.
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
