#include "tensor/cpu/isa/attention_backward.h"

namespace sherd::tensor::cpu::SHERD_ISA {

const AttentionOps attention_f32 = attention_ops<DotF32>();

}  // namespace sherd::tensor::cpu::SHERD_ISA
