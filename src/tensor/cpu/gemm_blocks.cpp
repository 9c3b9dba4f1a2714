#include "tensor/cpu/gemm_blocks.h"

#include "base/cpu_isa.h"

namespace sherd::tensor::cpu {

const BlockProduct& block_product(DType stored) {
  static const std::unique_ptr<BlockProduct> f32 = make_f32_tiles(cpu_isa());
  static const std::unique_ptr<BlockProduct> bf16 = [] {
    if (!cpu_has_bf16_products()) return std::unique_ptr<BlockProduct>();
    return dnnl_has_amx() ? make_dnnl_blocks() : make_bf16_tiles();
  }();
  return stored == DType::bf16 && bf16 ? *bf16 : *f32;
}

}  // namespace sherd::tensor::cpu
