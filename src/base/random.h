#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace sherd {

/// FNV-1a with a final mix; names streams after parameters and modules. Stable across platforms and versions.
std::uint64_t stable_hash(std::string_view text);

/// Mixes `value` into `seed` (splitmix64 finaliser).
constexpr std::uint64_t mix_seed(std::uint64_t seed, std::uint64_t value) {
  std::uint64_t z = seed + 0x9e3779b97f4a7c15ull * (value + 1);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

/// One counter-based random stream: element i of the stream is a pure function of (key, i), whoever asks and
/// in whatever order. Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
struct RandomKey {
  std::uint64_t seed = 0;
  std::uint64_t stream = 0;

  /// The stream for a further coordinate (step, micro-batch, layer, rank role, …).
  constexpr RandomKey at(std::uint64_t coordinate) const { return {seed, mix_seed(stream, coordinate)}; }
};

/// Four 32-bit words: block `index` of the stream.
constexpr std::array<std::uint32_t, 4> philox(RandomKey key, std::uint64_t index) {
  std::array<std::uint32_t, 4> c{static_cast<std::uint32_t>(index), static_cast<std::uint32_t>(index >> 32),
                                 static_cast<std::uint32_t>(key.stream),
                                 static_cast<std::uint32_t>(key.stream >> 32)};
  std::uint32_t k0 = static_cast<std::uint32_t>(key.seed), k1 = static_cast<std::uint32_t>(key.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = 0xD2511F53ull * c[0], p1 = 0xCD9E8D57ull * c[2];
    c = {static_cast<std::uint32_t>(p1 >> 32) ^ c[1] ^ k0, static_cast<std::uint32_t>(p1),
         static_cast<std::uint32_t>(p0 >> 32) ^ c[3] ^ k1, static_cast<std::uint32_t>(p0)};
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return c;
}

/// Uniform in [0, 1), 24 bits. Element i of the stream.
float uniform_at(RandomKey key, std::uint64_t index);

/// Standard normal by Box–Muller in double, rounded once to float. Element i of the stream.
float normal_at(RandomKey key, std::uint64_t index);

/// Elements 4·block … 4·block + 3 of the normal stream, cheaper than one by one.
std::array<float, 4> normal_block(RandomKey key, std::uint64_t block);

}  // namespace sherd
