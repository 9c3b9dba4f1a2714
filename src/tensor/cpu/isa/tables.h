#pragma once

#include <cstdint>

// Inner loops that are compiled once per instruction set. This header is included by the sources built with
// AVX flags and so holds plain declarations only.

namespace sherd {
enum class CpuIsa;
}

namespace sherd::tensor::cpu {

using Count = std::int64_t;

/// Index of a storage type in the tables below. Arithmetic is fp32 for all three; fp64 has loops of its own.
enum StorageIndex { storage_f32, storage_bf16, storage_f16, storage_count };

using Unary = void(const void* x, void* out, Count n);
using Binary = void(const void* a, const void* b, void* out, Count n);

/// Loops over n elements of one storage type. Unless typed, pointers are to elements of that type. An output
/// may be one of the inputs.
struct ElementwiseOps {
  Binary *add, *subtract, *multiply, *divide;
  void (*scale)(const void* x, float factor, void* out, Count n);
  /// dx = (x - y)·factor
  void (*scaled_difference)(const void* x, const void* y, float factor, void* dx, Count n);
  Unary *gelu_tanh, *gelu_erf, *sigmoid, *exp, *log, *tanh, *relu;
  /// From x and dy.
  Binary *gelu_tanh_backward, *gelu_erf_backward, *sigmoid_backward, *exp_backward, *log_backward;
  Binary *tanh_backward, *relu_backward;  ///< from y and dy
  /// From gate and up, by tensor::Glu.
  Binary* glu[4];
  void (*glu_backward[4])(const void* gate, const void* up, const void* dy, void* dgate, void* dup, Count n);
  /// max(x, 0) - x·t + log(1 + e^-|x|), and its derivative by x, sigmoid(x) - t, from x and t.
  Binary *logistic_loss, *logistic_slope;
  /// Rotates one head of 2·half elements, pairs (i, i + half), by direction (1 or -1) times the angles behind
  /// cosine[half] and sine[half].
  void (*rotate)(const void* x, const float* cosine, const float* sine, float direction, void* out,
                 Count half);
};

/// Elements that are not finite, and that became zero and were not.
struct Fp8Lost {
  Count not_finite = 0, to_zero = 0;
};

/// Conversions to and from fp32 and sums that follow from them.
struct ConvertOps {
  void (*load)(const void* x, float* out, Count n);
  void (*store)(const float* x, void* out, Count n);
  void (*add_to)(const void* x, float* sum, Count n);      ///< sum += x
  void (*accumulate)(const float* x, void* out, Count n);  ///< out = out + x
  /// sum = sum·keep + x·factor
  void (*blend)(const void* x, float factor, float* sum, float keep, Count n);
  /// sums[i] = the sum in double of the squares of elements [64·i, 64·i + 64)
  void (*block_squares)(const void* x, double* sums, Count n);
  /// The sum of (x - y)², over lanes of double in a fixed order
  double (*squared_difference)(const void* x, const void* y, Count n);

  // The values of so many blocks of tensor/formats/stored_code.h; [true]: past the caches, to where the
  // largest register may be stored.
  void (*from_int8[2])(const void* blocks, void* out, Count count);
  void (*from_stored_fp8[2])(const void* blocks, void* out, Count count);
  void (*from_mxfp4[2])(const void* blocks, void* out, Count count);
  /// Blocks of 64 codes, two in a byte, the first one in its upper half. A code stands for a value of the
  /// table, times the block's scale, fp32. Strides: bytes from one block to the next.
  void (*from_four_bits[2])(const float* table, const std::uint8_t* codes, Count stride, const void* scales,
                            Count scale_stride, void* out, Count count);

