#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "tensor/formats/fp8_code.h"
#include "tensor/tensor.h"

// Matrices in FP8, as products take them, and the recipes by which linear layers make them.

namespace sherd::tensor {

/// The blocks of a matrix whose numbers share a scale.
enum class Fp8Scaling : std::uint8_t {
  tensor,        ///< all of it
  rows,          ///< each row
  blocks_1x128,  ///< runs of 128 columns of a row
  blocks_128x128
};

/// How one kind of operand is quantised.
struct Fp8Rule {
  Fp8Format format = Fp8Format::e4m3;
  Fp8Scaling scaling = Fp8Scaling::tensor;
  bool operator==(const Fp8Rule&) const = default;
};

/// How a linear layer's operands are quantised: inputs, weights, and gradients of outputs. Products sum along
/// rows of both operands, so that each is made with its rows along what is summed: for the gradients of
/// inputs the weight's transpose, for those of weights the transposes of both others; all from the values
/// themselves, none from another's codes.
struct Fp8Recipe {
  std::string_view name;
  Fp8Rule input, weight, gradient;
};
/// "current" (one scale a tensor, gradients in E5M2), "rowwise", "blockwise" (DeepSeek-V3's report, 2024,
/// §3.3.2).
std::span<const Fp8Recipe> fp8_recipes();

/// A matrix in FP8. `codes`: uint8, rows and columns padded by zeros to multiples of 16; `scales`: fp32, as
/// fp8_scales_shape() says.
struct Fp8Matrix {
  Tensor codes{}, scales{};
  Fp8Rule rule{};
  std::int64_t rows = 0, cols = 0;
  explicit operator bool() const { return codes.defined(); }
};

inline constexpr std::int64_t fp8_block = 128, fp8_alignment = 16;
constexpr std::int64_t fp8_padded(std::int64_t extent) {
  return (extent + fp8_alignment - 1) / fp8_alignment * fp8_alignment;
}
constexpr std::int64_t fp8_blocks(std::int64_t extent) {
  return (extent + fp8_block - 1) / fp8_block;
}
/// Where the scale of an element lies. cuBLASLt's layouts: [1]; [padded rows]; [blocks of columns, padded
/// rows]; [blocks of rows, blocks of columns padded to 4].
Shape fp8_scales_shape(Fp8Scaling scaling, std::int64_t rows, std::int64_t cols);

/// Room for a matrix of so many rows and columns.
Fp8Matrix empty_fp8(Device& device, Fp8Rule rule, std::int64_t rows, std::int64_t cols);

/// The part of a matrix [rows, cols] that lies in elements [begin, end), counted row by row.
struct Fp8Range {
  std::int64_t rows = 0, cols = 0, begin = 0, end = 0;
};

/// The arguments of Kernels::to_fp8(): x's rows and columns fit. Throws Error{usage}.
void check_to_fp8(const Tensor& x, bool transposed, const Fp8Matrix& to, const Tensor& lost);
/// The codes and scales fit the matrix. Throws Error{usage} that names `kernel`.
void check_fp8(const char* kernel, const Fp8Matrix& x);
/// The arguments of the kernels of ranges.
void check_fp8_range(const char* kernel, const Tensor& values, const Fp8Range& range, Fp8Rule rule,
                     const Tensor& scales);

}  // namespace sherd::tensor
