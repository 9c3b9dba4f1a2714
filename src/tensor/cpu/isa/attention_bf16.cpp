#include <immintrin.h>

// For this file alone: a processor with AVX-512 may lack AVX512-BF16.
#if defined(SHERD_ISA_avx512)
#define SHERD_BF16_PRODUCTS
#pragma GCC target("avx512bf16")

#include "tensor/cpu/isa/attention_backward.h"

namespace sherd::tensor::cpu::avx512 {

const AttentionOps attention_bf16 = attention_ops<DotBf16>();

}  // namespace sherd::tensor::cpu::avx512
#endif
