#include "base/cpu_isa.h"

#include <cstdlib>
#include <cstring>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace sherd {
namespace {

bool capped_below(const char* const* allowed, int count) {
  const char* cap = std::getenv("DNNL_MAX_CPU_ISA");
  if (!cap || !*cap || !std::strcmp(cap, "ALL") || !std::strcmp(cap, "DEFAULT")) return false;
  for (int i = 0; i < count; ++i)
    if (!std::strcmp(cap, allowed[i])) return true;
  return false;
}

}  // namespace

CpuIsa cpu_isa() {
  static const CpuIsa isa = [] {
    constexpr const char* below_avx2[] = {"SSE41", "AVX"};
    constexpr const char* below_avx512[] = {"SSE41", "AVX", "AVX2", "AVX2_VNNI"};
    __builtin_cpu_init();
    // Everything that cmake/SherdRoom.cmake lets the compiler use for each set.
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512cd") &&
                        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512vl");
    if (avx512 && !capped_below(below_avx512, 4)) return CpuIsa::avx512;
    if (avx2 && !capped_below(below_avx2, 2)) return CpuIsa::avx2;
    return CpuIsa::portable;
  }();
  return isa;
}

std::string_view name_of(CpuIsa isa) {
  constexpr std::string_view names[] = {"portable", "avx2", "avx512"};
  return names[static_cast<int>(isa)];
}

bool cpu_has_bf16_products() {
  constexpr const char* below[] = {
      "SSE41",           "AVX", "AVX2", "AVX2_VNNI", "AVX512_MIC", "AVX512_MIC_4OPS", "AVX512_CORE",
      "AVX512_CORE_VNNI"};
  return cpu_isa() == CpuIsa::avx512 && __builtin_cpu_supports("avx512bf16") && !capped_below(below, 8);
}

bool cpu_has_bf16_tiles() {
  static const bool tiles = [] {
    constexpr const char* below[] = {"AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX2_VNNI_2"};
    if (!cpu_has_bf16_products() || capped_below(below, 3)) return false;
#if defined(__x86_64__) && defined(__linux__)
    unsigned a = 0, b = 0, c = 0, d = 0;
    constexpr unsigned amx_bf16 = 1u << 22, amx_tile = 1u << 24;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & amx_bf16) == 0 || (d & amx_tile) == 0) return false;
    constexpr long request_permission = 0x1023, tile_data = 18;  // of arch_prctl(2): Linux 5.16 and newer
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
    return false;
#endif
  }();
  return tiles;
}

}  // namespace sherd
