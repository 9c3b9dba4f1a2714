#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>

#include "tensor/cpu/gemm_blocks.h"
#include "tensor/cpu/loops.h"

namespace sherd::tensor::cpu {
namespace {

constexpr Count panel_cols = 768;
static_assert(panel_cols <= stack_block);
constexpr Count max_depth = 4096;
constexpr Count depth_step = 3072;  ///< depths beyond max_depth are cut into about this much
/// Bytes of b packed at a time: a part of the last-level cache.
constexpr Count packed_group = Count{12} << 20;

/// Finishes rows of up to panel_cols fp32 sums: bias, accumulation, rounding, activation.
class Epilogue {
 public:
  Epilogue(const IsaTable& isa, const Matmul& args, Count n)
      : args_(args),
        isa_(isa),
        n_(n),
        add_(isa.elementwise[storage_f32].add),
        convert_(isa.convert[storage_index(args.c)]),
        elementwise_(isa.elementwise[storage_index(args.c)]) {}

  void add(const float* a, const float* b, float* out, Count n) const { add_(a, b, out, n); }

  /// sums[cols], at most stack_block, becomes columns [col, col + cols) of row `row` of c. `bias` holds fp32
  /// for these columns, or is null.
  void row(float* sums, const float* bias, Count row, Count col, Count cols) const {
    const std::size_t at = static_cast<std::size_t>(row * n_ + col) * size_of(args_.c.dtype());
    std::byte* out = args_.c.raw() + at;
    if (args_.fold)
      return fold_values(isa_, sums, *args_.fold, args_.c, row * n_ + col, cols, args_.accumulate);
    if (bias) add_(sums, bias, sums, cols);
    if (args_.accumulate) return convert_.accumulate(sums, out, cols);
    std::byte* before = this->before().raw() + at;
    convert_.store(sums, before, cols);
    activate(before, out, cols);
  }

  /// Where finished sums go before the activation.
  const Tensor& before() const { return args_.pre_activation ? args_.pre_activation : args_.c; }

  void activate(const std::byte* before, std::byte* out, Count cols) const {
    if (args_.activation != Activation::none)
      activation_loop(elementwise_, args_.activation)(before, out, cols);
    else if (before != out)
      std::memcpy(out, before, static_cast<std::size_t>(cols) * size_of(args_.c.dtype()));
  }

 private:
  const Matmul& args_;
  const IsaTable& isa_;
  Count n_;
  void (*add_)(const void*, const void*, void*, Count);
  const ConvertOps& convert_;
  const ElementwiseOps& elementwise_;
};

/// A product cut into blocks by its extents alone, so that sums have one order whatever the number of
/// threads: panels of b are packed once into a part of the last-level cache, and every block of rows meets
/// every panel.
class BlockedProduct {
 public:
  BlockedProduct(Device& device, const IsaTable& isa, const Matmul& args, const MatmulExtents& e)
      : device_(device),
        args_(args),
        e_(e),
        product_(block_product(args.a.dtype())),
        epilogue_(isa, args, e.n),
        load_(isa.convert[storage_index(args.a)].load) {
    panels_ = ceil_div(e.n, panel_cols);
    panel_ = std::min(e.n, ceil_div(ceil_div(e.n, panels_), 64) * 64);
    panels_ = ceil_div(e.n, panel_);
    depths_ = e.k <= max_depth ? 1 : ceil_div(e.k, depth_step);
    depth_ = depths_ == 1 ? e.k : ceil_div(ceil_div(e.k, depths_), 64) * 64;
    depths_ = ceil_div(e.k, depth_);
    rows_ = std::min(e.m, product_.rows());
    converts_ = product_.dtype() != args.a.dtype();
    element_ = size_of(args.a.dtype());
    for (const Count cols : {panel_, e.n - (panels_ - 1) * panel_})
      for (const Count depth : {depth_, depth_of(depths_ - 1)})
        packed_bytes_ = std::max(packed_bytes_, product_.packed_bytes(block(rows_, cols, depth)));
    packed_bytes_ = ceil_div(packed_bytes_, 4096) * 4096;
    largest_group_ = std::min(panels_, std::max<Count>(1, packed_group / packed_bytes_));
  }

  /// The most that run() holds with `threads` at work.
  std::size_t workspace(Count threads) const {
    Count packing = 0, multiplying = 0;
    for (const Count depth : {depth_, depth_of(depths_ - 1)}) {
      packing = std::max(packing, packing_bytes(depth));
      multiplying = std::max(multiplying, multiplying_bytes(depth));
    }
    const Count packs = pack_parts() * largest_group_, products = ceil_div(e_.m, rows_) * largest_group_;
    return static_cast<std::size_t>(
        largest_group_ * packed_bytes_ + partial_bytes() +
        std::max(std::min(threads, packs) * packing, std::min(threads, products) * multiplying));
  }

