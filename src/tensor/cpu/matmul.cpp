#include <Eigen/Core>
#include <algorithm>

#include "tensor/cpu/gemm_blocks.h"
#include "tensor/cpu/loops.h"
#include "tensor/cpu/workspace.h"

namespace sherd::tensor::cpu {
namespace {

Count ceil_div(Count a, Count b) {
  return (a + b - 1) / b;
}

/// The product of the leading extents, also of a tensor whose rows are empty.
Count rows_of(const Tensor& t) {
  Count rows = 1;
  for (int axis = 0; axis + 1 < t.shape().rank(); ++axis) rows *= t.shape()[axis];
  return rows;
}

GemmExtents check(const Matmul& args) {
  const Tensor &a = args.a, &b = args.b, &c = args.c;
  require(a && b && c, "matmul: a, b and c must be defined");
  require(a.shape().rank() >= 1 && b.shape().rank() >= 1 && c.shape().rank() >= 1,
          "matmul: a scalar has no rows");
  require(is_floating(a.dtype()) && a.dtype() == b.dtype(), "matmul: a is ", name_of(a.dtype()), " and b is ",
          name_of(b.dtype()), "; both must have one floating dtype");
  require(c.dtype() == a.dtype() || (c.dtype() == DType::f32 && a.dtype() != DType::f64), "matmul: c is ",
          name_of(c.dtype()), " and must be ", name_of(a.dtype()), a.dtype() == DType::f64 ? "" : " or fp32");
  GemmExtents e;
  e.m = args.trans_a ? a.shape().back() : rows_of(a);
  e.k = args.trans_a ? rows_of(a) : a.shape().back();
  e.n = args.trans_b ? rows_of(b) : b.shape().back();
  const Count k = args.trans_b ? b.shape().back() : rows_of(b);
  require(k == e.k, "matmul: a is ", a.shape().str(), args.trans_a ? " transposed" : "", " and b ",
          b.shape().str(), args.trans_b ? " transposed" : "", ": the inner extents ", e.k, " and ", k,
          " differ");
  require(rows_of(c) == e.m && c.shape().back() == e.n, "matmul: c is ", c.shape().str(), " and must hold ",
          e.m, " rows of ", e.n);
  if (args.bias)
    require(args.bias.numel() == e.n && args.bias.dtype() == a.dtype(), "matmul: bias is ",
            name_of(args.bias.dtype()), " ", args.bias.shape().str(), " and must be ", name_of(a.dtype()),
            " [", e.n, "]");
  require(args.activation == Activation::none || !args.accumulate,
          "matmul: an activation cannot follow accumulate");
  if (args.pre_activation)
    require(args.pre_activation.numel() == e.m * e.n && args.pre_activation.dtype() == c.dtype(),
            "matmul: pre_activation is ", name_of(args.pre_activation.dtype()), " ",
            args.pre_activation.shape().str(), " and must match c, ", name_of(c.dtype()), " ",
            c.shape().str());
  return e;
}

/// Numeric gradients are checked in fp64; nothing else uses it, so Eigen's portable product does.
void multiply_f64(Kernels& kernels, const Matmul& args, const GemmExtents& e) {
  using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const Eigen::Map<const Matrix> a(args.a.data<double>(), args.a.shape().rows(), args.a.shape().back());
  const Eigen::Map<const Matrix> b(args.b.data<double>(), args.b.shape().rows(), args.b.shape().back());
  Eigen::Map<Matrix> c(args.c.data<double>(), e.m, e.n);
  kernels.device().arena().parallel_for(e.m, 64, [&](Count begin, Count end) {
    const Count rows = end - begin;
    Matrix sums;
    if (args.trans_a && args.trans_b)
      sums.noalias() = a.middleCols(begin, rows).transpose() * b.transpose();
    else if (args.trans_a)
      sums.noalias() = a.middleCols(begin, rows).transpose() * b;
    else if (args.trans_b)
      sums.noalias() = a.middleRows(begin, rows) * b.transpose();
    else
      sums.noalias() = a.middleRows(begin, rows) * b;
    if (args.bias) sums.rowwise() += Eigen::Map<const Eigen::RowVectorXd>(args.bias.data<double>(), e.n);
    if (args.accumulate)
      c.middleRows(begin, rows) += sums;
    else
      c.middleRows(begin, rows) = sums;
  });
  if (args.pre_activation) kernels.copy(args.c, args.pre_activation);
  if (args.activation != Activation::none) kernels.activation(args.activation, args.c, args.c);
}

}  // namespace

void CpuKernels::matmul(const Matmul& args) {
  const GemmExtents e = check(args);
  if (e.m == 0 || e.n == 0) return;
  if (args.a.dtype() == DType::f64) return multiply_f64(*this, args, e);
  multiply_blocked(device_, isa_, args, e);
}

std::size_t matmul_workspace(Device& device, const Matmul& args) {
  const GemmExtents e = check(args);
  if (e.m == 0 || e.n == 0 || args.a.dtype() == DType::f64) return 0;
  return blocked_workspace(device, isa_table(cpu_isa()), args, e);
}

namespace {
/// sum_rows() sums this many rows first, then the sums of these in order: short chains, and one order for any
/// number of threads.
constexpr Count summed_rows = 128;
Count row_sums(Count rows) {
  return std::max<Count>(1, ceil_div(rows, summed_rows));
}
}  // namespace

std::size_t sum_rows_workspace(const Tensor& x, const Tensor& out) {
  const Count n = out.numel();
  if (n == 0 || x.dtype() == DType::f64) return 0;
  return static_cast<std::size_t>(row_sums(x.numel() / n) * n) * sizeof(float);
}

void CpuKernels::sum_rows(const Tensor& x, const Tensor& out, bool accumulate) {
  require(x && out, "sum_rows: x and out must be defined");
  const Count n = out.numel(), m = n == 0 ? 0 : x.numel() / n;
  require(is_floating(x.dtype()) && x.shape().rank() >= 1 && x.shape().back() == n, "sum_rows: x is ",
          name_of(x.dtype()), " ", x.shape().str(), " and out has ", n,
          " elements; rows must be as wide as out");
  require(out.dtype() == x.dtype() || (out.dtype() == DType::f32 && x.dtype() != DType::f64),
          "sum_rows: out is ", name_of(out.dtype()), " and x ", name_of(x.dtype()));
  if (n == 0) return;
  if (x.dtype() == DType::f64) {
    const double* from = x.data<double>();
    double* to = out.data<double>();
    device_.arena().parallel_for(n, 64, [&](Count begin, Count end) {
      for (Count j = begin; j < end; ++j) {
        double sum = 0;
        for (Count i = 0; i < m; ++i) sum += from[i * n + j];
        to[j] = accumulate ? to[j] + sum : sum;
      }
    });
    return;
  }
  constexpr Count rows = summed_rows, cols = 512;
  const Count parts = row_sums(m);
  const Tensor partial = Tensor::zeros(device_, Shape{parts, n}, DType::f32, device::Category::workspace);
  float* sums = partial.data<float>();
  const ConvertOps& from = isa_.convert[storage_index(x)];
  const auto element = static_cast<Count>(size_of(x.dtype()));
  device_.arena().parallel_for(m, rows, [&](Count begin, Count end) {
    for (Count i = begin; i < end; ++i) from.add_to(x.raw() + i * n * element, sums + begin / rows * n, n);
  });
  device_.arena().parallel_for(n, cols, [&](Count begin, Count end) {
    for (Count part = 1; part < parts; ++part)
      isa_.elementwise[storage_f32].add(sums + begin, sums + part * n + begin, sums + begin, end - begin);
    std::byte* to = out.raw() + begin * static_cast<Count>(size_of(out.dtype()));
    const ConvertOps& store = isa_.convert[storage_index(out)];
    accumulate ? store.accumulate(sums + begin, to, end - begin) : store.store(sums + begin, to, end - begin);
  });
}

}  // namespace sherd::tensor::cpu
