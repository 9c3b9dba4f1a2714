#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>

#include "tensor/tensor.h"

// Arrays of several axes within tensors: what moves axes about, repeats along them or folds them. The kernels
// of every device share this; what checks throws Error{usage} that names the kernel and the shapes.

namespace sherd::tensor {

/// Where the elements of an array lie: element (i0, i1, …) at Σ i_k·strides[k]. A stride of 0 repeats.
using Strides = std::array<std::int64_t, Shape::max_rank>;

/// The strides of a tensor whose elements follow each other.
Strides dense_strides(const Shape& shape);
/// The strides of a tensor of shape `from` as an array of shape `to`, by NumPy's rule: axes are matched from
/// the last one on, and extents of 1, or missing ones, repeat. Throws Error{usage} naming `kernel` where they
/// do not match.
Strides broadcast_strides(const char* kernel, const Shape& from, const Shape& to);
/// The shape of what two tensors give together by that rule.
Shape broadcast_shape(const char* kernel, const Shape& a, const Shape& b);

/// An axis between what lies before and behind it: x[outer][extent][inner]. Several axes that follow each
/// other may be one.
struct AxisExtents {
  std::int64_t outer = 1, extent = 1, inner = 1;
  std::int64_t kept() const { return outer * inner; }
};
/// AxisExtents number `axis` of `shape`, negative ones counted from the end. Throws Error{usage} naming
/// `kernel`.
AxisExtents axis_of(const char* kernel, const Shape& shape, int axis);

/// Nested loops over a dense array, and where its operands' elements lie: axes of one element left out,
/// neighbours joined where all operands allow it. At least one axis.
struct ArrayLoops {
  static constexpr int most_operands = 2;
  int rank = 0;
  std::array<std::int64_t, Shape::max_rank> extents{};
  std::array<Strides, most_operands> strides{};

  /// The extent of the last axis.
  std::int64_t columns() const { return extents[static_cast<std::size_t>(rank - 1)]; }
  std::int64_t stride(int operand) const {
    return strides[static_cast<std::size_t>(operand)][static_cast<std::size_t>(rank - 1)];
  }
  /// Where row `row` (all indices but the last) of an operand begins.
  std::int64_t row_start(std::int64_t row, int operand) const {
    std::int64_t at = 0;
    for (int axis = rank - 2; axis >= 0; --axis) {
      const auto k = static_cast<std::size_t>(axis);
      at += row % extents[k] * strides[static_cast<std::size_t>(operand)][k];
      row /= extents[k];
    }
    return at;
  }
};
ArrayLoops array_loops(const Shape& shape, std::initializer_list<Strides> operands);

/// How softmax treats its rows.
struct Softmax {
  double scale = 1;  ///< multiplies x first
  bool log = false;  ///< the logarithm; not with what hides columns
  /// uint8, one per column: 0 hides it. Undefined: none is hidden.
  Tensor seen{};
  /// > 0: row i sees columns j <= i mod causal_rows alone.
  std::int64_t causal_rows = 0;
  /// Added to a scaled x by how far its column j is from its row i: element j − (i mod rows) + rows − 1, of
  /// rows + columns − 1 in the compute type (relative positions: Raffel et al. 2020). Undefined: nothing is.
  Tensor distances{};

  /// Rows that `distances` tells apart.
  std::int64_t distance_rows(std::int64_t columns) const { return distances.numel() - columns + 1; }
  /// The element of `distances` that belongs to column 0 of a row.
  std::int64_t distance(std::int64_t row, std::int64_t columns) const {
    const std::int64_t rows = distance_rows(columns);
    return rows - 1 - row % rows;
  }
  /// How many columns row i looks at.
  std::int64_t columns_of(std::int64_t row, std::int64_t columns) const {
    if (causal_rows == 0) return columns;
    const std::int64_t most = row % causal_rows + 1;
    return most < columns ? most : columns;
  }
};

/// The arguments of the kernels of the same names.
ArrayLoops check_copy_strided(const Tensor& from, const Strides& strides, const Tensor& to);
ArrayLoops check_broadcast(const char* kernel, const Tensor& a, const Tensor& b, const Tensor& out);
void check_sum_axis(const Tensor& x, const AxisExtents& axis, const Tensor& out);
/// sum_axis() is a sum of rows as sum_rows() has it.
bool sums_rows(const Tensor& x, const AxisExtents& axis, double factor, const Tensor& out);
void check_max_axis(const char* kernel, const Tensor& x, const AxisExtents& axis, const Tensor& reduced);
void check_softmax(const Tensor& x, const Softmax& args, const Tensor& y);
void check_softmax_backward(const Tensor& y, const Tensor& dy, const Softmax& args, const Tensor& dx);
void check_binary_cross_entropy(const char* kernel, const Tensor& logits, const Tensor& targets,
                                const Tensor& weights);

}  // namespace sherd::tensor
