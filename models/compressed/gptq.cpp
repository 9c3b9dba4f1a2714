#include "models/compressed/gptq.h"

#include <Eigen/Cholesky>
#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/error.h"

namespace sherd::models {
namespace {

using Eigen::MatrixXd;
using tensor::Tensor;

constexpr double damping = 0.01;
/// The largest magnitude of a group lies half-way between two codes. It goes to the outer one, whichever side
/// of the middle fp32 has put it on: which decides what all behind it become.
constexpr float outwards = 1 + 0x1p-20f;
/// Columns whose errors go to all behind them at once, in one product.
constexpr std::int64_t block = 128;

std::size_t at(std::int64_t index) {
  return static_cast<std::size_t>(index);
}

/// Column numbers in the order in which they are rounded.
std::vector<std::int64_t> order_of(const float* hessian, std::int64_t n, bool by_activation) {
  std::vector<std::int64_t> out(at(n));
  std::iota(out.begin(), out.end(), std::int64_t{0});
  if (by_activation)
    std::stable_sort(out.begin(), out.end(),
                     [&](std::int64_t a, std::int64_t b) { return hessian[a * n + a] > hessian[b * n + b]; });
  return out;
}

/// The upper triangle U with UᵀU = H⁻¹, of H in that order, damped: as [n, n] in `hessian`'s memory.
///
/// With rows and columns turned round H is L·Lᵀ; turned back that is H = R·Rᵀ of an upper triangle R, and U
/// is R⁻¹. So H⁻¹ itself is never formed.
void invert(float* hessian, std::int64_t n, const std::vector<std::int64_t>& order, const std::string& name) {
  double mean = 0;
  std::int64_t live = 0;
  for (std::int64_t i = 0; i < n; ++i)
    if (hessian[i * n + i] > 0) mean += hessian[i * n + i], ++live;
  mean = live > 0 ? mean / static_cast<double>(live) : 1;
  const auto column = [&](Eigen::Index turned) { return order[at(n - 1 - turned)]; };
  MatrixXd factor(n, n);
  for (Eigen::Index j = 0; j < n; ++j)
    for (Eigen::Index i = j; i < n; ++i) factor(i, j) = hessian[column(i) * n + column(j)];
  for (Eigen::Index i = 0; i < n; ++i) {
    if (!(factor(i, i) > 0)) factor(i, i) = mean;
    factor(i, i) += damping * mean;
  }
  const Eigen::LLT<Eigen::Ref<MatrixXd>> cholesky(factor);
  if (cholesky.info() != Eigen::Success || !std::isfinite(factor.diagonal().sum()))
    fail(ErrorKind::data, "the inputs of ", name,
         " in calibration have no finite products: the model's activations overflow on these texts");
  MatrixXd inverse = MatrixXd::Identity(n, n);
  for (Eigen::Index j = 0; j < n; j += block) {  // columns, which are 0 above their diagonal
    const Eigen::Index width = std::min<Eigen::Index>(block, n - j), below = n - j;
    factor.bottomRightCorner(below, below)
        .triangularView<Eigen::Lower>()
        .solveInPlace(inverse.block(j, j, below, width));
  }
  for (std::int64_t i = 0; i < n; ++i)
    for (std::int64_t j = 0; j < n; ++j)
      hessian[i * n + j] = j < i ? 0.0f : static_cast<float>(inverse(n - 1 - i, n - 1 - j));
}

class Rounder {
 public:
  Rounder(const CompressedScheme& scheme, std::span<const float> values, std::int64_t rows,
          const Tensor& hessian, const std::string& name, tensor::Kernels& kernels)
      : scheme_(scheme),
        kernels_(kernels),
        rows_(rows),
        columns_(hessian.shape()[0]),
        inverse_(hessian),
        order_(order_of(hessian.data<float>(), columns_, scheme.activation_order)) {
    invert(inverse_.data<float>(), columns_, order_, name);
    left_ = Tensor::on_host(kernels.device(), {columns_, rows}, DType::f32);
    for (std::int64_t i = 0; i < columns_; ++i)
      for (std::int64_t row = 0; row < rows; ++row) left(i)[row] = values[at(row * columns_ + order_[at(i)])];
    out_ = {.rows = rows, .columns = columns_, .group = scheme.group_of(columns_)};
    out_.codes.resize(values.size()), out_.scales.resize(at(rows * out_.groups()));
    if (!finds_scales())
      for (std::int64_t g = 0; g < out_.groups(); ++g) find_scales(g, values.data(), columns_, 1);
  }

