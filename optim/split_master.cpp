#include "optim/split_master.h"

#include <bit>

#include "base/error.h"

namespace sherd::optim {
namespace {

constexpr std::int64_t grain = 1 << 16;

}  // namespace

void split_master(const float* master, void* high, std::uint16_t* low, std::int64_t n, Arena& arena) {
  require(n == 0 || (master && high && low), "split_master: no memory for ", n, " elements");
  arena.parallel_for(n, grain, [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const auto bits = std::bit_cast<std::uint32_t>(master[i]);
      static_cast<std::uint16_t*>(high)[i] = static_cast<std::uint16_t>((bits + 0x8000u) >> 16);
      low[i] = static_cast<std::uint16_t>(bits);
    }
  });
}

void join_master(const void* high, const std::uint16_t* low, float* master, std::int64_t n, Arena& arena) {
  require(n == 0 || (master && high && low), "join_master: no memory for ", n, " elements");
  arena.parallel_for(n, grain, [=](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const std::uint32_t bits = static_cast<const std::uint16_t*>(high)[i] - (low[i] >> 15u);
      master[i] = std::bit_cast<float>(bits << 16 | low[i]);
    }
  });
}

}  // namespace sherd::optim
