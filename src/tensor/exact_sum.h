#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

namespace sherd::tensor {

/// A sum of doubles that does not round until it is read: the order and grouping of additions cannot change
/// it. Fixed point over the whole range of squares of floats, in 32-bit digits held by 64-bit words (a
/// superaccumulator, Kulisch 2013; Neal, "Fast exact summation using small and large superaccumulators",
/// 2015). Words can be added across ranks as integers.
struct ExactSum {
  static constexpr int words = 24;
  /// Weight of bit 0 of word 0 is 2^lowest_bit; smaller parts are cut off.
  static constexpr int lowest_bit = -320;

  std::array<std::int64_t, words> digits{};
  std::int64_t non_finite = 0;  ///< how many NaN or infinite terms were met

  /// Adds one finite, non-negative term; anything else counts as non_finite.
  void add(double term);
  /// Adds many such terms, much faster where they are of like size.
  void add(std::span<const double> terms);
  void add(const ExactSum& other);
  /// The sum rounded to double; NaN when non_finite.
  double value() const;

  /// The sum as integers that may be added to another sum's across ranks, element by element.
  std::vector<std::int64_t> to_words() const;
  static ExactSum from_words(std::span<const std::int64_t> summed);

 private:
  int pending_ = 0;  ///< additions since carries were last propagated
  void add_near(std::uint64_t high, std::uint64_t low, int exponent);
  void normalize();
};

}  // namespace sherd::tensor
