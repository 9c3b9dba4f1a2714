#include "tensor/exact_sum.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace sherd::tensor {

void ExactSum::add(double term) {
  if (!(term >= 0) || std::isinf(term)) {
    ++non_finite;
    return;
  }
  const auto bits = std::bit_cast<std::uint64_t>(term);
  const int exponent = static_cast<int>(bits >> 52);
  if (exponent == 0) return;  // zero, or below any square of a normal float's block sum
  const std::uint64_t mantissa = (bits & ((std::uint64_t{1} << 52) - 1)) | (std::uint64_t{1} << 52);
  int shift = exponent - 1075 - lowest_bit;  // position of the mantissa's lowest bit
  std::uint64_t value = mantissa;
  if (shift < 0) {
    if (shift <= -64) return;
    value >>= -shift;
    shift = 0;
  }
  const int word = shift / 32, offset = shift % 32;
  if (word + 2 >= words) {  // beyond the square of the largest float, summed over any real model
    ++non_finite;
    return;
  }
  __extension__ using Wide = unsigned __int128;
  const Wide wide = static_cast<Wide>(value) << offset;
  digits[static_cast<std::size_t>(word)] += static_cast<std::int64_t>(static_cast<std::uint32_t>(wide));
  digits[static_cast<std::size_t>(word + 1)] +=
      static_cast<std::int64_t>(static_cast<std::uint32_t>(wide >> 32));
  digits[static_cast<std::size_t>(word + 2)] +=
      static_cast<std::int64_t>(static_cast<std::uint32_t>(wide >> 64));
  if (++pending_ >= (1 << 30)) normalize();
}

void ExactSum::add(std::span<const double> terms) {
  // Terms whose exponents lie in a window of 64 meet in 128 bits, in registers: 53 of a mantissa, 63 that it
  // is moved up by at most, and 11 for as many terms as are taken at once.
  constexpr std::size_t most = 2048;
  constexpr int window = 64, lowest = 1075 + lowest_bit, highest = 1300;
  for (; terms.size() > most; terms = terms.subspan(most)) add(terms.first(most));
  if (terms.empty()) return;
  const int first = static_cast<int>(std::bit_cast<std::uint64_t>(terms[0]) >> 52);
  const int base = std::clamp(first - window / 2, lowest, highest);
  __extension__ using Wide = unsigned __int128;
  Wide sum = 0;
  for (const double term : terms) {
    const auto bits = std::bit_cast<std::uint64_t>(term);
    const auto above = static_cast<unsigned>(bits >> 52) - static_cast<unsigned>(base);
    if (above >= window) {  // also zeros, negative terms, infinities and NaNs
      add(term);
      continue;
    }
    sum += static_cast<Wide>((bits & ((std::uint64_t{1} << 52) - 1)) | (std::uint64_t{1} << 52)) << above;
  }
  add_near(static_cast<std::uint64_t>(sum >> 64), static_cast<std::uint64_t>(sum), base);
}

// Adds an integer of 128 bits whose lowest bit is that of the mantissas with this exponent.
void ExactSum::add_near(std::uint64_t high, std::uint64_t low, int exponent) {
  const int shift = exponent - 1075 - lowest_bit, offset = shift % 32;
  auto word = static_cast<std::size_t>(shift / 32);
  for (const std::uint64_t half : {low, high})
    for (const std::uint64_t part : {half & 0xffffffffu, half >> 32}) {
      const std::uint64_t moved = part << offset;
      digits[word] += static_cast<std::int64_t>(moved & 0xffffffffu);
      digits[++word] += static_cast<std::int64_t>(moved >> 32);
    }
  pending_ += 2;
  if (pending_ >= (1 << 30)) normalize();
}

void ExactSum::add(const ExactSum& other) {
  normalize();
  ExactSum copy = other;
  copy.normalize();
  for (std::size_t i = 0; i < digits.size(); ++i) digits[i] += copy.digits[i];
  non_finite += other.non_finite;
  pending_ = 1 << 10;
}

std::vector<std::int64_t> ExactSum::to_words() const {
  ExactSum copy = *this;
  copy.normalize();
  std::vector<std::int64_t> out(copy.digits.begin(), copy.digits.end());
  out.push_back(copy.non_finite);
  return out;
}

ExactSum ExactSum::from_words(std::span<const std::int64_t> summed) {
  ExactSum sum;
  for (std::size_t i = 0; i < sum.digits.size(); ++i) sum.digits[i] = summed[i];
  sum.non_finite = summed[words];
  sum.normalize();
  return sum;
}

void ExactSum::normalize() {
  std::int64_t carry = 0;
  for (auto& digit : digits) {
    digit += carry;
    carry = digit >> 32;
    digit &= 0xffffffffll;
  }
  if (carry) ++non_finite;
  pending_ = 0;
}

double ExactSum::value() const {
  if (non_finite) return std::numeric_limits<double>::quiet_NaN();
  ExactSum copy = *this;
  copy.normalize();
  // From the top: each further word adds below the last one, and at most three words reach a double's
  // mantissa.
  double total = 0;
  for (int i = words - 1; i >= 0; --i)
    total += std::ldexp(static_cast<double>(copy.digits[static_cast<std::size_t>(i)]), 32 * i + lowest_bit);
  return total;
}

}  // namespace sherd::tensor
