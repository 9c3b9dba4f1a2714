#include "bench/suite/limits.h"

#include "base/cpu_isa.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#endif

namespace sherd::bench {
namespace {

using Count = std::int64_t;

#if defined(__x86_64__)
// Fourteen independent sums hide the latency of every instruction that is timed here; registers 14 and 15 are
// the factors.
#define SHERD_SUMS(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13)
#define SHERD_BODY(ZERO, STEP, END) \
  SHERD_SUMS(ZERO) ZERO(14) ZERO(15) "1:\n" SHERD_SUMS(STEP) SHERD_SUMS(STEP) "dec %0\njnz 1b\n" END
#define SHERD_LOOP(ZERO, STEP, END)                                                                        \
  asm volatile(SHERD_BODY(ZERO, STEP, END)                                                                 \
               : "+r"(n)                                                                                   \
               :                                                                                           \
               : "memory", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", \
                 "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15")
#define SHERD_ZERO(i) "vxorps %%xmm" #i ",%%xmm" #i ",%%xmm" #i "\n"
#define SHERD_ZERO_SSE(i) "xorps %%xmm" #i ",%%xmm" #i "\n"
#define SHERD_FMA_512(i) "vfmadd231ps %%zmm14,%%zmm15,%%zmm" #i "\n"
#define SHERD_FMA_256(i) "vfmadd231ps %%ymm14,%%ymm15,%%ymm" #i "\n"
#define SHERD_MUL_ADD(i) "mulps %%xmm14,%%xmm" #i "\naddps %%xmm15,%%xmm" #i "\n"
#define SHERD_DOT_512(i) "vdpbf16ps %%zmm14,%%zmm15,%%zmm" #i "\n"
constexpr double steps = 28;
[[gnu::target("avx512f")]] void fma_512(Count n) {
  SHERD_LOOP(SHERD_ZERO, SHERD_FMA_512, "vzeroupper");
}
[[gnu::target("avx512f")]] void dot_512(Count n) {
  SHERD_LOOP(SHERD_ZERO, SHERD_DOT_512, "vzeroupper");
}
[[gnu::target("avx2")]] void fma_256(Count n) {
  SHERD_LOOP(SHERD_ZERO, SHERD_FMA_256, "vzeroupper");
}
void mul_add_128(Count n) {
  SHERD_LOOP(SHERD_ZERO_SSE, SHERD_MUL_ADD, "");
}

// AMX: four sums of 16 × 16, each turn adding four products of depth 32.
[[gnu::target("amx-tile,amx-bf16")]] void amx_bf16(Count n) {
  // Static: GCC 12's _tile_loadconfig() says that it reads 8 bytes, so of a local the other stores go
  // missing.
  static constexpr struct alignas(64) {
    std::uint8_t palette = 1, start = 0, reserved[14] = {};
    std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64};
    std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16};
  } config;
  _tile_loadconfig(&config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  for (; n > 0; --n) {
    _tile_dpbf16ps(0, 4, 5);
    _tile_dpbf16ps(1, 4, 5);
    _tile_dpbf16ps(2, 4, 5);
    _tile_dpbf16ps(3, 4, 5);
  }
  _tile_release();
}
constexpr double amx_flops = 4 * 2 * 16 * 16 * 32;

/// Whether the processor has AMX, oneDNN may use it and the kernel lets this process.
bool amx_usable() {
  const char* cap = std::getenv("DNNL_MAX_CPU_ISA");
  if (cap && *cap && std::strcmp(cap, "ALL") && std::strcmp(cap, "DEFAULT") && !std::strstr(cap, "AMX"))
    return false;
  constexpr long request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
         ::syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}
#endif

}  // namespace

RegisterPeak register_peak(DType dtype) {
#if defined(__x86_64__)
  if (dtype == DType::bf16 && cpu_has_bf16_products()) {
    if (amx_usable()) return {amx_bf16, amx_flops, "AMX bf16 products"};
    return {dot_512, steps * 64, "AVX-512 bf16 dot products"};
  }
  switch (cpu_isa()) {
    case CpuIsa::avx512:
      return {fma_512, steps * 32, "AVX-512 fp32 multiply-adds"};
    case CpuIsa::avx2:
      return {fma_256, steps * 16, "AVX2 fp32 multiply-adds"};
    case CpuIsa::portable:
      return {mul_add_128, steps * 8, "SSE fp32 products and sums"};
  }
#endif
  return {};
}

double run_peak(const RegisterPeak& peak, Arena& arena, double flops) {
  // Eight pieces per thread, so that one that comes late leaves its share to the others.
  const Count pieces = Count{8} * arena.threads(),
              turns = static_cast<Count>(flops / peak.flops) / pieces + 1;
  arena.parallel_for(pieces, 1, [&](Count, Count) { peak.loop(turns); });
  return peak.flops * static_cast<double>(turns * pieces);
}

}  // namespace sherd::bench
