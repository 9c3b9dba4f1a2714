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

/// to[i·to_stride + p] = from[p·from_stride + i] for i < rows, p < depth.
template <class T>
void transpose(const T* from, Count from_stride, Count rows, Count depth, T* to, Count to_stride) {
  constexpr Count tile = 32;
  for (Count p0 = 0; p0 < depth; p0 += tile)
    for (Count i0 = 0; i0 < rows; i0 += tile)
      for (Count i = i0; i < std::min(rows, i0 + tile); ++i)
        for (Count p = p0; p < std::min(depth, p0 + tile); ++p) to[i * to_stride + p] = from[p * from_stride + i];
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
    if (depths_ > 1) partial_ = scratch(e_.m * group * panel_ * 4);
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
    if (!converts_) return product_.pack(shape, from, args_.trans_b ? 1 : stride, args_.trans_b ? stride : 1, to);
    const Count lines = args_.trans_b ? cols : depth, length = args_.trans_b ? depth : cols;
    const device::Storage wide = scratch(lines * length * 4);
    auto* values = reinterpret_cast<float*>(wide.data());
    for (Count i = 0; i < lines; ++i)
      load_(from + i * stride * static_cast<Count>(element_),
                                                      values + i * length, length);
    product_.pack(shape, values, args_.trans_b ? 1 : length, args_.trans_b ? length : 1, to);
  }

  /// The block's rows of a, contiguous and of the product's dtype; `copy` keeps what had to be made.
  const void* rows_of_a(const GemmBlock& shape, Count row, Count at, device::Storage& copy) {
    const auto element = static_cast<Count>(element_);
    const Count stride = args_.trans_a ? e_.m : e_.k, elements = shape.rows * shape.depth;
    const std::byte* from = args_.a.raw() + (args_.trans_a ? at * stride + row : row * stride + at) * element;
    if (!args_.trans_a && !converts_ && stride == shape.depth) return from;
    copy = scratch(elements * (converts_ ? 4 + element : element));
    std::byte* narrow = copy.data() + (converts_ ? elements * 4 : 0);
    if (!args_.trans_a)
      for (Count i = 0; i < shape.rows; ++i)
        std::memcpy(narrow + i * shape.depth * element, from + i * stride * element,
                    static_cast<std::size_t>(shape.depth * element));
    else if (element == 2)
      transpose(reinterpret_cast<const std::uint16_t*>(from), stride, shape.rows, shape.depth,
                reinterpret_cast<std::uint16_t*>(narrow), shape.depth);
    else
      transpose(reinterpret_cast<const std::uint32_t*>(from), stride, shape.rows, shape.depth,
                reinterpret_cast<std::uint32_t*>(narrow), shape.depth);
    if (!converts_) return narrow;
    load_(narrow, reinterpret_cast<float*>(copy.data()), elements);
    return copy.data();
  }

  void multiply(Count first, Count p, Count b, Count d) {
    const Count row = b * rows_, col = (first + p) * panel_, cols = cols_of(first + p);
    const GemmBlock shape = block(std::min(rows_, e_.m - row), cols, depth_of(d));
    const device::Storage tile = scratch(shape.rows * cols * 4);
    auto* sums = reinterpret_cast<float*>(tile.data());
    device::Storage copy;
    product_.multiply(shape, rows_of_a(shape, row, d * depth_, copy), packed_.data() + p * packed_bytes_, sums);
    if (depths_ > 1) {
      // Partial sums of earlier depths come first, so the order is that of k.
      float* before = reinterpret_cast<float*>(partial_.data()) + (row * group_ * panel_ + p * panel_ * shape.rows);
      if (d > 0) epilogue_.add(before, sums, sums, shape.rows * cols);
      if (d + 1 < depths_) return std::memcpy(before, sums, tile.bytes()), void();
    }
    std::array<float, panel_cols> bias;
    if (args_.bias) load_(args_.bias.raw() + col * static_cast<Count>(element_), bias.data(), cols);
    for (Count i = 0; i < shape.rows; ++i)
      epilogue_.row(sums + i * cols, args_.bias ? bias.data() : nullptr, row + i, col, cols);
  }

  Device& device_;
  const Matmul& args_;
  const Extents e_;
  const BlockProduct& product_;
  const Epilogue epilogue_;
  void (*load_)(const void*, float*, Count);
  Count panels_, panel_, depths_, depth_, rows_, packed_bytes_ = 0, group_ = 0;
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