  CompressedMatrix run() {
    // A group's scales are of what all before it have left: it lies in one block, or begins with one.
    const bool fits = !finds_scales() || block % out_.group == 0 || out_.group % block == 0;
    const std::int64_t length = fits ? block : out_.group;
    for (std::int64_t begin = 0; begin < columns_; begin += length)
      round_block(begin, std::min(begin + length, columns_));
    return std::move(out_);
  }

 private:
  /// Scales are found as columns come, not beforehand.
  bool finds_scales() const { return out_.groups() > 1 && !scheme_.activation_order; }
  /// Column number `i` in the order of rounding, of all rows, with the errors that it has taken.
  float* left(std::int64_t i) { return left_.data<float>() + i * rows_; }

  /// The scales of a group, whose values lie at `values` with these steps.
  void find_scales(std::int64_t group, const float* values, std::int64_t row_step, std::int64_t column_step) {
    for (std::int64_t row = 0; row < rows_; ++row) {
      float largest = 0;
      for (std::int64_t i = group * out_.group; i < (group + 1) * out_.group; ++i)
        largest = std::max(largest, std::abs(values[row * row_step + i * column_step]));
      out_.scales[at(row * out_.groups() + group)] = compressed_scale(scheme_, largest);
    }
  }

  void round_block(std::int64_t begin, std::int64_t end) {
    const float* inverse = inverse_.data<float>();
    const Tensor errors = Tensor::on_host(kernels_.device(), {end - begin, rows_}, DType::f32);
    for (std::int64_t i = begin; i < end; ++i) {
      if (finds_scales() && i % out_.group == 0) find_scales(i / out_.group, left_.data<float>(), 1, rows_);
      float* error = errors.data<float>() + (i - begin) * rows_;
      round_column(i, inverse[i * columns_ + i], error);
      for (std::int64_t k = i + 1; k < end; ++k) {
        const float by = inverse[i * columns_ + k];
        float* to = left(k);
        for (std::int64_t row = 0; row < rows_; ++row) to[row] += by * error[row];
      }
    }
    const std::int64_t behind = columns_ - end;
    if (behind == 0) return;
    const Tensor spread = Tensor::on_host(kernels_.device(), {end - begin, behind}, DType::f32);
    for (std::int64_t i = begin; i < end; ++i)
      std::copy_n(inverse + i * columns_ + end, behind, spread.data<float>() + (i - begin) * behind);
    kernels_.matmul(
        {.a = spread, .b = errors, .c = left_.rows(end, columns_), .trans_a = true, .accumulate = true});
  }

  /// Rounds a column, and tells its error, over U's element, with the sign with which others take it.
  void round_column(std::int64_t i, float diagonal, float* error) {
    const std::int64_t column = order_[at(i)], group = column / out_.group;
    const float* value = left(i);
    for (std::int64_t row = 0; row < rows_; ++row) {
      const float scale = out_.scales[at(row * out_.groups() + group)];
      const std::uint8_t code = compressed_code(scheme_.kind, value[row] * outwards, scale);
      out_.codes[at(row * columns_ + column)] = code;
      error[row] = (compressed_value(scheme_.kind, code) * scale - value[row]) / diagonal;
    }
  }

  const CompressedScheme& scheme_;
  tensor::Kernels& kernels_;
  std::int64_t rows_, columns_;
  Tensor inverse_, left_;
  std::vector<std::int64_t> order_;
  CompressedMatrix out_;
};

}  // namespace

CompressedMatrix gptq(const CompressedScheme& scheme, const std::string& name, std::span<const float> values,
                      std::int64_t rows, const Tensor& hessian, tensor::Kernels& kernels) {
  const std::int64_t columns = hessian.shape()[0];
  require(hessian.shape() == tensor::Shape{columns, columns} && std::ssize(values) == rows * columns,
          "gptq: ", values.size(), " values of ", rows, " rows for a Hessian ", hessian.shape().str());
  require_compressible(scheme, name, values, columns);
  return Rounder(scheme, values, rows, hessian, name, kernels).run();
}

}  // namespace sherd::models
