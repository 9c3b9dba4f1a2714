#include "optim/quantized.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>

#include "base/error.h"
#include "optim/isa/span_plan.h"

namespace sherd::optim {
namespace {

/// Elements that a thread takes at once: whole blocks.
constexpr std::int64_t quantized_grain = 1 << 16;

/// The evenly spaced values of decade number `decade`: the magnitude of number k is base + slope·k.
struct Decade {
  std::int64_t parts;
  double base, slope;
  Decade(int decade, bool has_signs) : parts(std::int64_t{1} << (decade + !has_signs)) {
    const double top = std::pow(10.0, decade - 6), count = static_cast<double>(parts);
    slope = top * 0.9 / count;
    base = top * (0.1 + 0.9 * (0.5 - count) / count);
  }
  double value(std::int64_t k) const { return base + slope * static_cast<double>(k); }
  double first() const { return value(parts); }
  double last() const { return value(2 * parts - 1); }
};

float rounded(double x) {
  return static_cast<float>(x);
}

/// As loops compute it, one rounding after the other.
float value_of(const DynamicMap& map, std::int32_t k) {
  const auto row = static_cast<std::size_t>(std::countl_zero(static_cast<std::uint32_t>(k)) % 16);
  const float product = map.slope[row] * static_cast<float>(k);
  return product + map.base[row];
}

void set_level(DynamicMap& map, int level, double begin, double inverse, double offset, double top) {
  // The last four bits are the level before, as next_level has them.
  map.begin[level] = std::bit_cast<float>((std::bit_cast<std::uint32_t>(rounded(begin)) & ~15u) |
                                          static_cast<std::uint32_t>(std::max(level - 1, 0)));
  const double to_code = map.has_signs ? 0 : 1;
  map.inverse[level] = rounded(inverse);
  map.offset[level] = rounded(offset - to_code), map.top[level] = rounded(top - to_code);
}

void set_exponents(DynamicMap& map) {
  for (std::uint32_t exponent = 96; exponent < 128; ++exponent) {
    const float low = std::bit_cast<float>(exponent << 23);
    std::int32_t level = 0;
    while (level + 1 < DynamicMap::levels && map.begin[level + 1] <= low) ++level;
    const bool has_next = level + 1 < DynamicMap::levels && map.begin[level + 1] < 2 * low;
    map.next_level[exponent % 32] =
        has_next ? map.begin[level + 1]
                 : std::bit_cast<float>(0x7fc00000u | static_cast<std::uint32_t>(level));
  }
}

DynamicMap make_map(bool has_signs) {
  DynamicMap map{};
  map.has_signs = has_signs;
  map.middle = has_signs ? 127 : -1;
  const std::int32_t zero = has_signs ? 0 : 1, one = has_signs ? 128 : 256;
  double below = 0;  // the largest value of the level before
  set_level(map, 0, 0, 0, zero, zero);
  for (int decade = 0; decade < 7; ++decade) {
    const Decade values(decade, has_signs);
    const auto row =
        static_cast<std::size_t>(std::countl_zero(static_cast<std::uint32_t>(values.parts)) % 16);
    map.base[row] = rounded(values.base), map.slope[row] = rounded(values.slope);
    set_level(map, decade + 1, (below + values.first()) / 2, 1 / values.slope, -values.base / values.slope,
              static_cast<double>(2 * values.parts - 1));
    below = values.last();
  }
  map.base[static_cast<std::size_t>(std::countl_zero(static_cast<std::uint32_t>(one)) % 16)] = 1;
  set_level(map, 8, (below + 1) / 2, 0, one, one);
  set_exponents(map);
  for (std::int32_t code = 0; code < 256; ++code) {
    const std::int32_t k = code - map.middle;
    map.values[code] = k < 0 ? -value_of(map, -k) : value_of(map, k);
  }
  return map;
}

const QuantizedTable& quantized_table(CpuIsa isa) {
  return loops_of(isa, avx512::quantized_table, avx2::quantized_table, portable::quantized_table);
}

}  // namespace

const DynamicMap& map_of(Code code) {
  static const DynamicMap with_signs = make_map(true), without = make_map(false);
  require(code != Code::none, "a state without codes has no map");
  return code == Code::signed_8bit ? with_signs : without;
}

std::uint8_t zero_code(Code code) {
  return code == Code::signed_8bit ? 127 : 0;
}

void quantize(Code code, std::span<const float> values, std::uint8_t* codes, float* scales, Arena& arena,
              CpuIsa isa) {
  const DynamicMap& map = map_of(code);
  const auto loop = quantized_table(isa).quantize[map.has_signs];
  arena.parallel_for(
      static_cast<std::int64_t>(values.size()), quantized_grain, [&](std::int64_t begin, std::int64_t end) {
        loop(map, values.data() + begin, codes + begin, scales + begin / quantized_block, end - begin);
      });
}

void dequantize(Code code, std::span<const std::uint8_t> codes, std::int64_t skipped, const float* scales,
                float* values, Arena& arena) {
  const DynamicMap& map = map_of(code);
  arena.parallel_for(
      static_cast<std::int64_t>(codes.size()), quantized_grain, [&](std::int64_t begin, std::int64_t end) {
        for (std::int64_t i = begin; i < end; ++i) {
          const std::uint8_t at = codes[static_cast<std::size_t>(i)];
          values[i] =
              (map.has_signs && at == 0 ? -1.0f : map.values[at]) * scales[(skipped + i) / quantized_block];
        }
      });
}

bool update_codes(CpuIsa isa, const SpanUpdate& span, const SpanPlan& plan, Arena& arena) {
  const auto loop = quantized_table(isa).update[plan.master];
  const auto* rule = std::get_if<Adam>(&plan.rule);
  require(rule, "an 8-bit state without Adam's rule");
  const DynamicMap &signs = map_of(Code::signed_8bit), &sizes = map_of(Code::unsigned_8bit);
  std::atomic<bool> finite = true;
  arena.parallel_for(span.n, quantized_grain, [&](std::int64_t begin, std::int64_t end) {
    const std::int64_t block = begin / quantized_block;
    const Extremes top = loop(chunk_of(span, plan, begin, end), rule, signs, sizes, span.scales[0] + block,
                              span.scales[1] + block);
    if (top.weight > plan.largest_weight || top.moment > plan.largest_moment)
      finite.store(false, std::memory_order_relaxed);
  });
  return finite.load();
}

}  // namespace sherd::optim
