#include "base/random.h"

#include <cmath>
#include <numbers>

namespace sherd {

std::uint64_t stable_hash(std::string_view text) {
  std::uint64_t hash = 0xcbf29ce484222325ull;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  return mix_seed(hash, text.size());
}

float uniform_at(RandomKey key, std::uint64_t index) {
  return static_cast<float>(philox(key, index / 4)[index % 4] >> 8) * 0x1p-24f;
}

std::array<float, 4> normal_block(RandomKey key, std::uint64_t block) {
  // Four words make two pairs, each pair a cosine and a sine.
  const auto words = philox(key, block);
  std::array<float, 4> out;
  for (std::size_t pair = 0; pair < 4; pair += 2) {
    const double u = (static_cast<double>(words[pair]) + 0.5) * 0x1p-32;
    const double angle = 2.0 * std::numbers::pi * (static_cast<double>(words[pair + 1]) * 0x1p-32);
    const double radius = std::sqrt(-2.0 * std::log(u));
    out[pair] = static_cast<float>(radius * std::cos(angle));
    out[pair + 1] = static_cast<float>(radius * std::sin(angle));
  }
  return out;
}

float normal_at(RandomKey key, std::uint64_t index) {
  return normal_block(key, index / 4)[index % 4];
}

}  // namespace sherd
