#include "simt/tensor_cores.h"

#include <algorithm>

#include "simt/simt.h"

namespace sherd::simt {
namespace {

constexpr unsigned all = 0xffffffffu;

/// The lanes' values of an exchange, kept past the next one.
struct Given {
  explicit Given(std::uint64_t mine) { std::copy_n(warp_exchange(all, mine), 32, words); }
  std::uint16_t element(int lane, int i) const { return static_cast<std::uint16_t>(words[lane] >> 16 * i); }
  std::uint64_t words[32];
};

std::uint64_t joined(unsigned low, unsigned high) {
  return low | static_cast<std::uint64_t>(high) << 32;
}

}  // namespace

// The PTX ISA's tables give the row and column of a lane's element i; here they are turned round: which lane
// has an element, and as which of its own.

void multiply_fragments(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                        float (*widen)(std::uint16_t)) {
  const Given left(joined(a[0], a[1])), right_of_left(joined(a[2], a[3])), right(joined(b[0], b[1]));
  const int lane = lane_id();
  for (int half = 0; half < 2; ++half) {
    float row[16];
    for (int k = 0; k < 16; ++k)
      row[k] = widen((k < 8 ? left : right_of_left).element(lane / 4 * 4 + k % 8 / 2, half * 2 + k % 2));
    for (int e = 0; e < 2; ++e) {
      const int column = lane % 4 * 2 + e;
      float sum = d[half * 2 + e];
      for (int k = 0; k < 16; ++k)
        sum += row[k] * widen(right.element(column * 4 + k % 8 / 2, k / 8 * 2 + k % 2));
      d[half * 2 + e] = sum;
    }
  }
}

void deal_matrices(unsigned (&to)[4], const std::uint64_t (&row)[2], bool transposed) {
  const Given first(row[0]), second(row[1]);
  const int lane = lane_id(), major = lane / 4, minor = lane % 4 * 2;
  for (int i = 0; i < 4; ++i) {
    const auto element = [&](int r, int c) -> unsigned {
      return (c < 4 ? first : second).element(i * 8 + r, c % 4);
    };
    to[i] = transposed ? element(minor, major) | element(minor + 1, major) << 16
                       : element(major, minor) | element(major, minor + 1) << 16;
  }
}

}  // namespace sherd::simt
