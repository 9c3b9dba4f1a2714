#include <Eigen/Core>
#include <algorithm>
#include <atomic>

#include "tensor/cpu/gemm_blocks.h"
#include "tensor/cpu/loops.h"
#include "tensor/cpu/stored.h"
#include "tensor/extents.h"

namespace sherd::tensor::cpu {
namespace {

/// Numeric gradients are checked in fp64; nothing else uses it, so Eigen's portable product does.
void multiply_f64(Kernels& kernels, const Matmul& args, const MatmulExtents& e) {
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

/// Rows of a and columns of c that are under way at once: their sums, and as much of b, stay in the caches.
constexpr Count few_rows = 16, few_cols = 64;

/// Turns finished sums of one row, from column `first` on, into the result.
void finish_row(const IsaTable& isa, const Matmul& args, Count element, float* sums, const float* bias,
                Count n) {
  if (bias) isa.elementwise[storage_f32].add(sums, bias, sums, n);
  const StorageIndex storage = storage_index(args.c);
  std::byte* to = at(args.c, element);
  isa.convert[storage].store(sums, to, n);
  if (args.pre_activation) isa.convert[storage].store(sums, at(args.pre_activation, element), n);
  if (args.activation != Activation::none)
    activation_loop(isa.elementwise[storage], args.activation)(to, to, n);
}

Count row_bytes(const Matmul& args, const MatmulExtents& e) {
  return e.k * static_cast<Count>(size_of(args.a.dtype()));
}

/// Columns [j, j + cols) of the result, at most few_cols, from as many rows of b, the first of which is `b`.
void few_rows_by(const IsaTable& isa, const Matmul& args, const MatmulExtents& e, const std::byte* b, Count j,
                 Count cols) {
  const FewRowsOps& ops = isa.few_rows[storage_index(args.a)];
  float sums[few_rows * few_cols], bias[few_cols];
  if (args.bias) isa.convert[storage_index(args.bias)].load(at(args.bias, j), bias, cols);
  for (Count i = 0; i < e.m; i += few_rows) {
    const Count rows = std::min(few_rows, e.m - i);
    ops.products(at(args.a, i * e.k), e.k, rows, b, e.k, cols, e.k, sums, few_cols);
    for (Count r = 0; r < rows; ++r)
      finish_row(isa, args, (i + r) * e.n + j, sums + r * few_cols, args.bias ? bias : nullptr, cols);
  }
}

/// b goes by once; each row has the sums that it would have alone.
void multiply_few_rows(Device& device, const IsaTable& isa, const Matmul& args, const MatmulExtents& e) {
  // A chunk is worth a thread's waking, and there are some for each.
  const Count worth = ceil_div(Count{1} << 15, std::max<Count>(1, row_bytes(args, e)));
  const Count share = ceil_div(e.n, 8 * Count{device.arena().threads()});
  const Count grain = ceil_div(std::max(worth, share), 4) * 4;
  in_chunks(device, e.n, grain, [&](Count begin, Count count) {
    for (Count j = begin; j < begin + count; j += few_cols)
      few_rows_by(isa, args, e, at(args.b, j * e.k), j, std::min(few_cols, begin + count - j));
  });
}

/// Rows of a matrix in few bits are made some at a time, and stay in the caches until they are multiplied.
struct StoredTiles {
  Count part, rows, bytes;  ///< a part's elements; a tile's rows; bytes of its values
  Count count, together;    ///< tiles; how many a thread takes, one after the other
  StoredTiles(Device& device, const Matmul& args, const MatmulExtents& e)
      : part(stored_part(args.stored_b.format)) {
    constexpr Count worth = Count{1} << 15, at_once = 4;  // bytes; rows that products() takes
    const Count row = std::max<Count>(1, row_bytes(args, e)), threads = device.arena().threads();
    rows = std::clamp(worth / row / at_once * at_once, at_once, few_cols);
    // A tile may begin and end amid a part.
    bytes = rows * row + 2 * part * static_cast<Count>(size_of(args.a.dtype()));
    count = ceil_div(e.n, rows);
    together = ceil_div(count, 8 * threads);
    workspace = static_cast<std::size_t>(std::min(threads, ceil_div(count, together)) * bytes);
  }
  std::size_t workspace;  ///< of all threads
};

/// As multiply_few_rows().
void multiply_stored(Device& device, const IsaTable& isa, const Matmul& args, const MatmulExtents& e) {
  const StoredTiles tiles(device, args, e);
  const StoredMatrix& b = args.stored_b;
  const Count width = static_cast<Count>(size_of(args.a.dtype()));
  const device::Storage values = device.allocate(tiles.workspace, device::Category::workspace);
  const auto multiply_tile = [&](Count tile, std::byte* to) {
    const Count j = tile * tiles.rows, cols = std::min(tiles.rows, e.n - j);
    const Count first = j * e.k / tiles.part, end = ceil_div((j + cols) * e.k, tiles.part);
    read_stored(isa, b.format, b.blocks.raw(), first, end - first, storage_index(args.a), false, to);
    few_rows_by(isa, args, e, to + (j * e.k - first * tiles.part) * width, j, cols);
  };
  std::atomic<Count> next{0};
  const Count threads = static_cast<Count>(tiles.workspace) / tiles.bytes;
  device.arena().parallel_for(threads, 1, [&](Count thread, Count) {
    std::byte* to = values.data() + thread * tiles.bytes;
    for (Count begin; (begin = next.fetch_add(tiles.together, std::memory_order_relaxed)) < tiles.count;)
      for (Count tile = begin; tile < std::min(begin + tiles.together, tiles.count); ++tile)
        multiply_tile(tile, to);
  });
}

/// The same product of operands in bf16.
Matmul in_bf16(const Matmul& args, Tensor a, Tensor b) {
  Matmul plain = args;
  plain.a = std::move(a), plain.b = std::move(b);
  plain.fp8_a = plain.fp8_b = {};
  plain.trans_b = true;
  return plain;
}

}  // namespace

void CpuKernels::matmul(const Matmul& args) {
  const MatmulExtents e = check_matmul(args);
  if (e.m == 0 || e.n == 0) return;
  if (args.fp8_a)
    return matmul(
        in_bf16(args, decode_fp8(device_, isa_, args.fp8_a), decode_fp8(device_, isa_, args.fp8_b)));
  if (args.a.dtype() == DType::f64) return multiply_f64(*this, args, e);
  if (args.stored_b) return multiply_stored(device_, isa_, args, e);
  if (args.few_rows) return multiply_few_rows(device_, isa_, args, e);
  multiply_blocked(device_, isa_, args, e);
}

std::size_t matmul_workspace(Device& device, const Matmul& args) {
  const MatmulExtents e = check_matmul(args);
  if (e.m == 0 || e.n == 0) return 0;
  if (args.stored_b) return StoredTiles(device, args, e).workspace;
  if (args.few_rows || args.a.dtype() == DType::f64) return 0;
  if (args.fp8_a) {
    const auto decoded = [&](const Fp8Matrix& m) {
      return Tensor::empty(device, {m.rows, m.cols}, DType::bf16, device::Category::workspace);
    };
    const Matmul plain = in_bf16(args, decoded(args.fp8_a), decoded(args.fp8_b));
    return plain.a.bytes() + plain.b.bytes() + matmul_workspace(device, plain);
  }
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
  require_row_sums(x, out);
  const Count n = out.numel(), m = n == 0 ? 0 : x.numel() / n;
  if (n == 0) return;
  if (x.dtype() == DType::f64) return sum_strided(device_, isa_, x, 0, n, m, out, 0, n, accumulate);
  constexpr Count rows = summed_rows, cols = 512;
  const Count parts = row_sums(m);
  const Tensor partial = Tensor::zeros(device_, Shape{parts, n}, DType::f32, device::Category::workspace);
  float* sums = partial.data<float>();
  const ConvertOps& from = isa_.convert[storage_index(x)];
  device_.arena().parallel_for(m, rows, [&](Count begin, Count end) {
    for (Count i = begin; i < end; ++i) from.add_to(at(x, i * n), sums + begin / rows * n, n);
  });
  device_.arena().parallel_for(n, cols, [&](Count begin, Count end) {
    for (Count part = 1; part < parts; ++part)
      isa_.elementwise[storage_f32].add(sums + begin, sums + part * n + begin, sums + begin, end - begin);
    write_sums(isa_, sums + begin, out, begin, end - begin, accumulate);
  });
}

}  // namespace sherd::tensor::cpu
