#include <Eigen/Core>
#include <algorithm>
#include <array>
#include <cstring>

#include "base/cpu_isa.h"
#include "tensor/cpu/cpu_kernels.h"
#include "tensor/cpu/gemm_blocks.h"
#include "tensor/cpu/isa/tables.h"

namespace sherd::tensor::cpu {
namespace {

constexpr Count block_rows = 128;
constexpr Count panel_cols = 768;
constexpr Count max_depth = 4096;
constexpr Count depth_step = 3072;            ///< depths beyond max_depth are cut into about this much
constexpr Count packed_group = Count{12} << 20;  ///< bytes of b packed at a time: a part of the last-level cache

Count ceil_div(Count a, Count b) { return (a + b - 1) / b; }

StorageIndex storage_of(DType dtype) {
  return dtype == DType::bf16 ? storage_bf16 : dtype == DType::f16 ? storage_f16 : storage_f32;
}

struct Extents {
  Count m = 0, n = 0, k = 0;
};

/// The product of the leading extents, also of a tensor whose rows are empty.
Count rows_of(const Tensor& t) {
  Count rows = 1;
  for (int axis = 0; axis + 1 < t.shape().rank(); ++axis) rows *= t.shape()[axis];
  return rows;
}

Extents check(const Matmul& args) {
  const Tensor &a = args.a, &b = args.b, &c = args.c;
  require(a && b && c, "matmul: a, b and c must be defined");
  require(a.shape().rank() >= 1 && b.shape().rank() >= 1 && c.shape().rank() >= 1, "matmul: a scalar has no rows");
  require(is_floating(a.dtype()) && a.dtype() == b.dtype(), "matmul: a is ", name_of(a.dtype()), " and b is ",
          name_of(b.dtype()), "; both must have one floating dtype");
  require(c.dtype() == a.dtype() || (c.dtype() == DType::f32 && a.dtype() != DType::f64), "matmul: c is ",
          name_of(c.dtype()), " and must be ", name_of(a.dtype()), a.dtype() == DType::f64 ? "" : " or fp32");
  Extents e;
  e.m = args.trans_a ? a.shape().back() : rows_of(a);
  e.k = args.trans_a ? rows_of(a) : a.shape().back();
  e.n = args.trans_b ? rows_of(b) : b.shape().back();
  const Count k = args.trans_b ? b.shape().back() : rows_of(b);
  require(k == e.k, "matmul: a is ", a.shape().str(), args.trans_a ? " transposed" : "", " and b ", b.shape().str(),
          args.trans_b ? " transposed" : "", ": the inner extents ", e.k, " and ", k, " differ");
  require(rows_of(c) == e.m && c.shape().back() == e.n, "matmul: c is ", c.shape().str(), " and must hold ", e.m,
          " rows of ", e.n);
  if (args.bias)
    require(args.bias.numel() == e.n && args.bias.dtype() == a.dtype(), "matmul: bias is ",
            name_of(args.bias.dtype()), " ", args.bias.shape().str(), " and must be ", name_of(a.dtype()), " [", e.n, "]");
  require(args.activation == Activation::none || !args.accumulate, "matmul: an activation cannot follow accumulate");
  if (args.pre_activation)
    require(args.pre_activation.numel() == e.m * e.n && args.pre_activation.dtype() == c.dtype(),
            "matmul: pre_activation is ", name_of(args.pre_activation.dtype()), " ", args.pre_activation.shape().str(),
            " and must match c, ", name_of(c.dtype()), " ", c.shape().str());
  return e;
}

/// Finishes rows of fp32 sums: bias, accumulation, rounding, activation.
class Epilogue {
 public:
  Epilogue(const IsaTable& isa, const Matmul& args, Count n)
      : args_(args), n_(n), add_(isa.elementwise[storage_f32].add), convert_(isa.convert[storage_of(args.c.dtype())]),
        elementwise_(isa.elementwise[storage_of(args.c.dtype())]) {}

  void add(const float* a, const float* b, float* out, Count n) const { add_(a, b, out, n); }

  /// sums[cols] becomes columns [col, col + cols) of row `row` of c. `bias` holds fp32 for these columns, or is null.
  void row(float* sums, const float* bias, Count row, Count col, Count cols) const {
    const std::size_t at = static_cast<std::size_t>(row * n_ + col) * size_of(args_.c.dtype());
    std::byte* out = args_.c.raw() + at;
    if (bias) add_(sums, bias, sums, cols);
    if (args_.accumulate) return convert_.accumulate(sums, out, cols);
    std::byte* before = args_.pre_activation ? args_.pre_activation.raw() + at : out;
    convert_.store(sums, before, cols);
    if (args_.activation == Activation::gelu_tanh) elementwise_.gelu_tanh(before, out, cols);
    else if (args_.activation == Activation::gelu_erf) elementwise_.gelu_erf(before, out, cols);
    else if (before != out) convert_.store(sums, out, cols);
  }

