#include "simt/tensor_cores.h"

#include <cstring>

#include "simt/simt.h"

namespace sherd::simt {

// The PTX ISA's tables give the row and column of a lane's element i; here they are turned round: which lane
// has an element, and as which of its own.

void multiply_fragments(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                        float (*widen)(std::uint16_t)) {
  LaneRecord mine;
  const auto widen_pair = [&](unsigned pair, float* to) {
    to[0] = widen(static_cast<std::uint16_t>(pair)), to[1] = widen(static_cast<std::uint16_t>(pair >> 16));
  };
  for (int i = 0; i < 4; ++i) widen_pair(a[i], mine.left + 2 * i);
  for (int i = 0; i < 2; ++i) widen_pair(b[i], mine.right + 2 * i);
  const LaneRecord* const lanes = warp_exchange(mine);
  const int lane = lane_id();
  for (int half = 0; half < 2; ++half) {
    float row[16];
    for (int k = 0; k < 16; ++k)
      row[k] = lanes[lane / 4 * 4 + k % 8 / 2].left[(half + k / 8 * 2) * 2 + k % 2];
    for (int e = 0; e < 2; ++e) {
      const int column = lane % 4 * 2 + e;
      float sum = d[half * 2 + e];
      for (int k = 0; k < 16; ++k) sum += row[k] * lanes[column * 4 + k % 8 / 2].right[k / 8 * 2 + k % 2];
      d[half * 2 + e] = sum;
    }
  }
}

void deal_matrices(unsigned (&to)[4], const std::uint64_t (&row)[2], bool transposed) {
  LaneRecord mine;
  std::memcpy(mine.left, row, sizeof row);
  const LaneRecord* const lanes = warp_exchange(mine);
  const int lane = lane_id(), major = lane / 4, minor = lane % 4 * 2;
  for (int i = 0; i < 4; ++i) {
    const auto element = [&](int r, int c) -> unsigned {
      std::uint16_t bits;
      std::memcpy(&bits, reinterpret_cast<const char*>(lanes[i * 8 + r].left) + 2 * c, sizeof bits);
      return bits;
    };
    to[i] = transposed ? element(minor, major) | element(minor + 1, major) << 16
                       : element(major, minor) | element(major, minor + 1) << 16;
  }
}

}  // namespace sherd::simt
