#include "tensor/cpu/isa/gemm_tiles.h"

namespace sherd::tensor::cpu::SHERD_ISA {

const GemmOps gemm_f32 = gemm_ops<DotF32>();

}  // namespace sherd::tensor::cpu::SHERD_ISA
