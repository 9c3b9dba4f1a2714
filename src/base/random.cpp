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

float normal_at(RandomKey key, std::uint64_t index) {
  // A block of four words makes two pairs, each pair a sine and a cosine.
  const auto words = philox(key, index / 4);
  const std::size_t pair = (index % 4) / 2 * 2;
  const double u = (static_cast<double>(words[pair]) + 0.5) * 0x1p-32;
  const double angle = 2.0 * std::numbers::pi * (static_cast<double>(words[pair + 1]) * 0x1p-32);
  const double radius = std::sqrt(-2.0 * std::log(u));
  return static_cast<float>(radius * (index % 2 == 0 ? std::cos(angle) : std::sin(angle)));
}

}  // namespace sherd
