#include "tensor/cpu/isa/attention_loops.h"

namespace sherd::tensor::cpu::SHERD_ISA {

const AttentionOps attention_f32 = AttentionLoops<DotF32>::ops();

}  // namespace sherd::tensor::cpu::SHERD_ISA