  void run() {
    packed_ = scratch(largest_group_ * packed_bytes_);
    if (depths_ > 1) partial_ = scratch(partial_bytes());
    for (Count first = 0; first < panels_; first += largest_group_) {
      group_ = std::min(largest_group_, panels_ - first);
      for (Count d = 0; d < depths_; ++d) {
        const Count parts = pack_parts(), blocks = ceil_div(e_.m, rows_);
        in_order(parts * group_, [&](Count at) { pack(first, at / parts, at % parts * pack_step(), d); });
        in_order(blocks * group_, [&](Count at) { multiply(first, at / blocks, at % blocks, d); });
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

  Count partial_bytes() const {
    return depths_ > 1 ? e_.m * largest_group_ * product_.c_stride(panel_) * 4 : 0;
  }

  /// body(task) for every task, each taken by the first free thread: whoever comes late does less.
  template <class Body>
  void in_order(Count tasks, const Body& body) {
    std::atomic<Count> next{0};
    arena().parallel_for(std::min<Count>(arena().threads(), tasks), 1, [&](Count, Count) {
      for (Count task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) body(task);
    });
  }

  /// Lines of a panel of b, as they lie in memory, that are packed at a time, and into how many parts that
  /// cuts a panel.
  Count pack_step() const {
    const Count step = product_.pack_step(args_.trans_b), lines = args_.trans_b ? panel_ : depth_;
    return step > 0 ? std::min(step, lines) : lines;
  }
  Count pack_parts() const { return ceil_div(args_.trans_b ? panel_ : depth_, pack_step()); }

  Count b_stride() const { return args_.trans_b ? e_.k : e_.n; }
  /// Elements between the lines of b that are packed; another number than b_stride() asks for a copy.
  Count packed_stride(Count cols, Count depth) const {
    if (args_.trans_b) return product_.b_stride(depth, converts_ ? 0 : b_stride());
    return converts_ ? cols : b_stride();
  }
  /// Bytes of the copy of b that packing a part of a panel needs.
  Count packing_bytes(Count depth) const {
    const Count wanted = packed_stride(panel_, depth);
    if (!converts_ && wanted == b_stride()) return 0;
    return std::min(pack_step(), args_.trans_b ? panel_ : depth) * wanted *
           static_cast<Count>(size_of(product_.dtype()));
  }

  Count a_stride(Count count) const {
    return product_.a_stride(count, args_.trans_a || converts_ ? 0 : e_.k);
  }
  /// Bytes of the copies that rows_of_a() makes of `count` columns.
  Count rows_bytes(Count count) const {
    GemmBlock shape = block(rows_, panel_, depth_);
    shape.count = count;
    if (const Count packed = args_.trans_a ? product_.packed_left_bytes(shape) : 0; packed > 0)
      return packed + (converts_ ? count * rows_ * 4 : 0);
    const Count stride = a_stride(count), width = static_cast<Count>(size_of(product_.dtype()));
    if (!args_.trans_a) return !converts_ && stride == e_.k ? 0 : rows_ * stride * width;
    return rows_ * even_stride(stride, count) * 2;
  }
  static Count even_stride(Count stride, Count count) { return std::max(stride, ceil_div(count, 2) * 2); }

  /// The depth that the product takes at a time: all of it, or equal parts.
  Count depth_step_of(Count depth) const {
    if (product_.depth_step() == 0) return depth;
    return ceil_div(ceil_div(depth, ceil_div(depth, product_.depth_step())), 64) * 64;
  }
  /// The product can do what becomes of its sums (GemmFinish), up to the activation.
  bool finishes() const {
    if (args_.c.dtype() == DType::f16) return false;
    return !args_.fold || folds_bf16() || *args_.fold == args_.c.dtype();
  }
  /// The folded product is bf16.
  bool folds_bf16() const {
    if (args_.c.dtype() == DType::bf16) return args_.fold == DType::bf16 || args_.fold == DType::f32;
    return args_.fold == DType::bf16;
  }
  /// Bytes that multiply() needs for a block.
  Count multiplying_bytes(Count depth) const {
    const Count step = depth_step_of(depth);
    const bool tile = product_.depth_step() == 0 || (depths_ == 1 && (step < depth || !finishes()));
    return (tile ? rows_ * product_.c_stride(panel_) * 4 : 0) + rows_bytes(std::min(step, depth));
  }

  /// Packs the part of panel first + p that begins at its line `begin`.
  void pack(Count first, Count p, Count begin, Count d) {
    const GemmBlock shape = block(rows_, cols_of(first + p), depth_of(d));
    const Count lines = std::min(pack_step(), (args_.trans_b ? shape.cols : shape.depth) - begin);
    if (lines <= 0) return;  // the last panel is narrower, the last depth smaller
    const GemmPackPart part = args_.trans_b ? GemmPackPart{begin, lines, 0, shape.depth}
                                            : GemmPackPart{0, shape.cols, begin, lines};
    const Count stride = b_stride(), length = args_.trans_b ? shape.depth : shape.cols;
    const Count col = (first + p) * panel_ + part.col, at = d * depth_ + part.first;
    const std::byte* from = args_.b.raw() + (args_.trans_b ? col * stride + at : at * stride + col) *
                                                static_cast<Count>(element_);
    const Count wanted = packed_stride(shape.cols, shape.depth);
    device::Storage copy;
    if (converts_ || wanted != stride) from = copy_lines(from, stride, lines, length, wanted, copy);
    product_.pack(shape, part, from, args_.trans_b ? 1 : wanted, args_.trans_b ? wanted : 1,
                  packed_.data() + p * packed_bytes_);
  }

  /// Lines of the operands' dtype brought to the product's, `to_stride` elements apart with zeros between.
  const std::byte* copy_lines(const std::byte* from, Count stride, Count lines, Count length, Count to_stride,
                              device::Storage& copy) {
    const auto element = static_cast<Count>(element_),
               to_element = static_cast<Count>(size_of(product_.dtype()));
    copy = scratch(lines * to_stride * to_element);
    for (Count i = 0; i < lines; ++i) {
      std::byte* to = copy.data() + i * to_stride * to_element;
      const std::byte* line = from + i * stride * element;
      if (converts_)
        load_(line, reinterpret_cast<float*>(to), length);
      else
        std::memcpy(to, line, static_cast<std::size_t>(length * element));
      std::memset(to + length * to_element, 0, static_cast<std::size_t>((to_stride - length) * to_element));
    }
    return copy.data();
  }

  /// The block's rows of a, shape.count elements from `depth` on, as the product takes them, setting
  /// shape.a_stride; `copy` keeps what had to be made.
  const std::byte* rows_of_a(GemmBlock& shape, Count row, Count depth, device::Storage& copy) {
    const Count stride = args_.trans_a ? e_.m : e_.k;
    const std::byte* from = args_.a.raw() + (args_.trans_a ? depth * stride + row : row * stride + depth) *
                                                static_cast<Count>(element_);
    if (const Count bytes = args_.trans_a ? product_.packed_left_bytes(shape) : 0; bytes > 0) {
      device::Storage wide;
      if (converts_) from = copy_lines(from, stride, shape.count, shape.rows, shape.rows, wide);
      copy = scratch(bytes);
      product_.pack_left(shape, from, converts_ ? shape.rows : stride, copy.data());
      shape.a_stride = 0;
      return copy.data();
    }
    shape.a_stride = a_stride(shape.count);
    if (args_.trans_a) return transposed_rows(shape, from, stride, copy);
    if (!converts_ && shape.a_stride == stride) return from;
    return copy_lines(from, stride, shape.rows, shape.count, shape.a_stride, copy);
  }

  /// For the product of bf16 that takes rows alone: on AMX.
  const std::byte* transposed_rows(const GemmBlock& shape, const std::byte* from, Count stride,
                                   device::Storage& copy) {
    const Count even = even_stride(shape.a_stride, shape.count);
    copy = scratch(shape.rows * even * 2);
    avx512::transpose_pairs(from, stride, shape.count, shape.rows, copy.data(), even / 2);
    if (even != shape.a_stride)
      for (Count i = 1; i < shape.rows; ++i)
        std::memmove(copy.data() + i * shape.a_stride * 2, copy.data() + i * even * 2,
                     static_cast<std::size_t>(shape.count) * 2);
    return copy.data();
  }

  void multiply(Count first, Count p, Count b, Count d) {
    const Count row = b * rows_, col = (first + p) * panel_, cols = cols_of(first + p);
    GemmBlock shape = block(std::min(rows_, e_.m - row), cols, depth_of(d));
    // The block's place among the partial sums of depths that come one after the other.
    float* partial = depths_ == 1 ? nullptr
                                  : reinterpret_cast<float*>(partial_.data()) +
                                        (row * group_ + p * shape.rows) * product_.c_stride(panel_);
    std::array<float, panel_cols + 64> bias{};
    const bool last = d + 1 == depths_;
    if (args_.bias && last) load_(args_.bias.raw() + col * static_cast<Count>(element_), bias.data(), cols);
    const float* added = args_.bias ? bias.data() : nullptr;
    const std::byte* packed = packed_.data() + p * packed_bytes_;
    if (product_.depth_step() > 0)
      multiply_in_parts(shape, row, col, d, packed, partial, added);
    else
      multiply_at_once(shape, row, col, d, packed, partial, added);
  }

  void multiply_in_parts(GemmBlock& shape, Count row, Count col, Count d, const std::byte* packed,
                         float* sums, const float* bias) {
    const Count step = depth_step_of(shape.depth);
    device::Storage tile;
    if (!sums && (step < shape.depth || !finishes())) {
      tile = scratch(shape.rows * product_.c_stride(shape.cols) * 4);
      sums = reinterpret_cast<float*>(tile.data());
    }
    const Tensor& to = epilogue_.before();
    const GemmFinish finish{.out = at(to, row * e_.n + col),
                            .out_stride = e_.n,
                            .wide = to.dtype() == DType::f32,
                            .accumulate = args_.accumulate,
                            .folds = folds_bf16(),
                            .bias = bias};
    for (; shape.first < shape.depth; shape.first += step) {
      shape.count = std::min(step, shape.depth - shape.first);
      shape.add = d > 0 || shape.first > 0;
      const bool last = d + 1 == depths_ && shape.first + step >= shape.depth;
      device::Storage copy;
      const std::byte* a = rows_of_a(shape, row, d * depth_ + shape.first, copy);
      product_.multiply(shape, a, packed, sums, last && finishes() ? &finish : nullptr);
    }
    if (d + 1 < depths_) return;
    if (!finishes()) {
      for (Count i = 0; i < shape.rows; ++i)
        epilogue_.row(sums + i * product_.c_stride(shape.cols), bias, row + i, col, shape.cols);
    } else if (args_.activation != Activation::none || args_.pre_activation) {
      for (Count i = row; i < row + shape.rows; ++i)
        epilogue_.activate(at(to, i * e_.n + col), at(args_.c, i * e_.n + col), shape.cols);
    }
  }

  void multiply_at_once(GemmBlock& shape, Count row, Count col, Count d, const std::byte* packed,
                        float* partial, const float* bias) {
    const Count stride = product_.c_stride(shape.cols);
    const device::Storage tile = scratch(shape.rows * stride * 4);
    auto* sums = reinterpret_cast<float*>(tile.data());
    device::Storage copy;
    shape.count = shape.depth;
    const std::byte* a = rows_of_a(shape, row, d * depth_, copy);
    product_.multiply(shape, a, packed, sums, nullptr);
    // Partial sums of earlier depths come first, so the order is that of k.
    if (d > 0) epilogue_.add(partial, sums, sums, shape.rows * stride);
    if (d + 1 < depths_) return std::memcpy(partial, sums, tile.bytes()), void();
    for (Count i = 0; i < shape.rows; ++i) epilogue_.row(sums + i * stride, bias, row + i, col, shape.cols);
  }

  Device& device_;
  const Matmul& args_;
  const MatmulExtents e_;
  const BlockProduct& product_;
  const Epilogue epilogue_;
  void (*load_)(const void*, float*, Count);
  Count panels_, panel_, depths_, depth_, rows_, packed_bytes_ = 0;
  Count largest_group_ = 0, group_ = 0;  ///< panels packed at a time: at most, and now
  bool converts_;
  std::size_t element_;
  device::Storage packed_, partial_;
};

/// The product of an empty inner extent: zeros, plus what the epilogue adds.
void multiply_empty(Device& device, const IsaTable& isa, const Matmul& args, const MatmulExtents& e) {
  const Tensor bias = Tensor::zeros(device, Shape{e.n}, DType::f32, device::Category::workspace);
  if (args.bias) isa.convert[storage_index(args.bias)].load(args.bias.raw(), bias.data<float>(), e.n);
  const Epilogue epilogue(isa, args, e.n);
  for (Count i = 0; i < e.m; ++i)
    for (Count col = 0; col < e.n; col += stack_block) {
      float sums[stack_block] = {};
      epilogue.row(sums, bias.data<float>() + col, i, col, std::min(stack_block, e.n - col));
    }
}

}  // namespace

void multiply_blocked(Device& device, const IsaTable& isa, const Matmul& args, const MatmulExtents& extents) {
  if (extents.k == 0) return multiply_empty(device, isa, args, extents);
  BlockedProduct(device, isa, args, extents).run();
}

std::size_t blocked_workspace(Device& device, const IsaTable& isa, const Matmul& args,
                              const MatmulExtents& extents) {
  if (extents.k == 0) return static_cast<std::size_t>(2 * extents.n) * sizeof(float);
  return BlockedProduct(device, isa, args, extents).workspace(device.arena().threads());
}

}  // namespace sherd::tensor::cpu