 private:
  const Matmul& args_;
  Count n_;
  void (*add_)(const void*, const void*, void*, Count);
  const ConvertOps& convert_;
  const ElementwiseOps& elementwise_;
};

/// A product cut into blocks by its extents alone, so that sums have one order whatever the number of threads:
/// panels of b are packed once into a part of the last-level cache, and every block of rows meets every panel.
class BlockedProduct {
 public:
  BlockedProduct(Device& device, const IsaTable& isa, const Matmul& args, const Extents& e)
      : device_(device), args_(args), e_(e), product_(block_product(args.a.dtype())), epilogue_(isa, args, e.n),
        load_(isa.convert[storage_of(args.a.dtype())].load) {
    panels_ = ceil_div(e.n, panel_cols);
    panel_ = std::min(e.n, ceil_div(ceil_div(e.n, panels_), 64) * 64);
    panels_ = ceil_div(e.n, panel_);
    depths_ = e.k <= max_depth ? 1 : ceil_div(e.k, depth_step);
    depth_ = depths_ == 1 ? e.k : ceil_div(ceil_div(e.k, depths_), 64) * 64;
    depths_ = ceil_div(e.k, depth_);
    rows_ = std::min(e.m, block_rows);
    partial_row_ = product_.c_stride(panel_);
    converts_ = product_.dtype() != args.a.dtype();
    element_ = size_of(args.a.dtype());
  }

  void run() {
    packed_bytes_ = 0;
    for (const Count cols : {panel_, e_.n - (panels_ - 1) * panel_})
      for (const Count depth : {depth_, e_.k - (depths_ - 1) * depth_})
        packed_bytes_ = std::max(packed_bytes_, product_.packed_bytes(block(rows_, cols, depth)));
    packed_bytes_ = ceil_div(packed_bytes_, 4096) * 4096;
    const Count group = std::min(panels_, std::max<Count>(1, packed_group / packed_bytes_));
    packed_ = scratch(group * packed_bytes_);
    if (depths_ > 1) partial_ = scratch(e_.m * group * partial_row_ * 4);
    for (Count first = 0; first < panels_; first += group) {
      group_ = std::min(group, panels_ - first);
      for (Count d = 0; d < depths_; ++d) {
        arena().parallel_for(group_, 1, [&](Count p, Count) { pack(first, p, d); });
        const Count blocks = ceil_div(e_.m, rows_);
        arena().parallel_for(blocks * group_, 1,
                             [&](Count at, Count) { multiply(first, at / blocks, at % blocks, d); });
      }
    }
  }

 private:
  GemmBlock block(Count rows, Count cols, Count depth) const {
    return {.rows = rows, .cols = cols, .depth = depth, .full_rows = rows_};
  }
  Count cols_of(Count panel) const { return std::min(panel_, e_.n - panel * panel_); }
  Count depth_of(Count d) const { return std::min(depth_, e_.k - d * depth_); }
  Arena& arena() { return device_.arena(); }
  device::Storage scratch(Count bytes) {
    return device_.allocate(static_cast<std::size_t>(bytes), device::Category::workspace);
  }

  void pack(Count first, Count p, Count d) {
    const Count col = (first + p) * panel_, cols = cols_of(first + p), at = d * depth_, depth = depth_of(d);
    const Count stride = args_.trans_b ? e_.k : e_.n;
    const std::byte* from = args_.b.raw() + (args_.trans_b ? col * stride + at : at * stride + col) *
                                                static_cast<Count>(element_);
    std::byte* to = packed_.data() + p * packed_bytes_;
    const GemmBlock shape = block(rows_, cols, depth);
    const Count lines = args_.trans_b ? cols : depth, length = args_.trans_b ? depth : cols;
    const Count wanted = args_.trans_b ? product_.b_stride(depth, converts_ ? 0 : stride) : converts_ ? cols : stride;
    device::Storage copy;
    if (converts_ || wanted != stride) from = copy_lines(from, stride, lines, length, wanted, copy);
    product_.pack(shape, from, args_.trans_b ? 1 : wanted, args_.trans_b ? wanted : 1, to);
  }

