#include "base/cpu_isa.h"
#include "base/error.h"
#include "tensor/cpu/gemm_blocks.h"
#include "tensor/cpu/isa/gemm.h"

namespace sherd::tensor::cpu {
namespace {

/// Register tiles over packed panels. A part of depth_step brings slivers of b that stay in the first-level
/// cache, and `rows` rows of a that stay in the second.
class Tiles final : public BlockProduct {
 public:
  Tiles(DType dtype, const GemmOps& ops, std::int64_t depth_step, std::int64_t rows)
      : dtype_(dtype), ops_(ops), depth_step_(depth_step), rows_(rows) {}

  DType dtype() const override { return dtype_; }
  std::int64_t rows() const override { return rows_; }
  std::int64_t a_stride(std::int64_t depth, std::int64_t stride) const override {
    if (stride > 0 && whole_units(stride) && whole_units(depth) && spread(stride)) return stride;
    const std::int64_t line = 16 * ops_.per_unit, copied = up_to(depth, line);
    return spread(copied + line) ? copied + line : copied + 2 * line;
  }
  std::int64_t b_stride(std::int64_t depth, std::int64_t stride) const override {
    return stride > 0 && whole_units(stride) && whole_units(depth) ? stride : units(depth) * ops_.per_unit;
  }
  std::int64_t c_stride(std::int64_t cols) const override { return up_to(cols, ops_.sliver); }

  std::int64_t depth_step() const override { return depth_step_; }

  std::int64_t packed_bytes(const GemmBlock& block) const override {
    return up_to(block.cols, ops_.sliver) * units(block.depth) * 4;
  }

  std::int64_t pack_step(bool along_depth) const override { return along_depth ? 64 : 128; }

  void pack(const GemmBlock& block, const GemmPackPart& part, const void* b, std::int64_t depth_stride,
            std::int64_t col_stride, void* packed) const override {
    const std::int64_t sliver_units = units(block.depth);
    auto* to = static_cast<std::byte*>(packed) +
               (part.col * sliver_units + part.first / ops_.per_unit * ops_.sliver) * 4;
    if (col_stride == 1) return ops_.pack_columns(b, depth_stride, part.count, part.cols, to, sliver_units);
    ops_.pack_rows(b, col_stride / ops_.per_unit, sliver_units, part.cols, to);
  }

  std::int64_t packed_left_bytes(const GemmBlock& block) const override {
    return up_to(block.rows, ops_.left_sliver) * units(block.count) * 4;
  }
  void pack_left(const GemmBlock& block, const void* a, std::int64_t stride, void* packed) const override {
    ops_.pack_left(a, stride, block.count, block.rows, packed);
  }

  void multiply(const GemmBlock& block, const void* a, const void* packed, float* c,
                const GemmFinish* finish) const override {
    const GemmPart part{units(block.depth), block.first / ops_.per_unit, units(block.count), block.add};
    ops_.multiply(a, block.a_stride / ops_.per_unit, block.rows, packed, part, block.cols, c,
                  c_stride(block.cols), finish);
  }

 private:
  static std::int64_t up_to(std::int64_t n, std::int64_t step) { return (n + step - 1) / step * step; }
  std::int64_t units(std::int64_t depth) const { return (depth + ops_.per_unit - 1) / ops_.per_unit; }
  /// The rows of a tile, this many elements apart, do not lie on the same sets of the first-level cache.
  /// (bf16's are few enough there.)
  bool spread(std::int64_t stride) const { return ops_.per_unit > 1 || stride % 1024 != 0; }
  bool whole_units(std::int64_t elements) const { return elements % ops_.per_unit == 0; }

  const DType dtype_;
  const GemmOps& ops_;
  const std::int64_t depth_step_, rows_;
};

}  // namespace

std::unique_ptr<BlockProduct> make_bf16_tiles() {
  require(cpu_has_bf16_products(), "matmul: the bf16 tiles need a processor with AVX512-BF16");
  return std::make_unique<Tiles>(DType::bf16, avx512::gemm_bf16, 1536, 128);
}

std::unique_ptr<BlockProduct> make_f32_tiles(CpuIsa isa) {
  static constexpr const GemmOps* ops[] = {&portable::gemm_f32, &avx2::gemm_f32, &avx512::gemm_f32};
  static constexpr std::int64_t rows[] = {128, 192, 256};
  return std::make_unique<Tiles>(DType::f32, *ops[static_cast<int>(isa)], 384, rows[static_cast<int>(isa)]);
}

const BlockProduct& block_product(DType stored) {
  static const std::unique_ptr<BlockProduct> f32 = make_f32_tiles(cpu_isa());
  static const std::unique_ptr<BlockProduct> bf16 = [] {
    if (!cpu_has_bf16_products()) return std::unique_ptr<BlockProduct>();
    return dnnl_has_amx() ? make_dnnl_blocks() : make_bf16_tiles();
  }();
  return stored == DType::bf16 && bf16 ? *bf16 : *f32;
}

}  // namespace sherd::tensor::cpu
