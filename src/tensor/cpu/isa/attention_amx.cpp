#include <immintrin.h>

// For this file alone: a processor with AVX512-BF16 may lack AMX.
#if defined(SHERD_ISA_avx512)
#define SHERD_BF16_PRODUCTS
#pragma GCC target("avx512bf16,amx-tile,amx-bf16")

#include "tensor/cpu/isa/tiles_amx.h"
// First the products, then who takes them.
#include "tensor/cpu/isa/attention_backward.h"

namespace sherd::tensor::cpu::avx512 {

const AttentionOps attention_amx = attention_ops<DotAmx>();

}  // namespace sherd::tensor::cpu::avx512
#endif
