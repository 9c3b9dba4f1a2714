#include "tensor/cpu/gemm_blocks.h"

#include "base/cpu_isa.h"

namespace sherd::tensor::cpu {

const BlockProduct& block_product(DType stored) {
  static const std::unique_ptr<BlockProduct> f32 = make_dnnl_blocks(DType::f32);
  static const std::unique_ptr<BlockProduct> bf16 = [] {
    if (!cpu_has_bf16_products()) return std::unique_ptr<BlockProduct>();
    return dnnl_has_amx() ? make_dnnl_blocks(DType::bf16) : make_bf16_tiles();
  }();
  return stored == DType::bf16 && bf16 ? *bf16 : *f32;
}

const TransposeOps& transpose_ops() {
  switch (cpu_isa()) {
    case CpuIsa::avx512:
      return avx512::transpose;
    case CpuIsa::avx2:
      return avx2::transpose;
    case CpuIsa::portable:
      break;
  }
  return portable::transpose;
}

}  // namespace sherd::tensor::cpu
