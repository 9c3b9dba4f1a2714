#include "tensor/formats/fp8.h"

#include "tensor/argument_checks.h"

namespace sherd::tensor {

std::span<const Fp8Recipe> fp8_recipes() {
  using enum Fp8Format;
  using enum Fp8Scaling;
  static constexpr Fp8Recipe recipes[] = {
      {"current", {e4m3, Fp8Scaling::tensor}, {e4m3, Fp8Scaling::tensor}, {e5m2, Fp8Scaling::tensor}},
      {"blockwise", {e4m3, blocks_1x128}, {e4m3, blocks_128x128}, {e4m3, blocks_1x128}},
      {"rowwise", {e4m3, Fp8Scaling::rows}, {e4m3, Fp8Scaling::rows}, {e4m3, Fp8Scaling::rows}}};
  return recipes;
}

Shape fp8_scales_shape(Fp8Scaling scaling, std::int64_t rows, std::int64_t cols) {
  switch (scaling) {
    case Fp8Scaling::rows:
      return {fp8_padded(rows)};
    case Fp8Scaling::blocks_1x128:
      return {fp8_blocks(cols), fp8_padded(rows)};
    case Fp8Scaling::blocks_128x128:
      return {fp8_blocks(rows), (fp8_blocks(cols) + 3) / 4 * 4};
    default:
      return {1};
  }
}

Fp8Matrix empty_fp8(Device& device, Fp8Rule rule, std::int64_t rows, std::int64_t cols) {
  return {Tensor::empty(device, {fp8_padded(rows), fp8_padded(cols)}, DType::u8),
          Tensor::empty(device, fp8_scales_shape(rule.scaling, rows, cols), DType::f32), rule, rows, cols};
}

void check_fp8(const char* kernel, const Fp8Matrix& x) {
  require(x.codes && x.scales && x.codes.dtype() == DType::u8 && x.scales.dtype() == DType::f32 &&
              x.codes.shape() == Shape{fp8_padded(x.rows), fp8_padded(x.cols)} &&
              x.scales.shape() == fp8_scales_shape(x.rule.scaling, x.rows, x.cols),
          kernel, ": codes ", x.codes.shape().str(), " and scales ", x.scales.shape().str(),
          " are not those of an FP8 matrix of ", x.rows, " rows and ", x.cols, " columns");
}

void check_to_fp8(const Tensor& x, bool transposed, const Fp8Matrix& to, const Tensor& lost) {
  require_floating("to_fp8", "x", x);
  require(x.dtype() != DType::f64, "to_fp8: takes fp32, bf16 and fp16, not fp64");
  check_fp8("to_fp8", to);
  const std::int64_t rows = x.shape().rows(), cols = x.shape().back();
  require(to.rows == (transposed ? cols : rows) && to.cols == (transposed ? rows : cols),
          "to_fp8: ", x.shape().str(), transposed ? " transposed" : "", " is not a matrix of ", to.rows,
          " rows and ", to.cols, " columns");
  require(!lost || (lost.dtype() == DType::i64 && lost.numel() == 2), "to_fp8: `lost` must be int64 [2]");
}

void check_fp8_range(const char* kernel, const Tensor& values, const Fp8Range& range, Fp8Rule rule,
                     const Tensor& scales) {
  require_floating(kernel, "the values", values);
  require(values.dtype() != DType::f64 && 0 <= range.begin && range.begin <= range.end &&
              range.end <= range.rows * range.cols && values.numel() == range.end - range.begin,
          kernel, ": ", name_of(values.dtype()), " ", values.shape().str(), " is not elements ", range.begin,
          " to ", range.end, " of a matrix of ", range.rows, " rows and ", range.cols, " columns");
  const bool scaled = rule.scaling == Fp8Scaling::tensor || rule.scaling == Fp8Scaling::blocks_128x128;
  require(scaled, kernel, ": takes one scale a tensor, or blocks of 128 x 128");
  require(scales.dtype() == DType::f32 &&
              scales.numel() == fp8_scales_shape(rule.scaling, range.rows, range.cols).numel(),
          kernel, ": scales ", scales.shape().str(), " do not fit");
}

}  // namespace sherd::tensor
