#pragma once

#include <cstdint>

#include "optim/rules/list.h"

// Inner loops that are compiled once per instruction set: plain declarations only, see
// tensor/cpu/isa/tables.h.

namespace sherd {
enum class CpuIsa;
}

namespace sherd::optim {

enum GradIndex { grad_f32, grad_bf16, grad_f16, grad_count };
/// How weights are kept: fp32 alone, fp32 beside a bf16 or fp16 copy, or split into bf16 and 16 low bits.
enum MasterIndex { master_alone, master_and_bf16, master_and_f16, master_split, master_count };
enum MomentIndex { moment_f32, moment_bf16, moment_count };

/// A chunk of a span. `master` is null for split masters, `low` for others; `param` is null for fp32 alone.
struct SpanChunk {
  float* master;
  std::uint16_t* low;
  const void* grad;
  GradIndex grad_type;
  void* first;   ///< the rule's first state, if it has one
  void* second;  ///< its second
  void* param;
  std::int64_t n;
  float factor;  ///< gradients are multiplied by it
  bool stream;   ///< write the 16-bit copy past the caches (it is 64-byte aligned and will not be read soon)
  std::uint64_t noise_seed, noise_stream;  ///< bf16 moments: the key of the rounding bits
  std::int64_t first_element;              ///< bf16 moments: the first element's index in that stream
};

/// The largest magnitudes written, as bit patterns, which the caller compares with the limits of the formats.
struct Extremes {
  std::uint32_t weight = 0, moment = 0;
};

/// One pass of a rule, given as its struct, over a chunk.
using RuleLoop = Extremes (*)(const SpanChunk&, const void* rule);
struct RuleLoops {
  RuleLoop loop[master_count][moment_count];
};
/// In the order of Rules.
struct UpdateTable {
  RuleLoops rule[Rules::count];
};
/// optim/split_master.h over n elements.
struct SplitTable {
  void (*split)(const float* master, std::uint16_t* high, std::uint16_t* low, std::int64_t n);
  void (*join)(const std::uint16_t* high, const std::uint16_t* low, float* master, std::int64_t n);
};

/// A run that FrozenLamb takes.
struct FrozenRun {
  const void* source;  ///< makes the new momentum: agreed signs, or gradients
  float factor;        ///< the signs' scale, or the gradients' factor
  float* error;        ///< with signs: this replica's, of which `settled` has travelled
  float settled;
  float* momentum;
  const float *variance, *fresh_before, *weight;
  float* fresh;
  double *direction, *update;  ///< sums of squares
  std::int64_t n;
};

/// optim/one_bit.h over n elements, the signs of 64 to a word: bit i is 1 where element i is negative. Sums
/// of squares are those of blocks of 64.
struct OneBitTable {
  void (*compress[grad_count])(const void* grad, float factor, float beta, float one_minus_beta,
                               const float* momentum, float* error, std::uint64_t* signs, double* squares,
                               std::int64_t n);
  /// error += mean over `count` of ±scale; the signs of the result.
  void (*average)(const std::uint64_t* const* signs, const float* scales, int count, float* error,
                  std::uint64_t* result, double* squares, std::int64_t n);
  void (*settle)(float* error, float scale, std::int64_t n);
  /// One pass of OneBitAdam, given as its struct, by agreed momentum; a chunk's `grad` is its signs, its
  /// `factor` the scale.
  Extremes (*update[master_count])(const SpanChunk&, const void* rule, float* error, float settled);
  /// Refreshes the variance from gradients, by their type, or from agreed signs. Returns the largest ratio.
  float (*refresh[grad_count])(const FrozenLamb& rule, const FrozenRun&);
  float (*refresh_agreed)(const FrozenLamb& rule, const FrozenRun&);
};

/// Blocks with a smaller scale are zeros: it would have no reciprocal.
inline constexpr float least_scale = 0x1p-120f;

/// How loops go from codes of the dynamic map (optim/quantized.h) to values and back.
///
/// A magnitude of the map has a number k: 2^L + f for part f of the decade that is divided into 2^L parts, so
/// that the highest bit of k tells the decade, in which values are evenly spaced: base + slope·k. One more
/// power of two stands for 1. Signed codes are 127 ± k, where k = 0 stands for 0; unsigned ones are k - 1,
/// where k = 1 does.
///
/// Levels count what the magnitude of a number may be near: 0, the seven decades, 1.
struct DynamicMap {
  static constexpr int levels = 9;
  alignas(64) float base[16], slope[16];  ///< by the number of leading zeros of k, modulo 16
  /// By the exponent of fp32 modulo 32, from 2⁻³¹ to 1: where the level after that of its smallest number
  /// begins, if that is among its numbers; else NaN. The last four bits are the level of the smallest one.
  alignas(64) float next_level[32];
  /// By level: k of a magnitude is inverse·magnitude + offset, rounded to nearest, and at most `top`; k - 1,
  /// the code, where there are no signs. There a number above 0 whose code would be 0 takes 1.
  alignas(64) float inverse[16], offset[16], top[16];
  float begin[levels];  ///< where each level does
  std::int32_t middle;  ///< the code of k = 0
  bool has_signs;
  alignas(64) float values[256];
};

/// optim/quantized.h over n elements, the first of which begins a block.
struct QuantizedTable {
  /// Without signs, and with them.
  void (*quantize[2])(const DynamicMap& map, const float* values, std::uint8_t* codes, float* scales,
                      std::int64_t n);
  /// One pass of Adam, given as its struct, over codes of its states.
  Extremes (*update[master_count])(const SpanChunk&, const void* rule, const DynamicMap& signs,
                                   const DynamicMap& sizes, float* first_scales, float* second_scales);
};

namespace portable {
extern const UpdateTable update_table;
extern const SplitTable split_table;
extern const OneBitTable one_bit_table;
extern const QuantizedTable quantized_table;
}  // namespace portable
namespace avx2 {
extern const UpdateTable update_table;
extern const SplitTable split_table;
extern const OneBitTable one_bit_table;
extern const QuantizedTable quantized_table;
}  // namespace avx2
namespace avx512 {
extern const UpdateTable update_table;
extern const SplitTable split_table;
extern const OneBitTable one_bit_table;
extern const QuantizedTable quantized_table;
}  // namespace avx512

}  // namespace sherd::optim