  /// Lines of the operands' dtype brought to the product's, `to_stride` elements apart with zeros between.
  const std::byte* copy_lines(const std::byte* from, Count stride, Count lines, Count length, Count to_stride,
                              device::Storage& copy) {
    const auto element = static_cast<Count>(element_), to_element = static_cast<Count>(size_of(product_.dtype()));
    copy = scratch(lines * to_stride * to_element);
    for (Count i = 0; i < lines; ++i) {
      std::byte* to = copy.data() + i * to_stride * to_element;
      const std::byte* line = from + i * stride * element;
      if (converts_) load_(line, reinterpret_cast<float*>(to), length);
      else std::memcpy(to, line, static_cast<std::size_t>(length * element));
      std::memset(to + length * to_element, 0, static_cast<std::size_t>((to_stride - length) * to_element));
    }
    return copy.data();
  }

  /// The block's rows of a as the product takes them, setting shape.a_stride; `copy` keeps what had to be made.
  const std::byte* rows_of_a(GemmBlock& shape, Count row, Count at, device::Storage& copy) {
    const Count stride = args_.trans_a ? e_.m : e_.k;
    const std::byte* from = args_.a.raw() + (args_.trans_a ? at * stride + row : row * stride + at) *
                                                static_cast<Count>(element_);
    shape.a_stride = product_.a_stride(shape.depth, args_.trans_a || converts_ ? 0 : stride);
    if (args_.trans_a) return transposed_rows(shape, from, stride, copy);
    if (!converts_ && shape.a_stride == stride) return from;
    return copy_lines(from, stride, shape.rows, shape.depth, shape.a_stride, copy);
  }

  const std::byte* transposed_rows(const GemmBlock& shape, const std::byte* from, Count stride, device::Storage& copy) {
    const TransposeOps& transpose = transpose_ops();
    if (product_.dtype() == DType::f32) {
      device::Storage wide;
      if (converts_) from = copy_lines(from, stride, shape.depth, shape.rows, shape.rows, wide);
      copy = scratch(shape.rows * shape.a_stride * 4);
      transpose.units(from, converts_ ? shape.rows : stride, shape.depth, shape.rows, copy.data(), shape.a_stride);
      return copy.data();
    }
    const Count even = std::max(shape.a_stride, ceil_div(shape.depth, 2) * 2);
    copy = scratch(shape.rows * even * 2);
    transpose.pairs(from, stride, shape.depth, shape.rows, copy.data(), even / 2);
    if (even != shape.a_stride)
      for (Count i = 1; i < shape.rows; ++i)
        std::memmove(copy.data() + i * shape.a_stride * 2, copy.data() + i * even * 2,
                     static_cast<std::size_t>(shape.depth) * 2);
    return copy.data();
  }

  void multiply(Count first, Count p, Count b, Count d) {
    const Count row = b * rows_, col = (first + p) * panel_, cols = cols_of(first + p);
    const Count stride = product_.c_stride(cols);
    GemmBlock shape = block(std::min(rows_, e_.m - row), cols, depth_of(d));
    const device::Storage tile = scratch(shape.rows * stride * 4);
    auto* sums = reinterpret_cast<float*>(tile.data());
    device::Storage copy;
    const std::byte* a = rows_of_a(shape, row, d * depth_, copy);
    product_.multiply(shape, a, packed_.data() + p * packed_bytes_, sums);
    if (depths_ > 1) {
      // Partial sums of earlier depths come first, so the order is that of k.
      float* before = reinterpret_cast<float*>(partial_.data()) + (row * group_ + p * shape.rows) * partial_row_;
      if (d > 0) epilogue_.add(before, sums, sums, shape.rows * stride);
      if (d + 1 < depths_) return std::memcpy(before, sums, tile.bytes()), void();
    }
    std::array<float, panel_cols> bias;
    if (args_.bias) load_(args_.bias.raw() + col * static_cast<Count>(element_), bias.data(), cols);
    for (Count i = 0; i < shape.rows; ++i)
      epilogue_.row(sums + i * stride, args_.bias ? bias.data() : nullptr, row + i, col, cols);
  }

