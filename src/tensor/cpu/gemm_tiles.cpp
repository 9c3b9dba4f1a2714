#include "base/cpu_isa.h"
#include "base/error.h"
#include "tensor/cpu/gemm_blocks.h"
#include "tensor/cpu/isa/gemm.h"

namespace sherd::tensor::cpu {
namespace {

class Bf16Tiles final : public BlockProduct {
 public:
  DType dtype() const override { return DType::bf16; }
  std::int64_t rows() const override { return 128; }
  std::int64_t a_stride(std::int64_t depth, std::int64_t stride) const override {
    if (stride > 0 && stride % 2 == 0 && depth % 2 == 0) return stride;
    return (depth + 31) / 32 * 32 + 32;  // rows on different sets of the cache
  }
  std::int64_t b_stride(std::int64_t depth, std::int64_t stride) const override {
    return stride > 0 && stride % 2 == 0 && depth % 2 == 0 ? stride : units(depth) * 2;
  }
  std::int64_t c_stride(std::int64_t cols) const override { return slivers(cols); }

  std::int64_t depth_step() const override { return 1536; }

  std::int64_t packed_bytes(const GemmBlock& block) const override {
    return slivers(block.cols) * units(block.depth) * 4;
  }

  std::int64_t pack_step(bool along_depth) const override { return along_depth ? 64 : 128; }

  void pack(const GemmBlock& block, const GemmPackPart& part, const void* b, std::int64_t depth_stride,
            std::int64_t col_stride, void* packed) const override {
    const std::int64_t sliver_units = units(block.depth);
    auto* to = static_cast<std::byte*>(packed) + (part.col * sliver_units + part.first / 2 * ops_.sliver) * 4;
    if (col_stride == 1) return ops_.pack_columns(b, depth_stride, part.count, part.cols, to, sliver_units);
    ops_.pack_rows(b, col_stride / 2, sliver_units, part.cols, to);
  }

  std::int64_t packed_left_bytes(const GemmBlock& block) const override {
    return slivers(block.rows) * units(block.count) * 4;
  }
  void pack_left(const GemmBlock& block, const void* a, std::int64_t stride, void* packed) const override {
    ops_.pack_columns(a, stride, block.count, block.rows, packed, units(block.count));
  }

  void multiply(const GemmBlock& block, const void* a, const void* packed, float* c,
                const GemmFinish* finish) const override {
    const GemmPart part{units(block.depth), block.first / 2, units(block.count), block.add};
    ops_.multiply(a, block.a_stride / 2, block.rows, packed, part, block.cols, c, c_stride(block.cols),
                  finish);
  }

 private:
  static std::int64_t units(std::int64_t depth) { return (depth + 1) / 2; }
  std::int64_t slivers(std::int64_t cols) const {
    return (cols + ops_.sliver - 1) / ops_.sliver * ops_.sliver;
  }

  const GemmOps& ops_ = avx512::gemm_bf16;
};

}  // namespace

std::unique_ptr<BlockProduct> make_bf16_tiles() {
  require(cpu_has_bf16_products(), "matmul: the bf16 tiles need a processor with AVX512-BF16");
  return std::make_unique<Bf16Tiles>();
}

}  // namespace sherd::tensor::cpu