  // FP8 (tensor/formats/fp8_code.h).
  /// The bits of the largest finite magnitude.
  std::uint32_t (*largest)(const void* x, Count n);
  /// The codes of x·inverse, E4M3's and E5M2's, and how many elements were lost.
  void (*to_fp8[2])(const void* x, float inverse, std::uint8_t* codes, Count n, Fp8Lost& lost);
  void (*from_fp8[2])(const std::uint8_t* codes, float scale, void* out, Count n);
};

/// One row of n elements. `weight` and `bias` may be null (1 and 0), so may the outputs of the gradients.
struct NormOps {
  void (*layer_norm)(const void* x, const void* weight, const void* bias, float eps, void* y, float* mean,
                     float* rstd, Count n);
  /// Adds dy·x̂ to dweight[n] and dy to dbias[n], and with `onto_dx` the rounded gradient of x to dx[n].
  void (*layer_norm_backward)(const void* x, const void* weight, float mean, float rstd, const void* dy,
                              void* dx, bool onto_dx, float* dweight, float* dbias, Count n);
  void (*rms_norm)(const void* x, const void* weight, float shift, float eps, void* y, float* rstd, Count n);
  void (*rms_norm_backward)(const void* x, const void* weight, float shift, float rstd, const void* dy,
                            void* dx, bool onto_dx, float* dweight, Count n);
};

struct SoftmaxOps {
  /// The row's maximum, and the sum of exp(x - maximum), in one pass through memory.
  void (*max_and_sum)(const void* row, Count n, float* maximum, float* sum);
  /// row = exp(row - lse)·factor
  void (*gradient)(void* row, Count n, float lse, float factor);
};

struct DropoutOps {
  /// out = residual + (kept ? x·factor : 0) for elements first + [0, n) of a Philox stream, `first` a
  /// multiple of 4. An element is kept when the upper 24 bits of its word are at least `threshold`.
  /// `residual` may be null.
  void (*dropout)(const void* x, const void* residual, void* out, Count n, std::uint64_t first,
                  std::uint64_t seed, std::uint64_t stream, std::uint32_t threshold, float factor);
};

/// Products of few rows with many, and sums of many rows. Sums have one order, whatever the instruction set
/// and the number of rows.
struct FewRowsOps {
  /// c[i·c_stride + j] = Σ_p a[i·a_stride + p]·b[j·b_stride + p], p < depth; b is read once.
  void (*products)(const void* a, Count a_stride, Count rows, const void* b, Count b_stride, Count cols,
                   Count depth, float* c, Count c_stride);
  /// out[i·width + d] += Σ_j weights[i·weight_stride + j]·x[j·width + d], j < count, d < width.
  void (*weighted_sums)(const float* weights, Count weight_stride, Count rows, const void* x, Count count,
                        Count width, float* out);
};

/// Elements 4·first … 4·(first + blocks) - 1 of a stream of normal numbers (base/random.h), rarely a NaN in
/// one's place: these the caller asks normal_at() for.
using Normals = void(std::uint64_t seed, std::uint64_t stream, std::uint64_t first, Count blocks, float* out);

/// All tables of one instruction set, each an array over StorageIndex, and what has no storage type.
struct IsaTable {
  const ElementwiseOps* elementwise;
  const ConvertOps* convert;
  const NormOps* norm;
  const SoftmaxOps* softmax;
  const DropoutOps* dropout;
  const FewRowsOps* few_rows;
  Normals* normals;
};

/// The tables of `isa`, for the life of the program.
const IsaTable& isa_table(CpuIsa isa);

/// Declares the tables that the sources in this folder define for one instruction set.
#define SHERD_DECLARE_ISA(isa)                            \
  namespace isa {                                         \
  extern const ElementwiseOps elementwise[storage_count]; \
  extern const ConvertOps convert[storage_count];         \
  extern const NormOps norm[storage_count];               \
  extern const SoftmaxOps softmax[storage_count];         \
  extern const DropoutOps dropout[storage_count];         \
  extern const FewRowsOps few_rows[storage_count];        \
  Normals normals;                                        \
  }
SHERD_DECLARE_ISA(portable)
SHERD_DECLARE_ISA(avx2)
SHERD_DECLARE_ISA(avx512)
#undef SHERD_DECLARE_ISA

}  // namespace sherd::tensor::cpu
