#include "tensor/exact_sum.h"

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
  digits[static_cast<std::size_t>(word + 1)] += static_cast<std::int64_t>(static_cast<std::uint32_t>(wide >> 32));
  digits[static_cast<std::size_t>(word + 2)] += static_cast<std::int64_t>(static_cast<std::uint32_t>(wide >> 64));
  if (++pending_ >= (1 << 30)) normalize();
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
  // From the top: each further word adds below the last one, and at most three words reach a double's mantissa.
  double total = 0;
  for (int i = words - 1; i >= 0; --i)
    total += std::ldexp(static_cast<double>(copy.digits[static_cast<std::size_t>(i)]), 32 * i + lowest_bit);
  return total;
}

}  // namespace sherd::tensor
