#include "tensor/formats/four_bits.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "tensor/formats/stored_format.h"

namespace sherd::tensor {
namespace {

constexpr float least_scale = 0x1p-120f;  // its reciprocal, and its product with any value, are normal

/// The codes of a table in the order of their values, and the middles between these.
struct Order {
  std::array<std::uint8_t, 16> codes;
  std::array<float, 15> middles;

  explicit Order(const float* values) {
    std::iota(codes.begin(), codes.end(), std::uint8_t{0});
    std::stable_sort(codes.begin(), codes.end(), [&](int a, int b) { return values[a] < values[b]; });
    for (std::size_t i = 0; i < middles.size(); ++i)
      middles[i] = (values[codes[i]] + values[codes[i + 1]]) / 2;
  }
};

const float* values_of(FourBits kind) {
  return kind == FourBits::nf4 ? nf4_values : fp4_values;
}

const Order& order_of(FourBits kind) {
  static const Order nf4(nf4_values), fp4(fp4_values);
  return kind == FourBits::nf4 ? nf4 : fp4;
}

/// Number `i` of `parts` + 1 numbers from 0.1 to 1 in equal steps, with the roundings of torch.linspace() in
/// fp32: the second half is counted from the end.
float step_of(std::int64_t i, std::int64_t parts) {
  const float step = (1.0f - 0.1f) / static_cast<float>(parts);
  return i < (parts + 1) / 2 ? std::fma(step, static_cast<float>(i), 0.1f)
                             : std::fma(-step, static_cast<float>(parts - i), 1.0f);
}

std::array<float, 256> make_scale_values() {
  std::array<float, 256> out{};
  std::size_t next = 0;
  for (int decade = 0; decade < 7; ++decade) {
    const std::int64_t parts = std::int64_t{1} << decade;
    const auto power = static_cast<float>(std::pow(10.0, decade - 6));
    for (std::int64_t i = 0; i < parts; ++i) {
      const float value = power * ((step_of(i, parts) + step_of(i + 1, parts)) / 2.0f);
      out[next++] = value, out[next++] = -value;
    }
  }
  out[next++] = 0, out[next++] = 1;
  std::sort(out.begin(), out.end());
  return out;
}

/// The code of the nearest value; of two as near, the lower one's.
std::uint8_t scale_code(float x) {
  const auto values = scale_values();
  const auto above = std::lower_bound(values.begin(), values.end(), x);
  const auto at = static_cast<std::size_t>(above - values.begin());
  if (at == 0) return 0;
  if (at == values.size()) return 255;
  return static_cast<std::uint8_t>(std::abs(values[at] - x) < std::abs(x - values[at - 1]) ? at : at - 1);
}

}  // namespace

std::span<const float, 256> scale_values() {
  static const std::array<float, 256> values = make_scale_values();
  return values;
}

float four_bits(FourBits kind, const float* values, float largest, std::byte* codes) {
  const Order& order = order_of(kind);
  const float scale = largest < least_scale ? 0 : largest, inverse = scale > 0 ? 1.0f / scale : 0;
  std::uint32_t places[four_bit_block] = {};
  float x[four_bit_block];
  for (std::int64_t i = 0; i < four_bit_block; ++i) x[i] = values[i] * inverse;
  for (const float middle : order.middles)  // that way the processor compares many at once
    for (std::int64_t i = 0; i < four_bit_block; ++i) places[i] += x[i] > middle;
  for (std::int64_t i = 0; i < four_bit_codes; ++i)
    codes[i] = std::byte(order.codes[places[2 * i]] << 4 | order.codes[places[2 * i + 1]]);
  return scale;
}

void from_four_bits(FourBits kind, const std::byte* codes, float scale, float* values) {
  const float* of = values_of(kind);
  for (std::int64_t i = 0; i < four_bit_codes; ++i) {
    const auto pair = std::to_integer<std::uint32_t>(codes[i]);
    values[2 * i] = of[pair >> 4] * scale, values[2 * i + 1] = of[pair & 15u] * scale;
  }
}

float scale_codes(std::span<const float> scales, float offset, std::byte* codes) {
  float most = 0;
  for (const float scale : scales) most = std::max(most, std::abs(scale - offset));
  for (std::size_t i = 0; i < scales.size(); ++i)
    codes[i] = std::byte(scale_code(most > 0 ? (scales[i] - offset) / most : 0));
  return most;
}

void quantize_scales(const std::array<float, double_scales>& scales, std::byte* to) {
  std::size_t count = scales.size();
  while (count > 0 && scales[count - 1] == 0) --count;
  const double sum =
      std::accumulate(scales.begin(), scales.begin() + static_cast<std::ptrdiff_t>(count), 0.0);
  const float offset = count == 0 ? 0 : static_cast<float>(sum / static_cast<double>(count));
  std::fill(to, to + scales.size(), std::byte(scale_code(0)));
  const float most = scale_codes(std::span(scales).first(count), offset, to);
  std::memcpy(to + double_scales, &most, sizeof most);
  std::memcpy(to + double_scales + sizeof most, &offset, sizeof offset);
}

void double_scales_of(const std::byte* block, std::int64_t first, std::span<float> scales) {
  const auto values = scale_values();
  const std::byte *all = block + double_codes, *from = all + first;
  float scale, offset;
  std::memcpy(&scale, all + double_scales, sizeof scale);
  std::memcpy(&offset, all + double_scales + sizeof scale, sizeof offset);
  for (std::size_t i = 0; i < scales.size(); ++i) {
    const float product = values[std::to_integer<std::size_t>(from[i])] * scale;
    scales[i] = product + offset;
  }
}

}  // namespace sherd::tensor
