#include "tensor/cpu/gemm_blocks.h"

#include "base/cpu_isa.h"

namespace sherd::tensor::cpu {

const BlockProduct& block_product(DType stored) {
  static const std::unique_ptr<BlockProduct> f32 = make_dnnl_blocks(DType::f32);
  static const std::unique_ptr<BlockProduct> bf16 =
      cpu_has_bf16_products() ? make_dnnl_blocks(DType::bf16) : nullptr;
  return stored == DType::bf16 && bf16 ? *bf16 : *f32;
}

}  // namespace sherd::tensor::cpu
