#include "optim/isa/streams.h"
#include "optim/isa/tables.h"

namespace sherd::optim::SHERD_ISA {
namespace {

void split(const float* master, std::uint16_t* high, std::uint16_t* low, std::int64_t n) {
  std::int64_t i = 0;
  for (; i + turn <= n; i += turn) {
    const Pair p = load_pair<false>(master + i);
    write_high<false>(high + i, p, false);
    write_low<false>(low + i, p);
  }
  for (; i < n; ++i) {
    std::uint32_t bits;
    __builtin_memcpy(&bits, master + i, sizeof bits);
    high[i] = static_cast<std::uint16_t>((bits + 0x8000u) >> 16);
    low[i] = static_cast<std::uint16_t>(bits);
  }
}

void join(const std::uint16_t* high, const std::uint16_t* low, float* master, std::int64_t n) {
  std::int64_t i = 0;
  for (; i + turn <= n; i += turn) store_pair<false>(master + i, join_halves<false>(high + i, low + i));
  for (; i < n; ++i) {
    const std::uint32_t upper = (high[i] - (low[i] >> 15)) & 0xffffu, bits = upper << 16 | low[i];
    __builtin_memcpy(master + i, &bits, sizeof bits);
  }
}

}  // namespace

const SplitTable split_table = {split, join};

}  // namespace sherd::optim::SHERD_ISA
