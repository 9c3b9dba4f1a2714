#include "optim/split_master.h"

#include <cstring>

#include "base/cpu_isa.h"
#include "base/error.h"
#include "optim/isa/span_plan.h"

namespace sherd::optim {
namespace {

constexpr std::int64_t split_grain = 1 << 16;

const SplitTable& split_table(CpuIsa isa) {
  return loops_of(isa, avx512::split_table, avx2::split_table, portable::split_table);
}

}  // namespace

void split_master(const float* master, void* high, std::uint16_t* low, std::int64_t n, Arena& arena,
                  CpuIsa isa) {
  require(n >= 0 && (n == 0 || (master && high && low)), "split_master: no memory for ", n, " elements");
  arena.parallel_for(n, split_grain, [&](std::int64_t begin, std::int64_t end) {
    split_table(isa).split(master + begin, static_cast<std::uint16_t*>(high) + begin, low + begin,
                           end - begin);
  });
}

void join_master(const void* high, const std::uint16_t* low, float* master, std::int64_t n, Arena& arena,
                 CpuIsa isa) {
  require(n >= 0 && (n == 0 || (master && high && low)), "join_master: no memory for ", n, " elements");
  arena.parallel_for(n, split_grain, [&](std::int64_t begin, std::int64_t end) {
    split_table(isa).join(static_cast<const std::uint16_t*>(high) + begin, low + begin, master + begin,
                          end - begin);
  });
}

void round_masters(const float* master, void* to, DType dtype, std::int64_t n, Arena& arena) {
  arena.parallel_for(n, split_grain, [&](std::int64_t begin, std::int64_t end) {
    if (dtype == DType::bf16)
      for (std::int64_t i = begin; i < end; ++i) static_cast<bf16*>(to)[i] = round_master_to_bf16(master[i]);
    else if (dtype == DType::f16)
      for (std::int64_t i = begin; i < end; ++i) static_cast<f16*>(to)[i] = f16(master[i]);
    else
      std::memcpy(static_cast<float*>(to) + begin, master + begin,
                  static_cast<std::size_t>(end - begin) * sizeof(float));
  });
}

}  // namespace sherd::optim
