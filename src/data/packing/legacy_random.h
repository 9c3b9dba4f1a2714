#pragma once

#include <cstdint>
#include <random>
#include <span>
#include <utility>
#include <vector>

namespace sherd::data {

/// NumPy's RandomState (the generator that Megatron's datasets shuffle with), as far as shuffling needs it: a
/// Mersenne Twister (Matsumoto and Nishimura, "Mersenne Twister", 1998) and draws by masked rejection, so
/// that an order is the one that Megatron makes from the same seed. One thread.
class LegacyRandom {
 public:
  explicit LegacyRandom(std::uint32_t seed) : generator_(seed) {}

  /// Uniform in [0, max].
  std::uint64_t interval(std::uint64_t max);

  /// numpy.random.RandomState.shuffle: for i = n-1 … 1 swaps items i and interval(i).
  template <class T>
  void shuffle(std::span<T> items) {
    for (std::size_t i = items.size(); i-- > 1;)
      std::swap(items[i], items[static_cast<std::size_t>(interval(i))]);
  }

 private:
  std::uint64_t next_32() { return static_cast<std::uint32_t>(generator_()); }

  std::mt19937 generator_;
};

/// A list of indices below some bound, 4 bytes each where the bound allows, else 8.
class IndexList {
 public:
  IndexList() = default;
  /// 0 … count-1, repeated `times` times, plus `base`.
  IndexList(std::int64_t base, std::int64_t count, std::int64_t times = 1);

  std::int64_t size() const {
    return static_cast<std::int64_t>(narrow_.empty() ? wide_.size() : narrow_.size());
  }
  std::int64_t operator[](std::int64_t i) const {
    const auto at = static_cast<std::size_t>(i);
    return narrow_.empty() ? wide_[at] : static_cast<std::int64_t>(narrow_[at]);
  }
  /// Shuffles items [begin, end).
  void shuffle(LegacyRandom& random, std::int64_t begin, std::int64_t end);

 private:
  std::vector<std::uint32_t> narrow_;
  std::vector<std::int64_t> wide_;
};

}  // namespace sherd::data