  Device& device_;
  const Matmul& args_;
  const Extents e_;
  const BlockProduct& product_;
  const Epilogue epilogue_;
  void (*load_)(const void*, float*, Count);
  Count panels_, panel_, depths_, depth_, rows_, packed_bytes_ = 0, group_ = 0, partial_row_;
  bool converts_;
  std::size_t element_;
  device::Storage packed_, partial_;
};

/// Numeric gradients are checked in fp64; nothing else uses it, so Eigen's portable product does.
void multiply_f64(Kernels& kernels, const Matmul& args, const Extents& e) {
  using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const Eigen::Map<const Matrix> a(args.a.data<double>(), args.a.shape().rows(), args.a.shape().back());
  const Eigen::Map<const Matrix> b(args.b.data<double>(), args.b.shape().rows(), args.b.shape().back());
  Eigen::Map<Matrix> c(args.c.data<double>(), e.m, e.n);
  kernels.device().arena().parallel_for(e.m, 64, [&](Count begin, Count end) {
    const Count rows = end - begin;
    Matrix sums;
    if (args.trans_a && args.trans_b) sums.noalias() = a.middleCols(begin, rows).transpose() * b.transpose();
    else if (args.trans_a) sums.noalias() = a.middleCols(begin, rows).transpose() * b;
    else if (args.trans_b) sums.noalias() = a.middleRows(begin, rows) * b.transpose();
    else sums.noalias() = a.middleRows(begin, rows) * b;
    if (args.bias) sums.rowwise() += Eigen::Map<const Eigen::RowVectorXd>(args.bias.data<double>(), e.n);
    if (args.accumulate) c.middleRows(begin, rows) += sums;
    else c.middleRows(begin, rows) = sums;
  });
  if (args.pre_activation) kernels.copy(args.c, args.pre_activation);
  if (args.activation != Activation::none) kernels.activation(args.activation, args.c, args.c);
}

/// The product of an empty inner extent: zeros, plus what the epilogue adds.
void multiply_empty(Device& device, const IsaTable& isa, const Matmul& args, const Extents& e) {
  const Tensor bias = Tensor::zeros(device, Shape{e.n}, DType::f32, device::Category::workspace);
  const Tensor sums = Tensor::empty(device, Shape{e.n}, DType::f32, device::Category::workspace);
  if (args.bias) isa.convert[storage_of(args.bias.dtype())].load(args.bias.raw(), bias.data<float>(), e.n);
  const Epilogue epilogue(isa, args, e.n);
  for (Count i = 0; i < e.m; ++i) {
    std::fill_n(sums.data<float>(), e.n, 0.0f);
    epilogue.row(sums.data<float>(), bias.data<float>(), i, 0, e.n);
  }
}

}  // namespace

void CpuKernels::matmul(const Matmul& args) {
  const Extents e = check(args);
  if (e.m == 0 || e.n == 0) return;
  if (args.a.dtype() == DType::f64) return multiply_f64(*this, args, e);
  if (e.k == 0) return multiply_empty(device_, isa_, args, e);
  BlockedProduct(device_, isa_, args, e).run();
}

void CpuKernels::sum_rows(const Tensor& x, const Tensor& out, bool accumulate) {
  require(x && out, "sum_rows: x and out must be defined");
  const Count n = out.numel(), m = n == 0 ? 0 : x.numel() / n;
  require(is_floating(x.dtype()) && x.shape().rank() >= 1 && x.shape().back() == n, "sum_rows: x is ",
          name_of(x.dtype()), " ", x.shape().str(), " and out has ", n, " elements; rows must be as wide as out");
  require(out.dtype() == x.dtype() || (out.dtype() == DType::f32 && x.dtype() != DType::f64), "sum_rows: out is ",
          name_of(out.dtype()), " and x ", name_of(x.dtype()));
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
  // Sums of 128 rows first, then the sums of these in order: short chains, and one order for any number of threads.
  constexpr Count rows = 128, cols = 512;
  const Count parts = std::max<Count>(1, ceil_div(m, rows));
  const Tensor partial = Tensor::zeros(device_, Shape{parts, n}, DType::f32, device::Category::workspace);
  float* sums = partial.data<float>();
  const ConvertOps& from = isa_.convert[storage_of(x.dtype())];
  const auto element = static_cast<Count>(size_of(x.dtype()));
  device_.arena().parallel_for(m, rows, [&](Count begin, Count end) {
    for (Count i = begin; i < end; ++i) from.add_to(x.raw() + i * n * element, sums + begin / rows * n, n);
  });
  device_.arena().parallel_for(n, cols, [&](Count begin, Count end) {
    for (Count part = 1; part < parts; ++part)
      isa_.elementwise[storage_f32].add(sums + begin, sums + part * n + begin, sums + begin, end - begin);
    std::byte* to = out.raw() + begin * static_cast<Count>(size_of(out.dtype()));
    const ConvertOps& store = isa_.convert[storage_of(out.dtype())];
    accumulate ? store.accumulate(sums + begin, to, end - begin) : store.store(sums + begin, to, end - begin);
  });
}

}  // namespace sherd::tensor::cpu
