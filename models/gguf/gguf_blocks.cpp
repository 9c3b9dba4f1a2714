#include "models/gguf/gguf_blocks.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "base/dtype.h"
#include "base/error.h"

namespace sherd::models {
namespace {

struct Format {
  GgufType type;
  std::string_view name;
  std::int64_t values, bytes;
};
constexpr std::int64_t super = 256, part_4 = 32, part_6 = 16;
constexpr Format formats[] = {{GgufType::f32, "f32", 1, 4},        {GgufType::f16, "f16", 1, 2},
                              {GgufType::bf16, "bf16", 1, 2},      {GgufType::q8_0, "q8_0", 32, 34},
                              {GgufType::q4_0, "q4_0", 32, 18},    {GgufType::q4_k, "q4_k", super, 144},
                              {GgufType::q6_k, "q6_k", super, 210}};

const Format& format_of(GgufType type) {
  for (const Format& format : formats)
    if (format.type == type) return format;
  fail(ErrorKind::usage, "GGUF's type ", static_cast<std::uint32_t>(type), " is not written");
}

template <class Half>
Half put_half(float value, std::byte* to) {
  const Half half(value);
  std::memcpy(to, &half.bits, sizeof(half.bits));
  return half;
}

/// Rounded to half precision, as the block has it.
float put_scale(float value, std::byte* to) {
  return static_cast<float>(put_half<f16>(value, to));
}

template <class Half>
void encode_halves(std::span<const float> values, std::byte* to) {
  for (const float value : values) put_half<Half>(value, to), to += sizeof(Half);
}

/// The scale is the largest magnitude over 127.
void encode_q8_0(const float* x, std::byte* to) {
  float largest = 0;
  for (int i = 0; i < 32; ++i) largest = std::max(largest, std::abs(x[i]));
  const float scale = largest / 127, inverse = scale == 0 ? 0 : 1 / scale;
  put_scale(scale, to);
  for (int i = 0; i < 32; ++i) to[2 + i] = static_cast<std::byte>(std::lround(x[i] * inverse));
}

/// The value of the largest magnitude gets the code 0, which stands for -8 scales.
void encode_q4_0(const float* x, std::byte* to) {
  float largest = 0;
  for (int i = 0; i < 32; ++i)
    if (std::abs(x[i]) > std::abs(largest)) largest = x[i];
  const float scale = largest / -8, inverse = scale == 0 ? 0 : 1 / scale;
  put_scale(scale, to);
  const auto code = [&](float value) {
    const float scaled = value * inverse;
    return std::min(15, static_cast<int>(scaled + 8.5f));
  };
  for (int i = 0; i < 16; ++i) to[2 + i] = static_cast<std::byte>(code(x[i]) | code(x[i + 16]) << 4);
}

int nearest_code(float value, int least, int most) {
  return static_cast<int>(
      std::lround(std::clamp(value, static_cast<float>(least), static_cast<float>(most))));
}

/// How much the errors of a part's values count: as their magnitudes beside the part's root mean square.
template <std::size_t Size>
std::array<float, Size> weights_of(const float* x) {
  float squares = 0;
  for (std::size_t i = 0; i < Size; ++i) squares += x[i] * x[i];
  const float root = std::sqrt(squares / static_cast<float>(Size));
  std::array<float, Size> out;
  for (std::size_t i = 0; i < Size; ++i) out[i] = root + std::abs(x[i]);
  return out;
}

/// A part of q4_k: values stand for scale·code − least.
struct Ramp {
  float scale = 0, least = 0;
};

/// The weighted squared error of a part at its nearest codes.
float error_of(const float* x, const std::array<float, part_4>& weights, const Ramp& ramp) {
  float error = 0;
  for (std::size_t i = 0; i < part_4; ++i) {
    const int code = ramp.scale > 0 ? nearest_code((x[i] + ramp.least) / ramp.scale, 0, 15) : 0;
    const float apart = ramp.scale * static_cast<float>(code) - ramp.least - x[i];
    error += weights[i] * apart * apart;
  }
  return error;
}

/// Tries ranges that leave out more or less of both ends; to the codes of each belong a scale and a least
/// value by least squares.
Ramp find_ramp(const float* x) {
  const std::array<float, part_4> weights = weights_of<part_4>(x);
  const float low = std::min(0.0f, *std::min_element(x, x + part_4)),
              high = std::max(0.0f, *std::max_element(x, x + part_4));
  Ramp best{(high - low) / 15, -low};
  if (high == low) return best;
  float least_error = error_of(x, weights, best);
  for (int step = -10; step <= 10; ++step) {
    const float inverse = (15 + 0.1f * static_cast<float>(step)) / (high - low);
    float w = 0, wc = 0, wcc = 0, wx = 0, wcx = 0;  // weighted sums, c being codes
    for (std::size_t i = 0; i < part_4; ++i) {
      const auto code = static_cast<float>(nearest_code((x[i] - low) * inverse, 0, 15));
      w += weights[i], wc += weights[i] * code, wcc += weights[i] * code * code;
      wx += weights[i] * x[i], wcx += weights[i] * code * x[i];
    }
    const float determinant = w * wcc - wc * wc;
    if (determinant <= 0) continue;
    Ramp ramp{(w * wcx - wc * wx) / determinant, (wc * wcx - wcc * wx) / determinant};
    if (ramp.least < 0) ramp = {wcx / wcc, 0};  // files have none below
    const float error = error_of(x, weights, ramp);
    if (ramp.scale > 0 && error < least_error) least_error = error, best = ramp;
  }
  return best;
}

void encode_q4_k(const float* x, std::byte* to) {
  std::array<Ramp, 8> ramps;
  float scale = 0, least = 0;
  for (std::size_t p = 0; p < ramps.size(); ++p) {
    ramps[p] = find_ramp(x + p * part_4);
    scale = std::max(scale, ramps[p].scale), least = std::max(least, ramps[p].least);
  }
  scale = put_scale(scale / 63, to), least = put_scale(least / 63, to + 2);
  std::array<int, 8> scales, leasts;
  std::uint8_t codes[super];
  for (std::size_t p = 0; p < ramps.size(); ++p) {
    scales[p] = scale > 0 ? nearest_code(ramps[p].scale / scale, 0, 63) : 0;
    leasts[p] = least > 0 ? nearest_code(ramps[p].least / least, 0, 63) : 0;
    const float step = scale * static_cast<float>(scales[p]), from = least * static_cast<float>(leasts[p]);
    for (std::size_t i = p * part_4; i < (p + 1) * part_4; ++i)
      codes[i] = static_cast<std::uint8_t>(step > 0 ? nearest_code((x[i] + from) / step, 0, 15) : 0);
  }
  // The high bits of the last four parts' numbers stand above the numbers of the first four.
  for (std::size_t p = 0; p < 4; ++p) {
    to[4 + p] = static_cast<std::byte>(scales[p] | scales[p + 4] >> 4 << 6);
    to[8 + p] = static_cast<std::byte>(leasts[p] | leasts[p + 4] >> 4 << 6);
    to[12 + p] = static_cast<std::byte>((scales[p + 4] & 15) | (leasts[p + 4] & 15) << 4);
  }
  for (std::size_t pair = 0; pair < 4; ++pair)
    for (std::size_t i = 0; i < part_4; ++i) {
      const std::uint8_t* code = codes + 2 * part_4 * pair + i;
      to[16 + part_4 * pair + i] = static_cast<std::byte>(code[0] | code[part_4] << 4);
    }
}

/// The scale of a part of q6_k, whose values stand for scale·code: of several guesses around the largest
/// magnitude over 32 the one that leaves the least squares, which is a quotient of sums.
float find_scale(const float* x) {
  const std::array<float, part_6> weights = weights_of<part_6>(x);
  float largest = 0, best = 0, most = 0;
  for (std::size_t i = 0; i < part_6; ++i)
    if (std::abs(x[i]) > std::abs(largest)) largest = x[i];
  if (largest == 0) return 0;
  for (int step = -9; step <= 9; ++step) {
    const float inverse = -(32 + 0.1f * static_cast<float>(step)) / largest;
    float wcc = 0, wcx = 0;
    for (std::size_t i = 0; i < part_6; ++i) {
      const auto code = static_cast<float>(nearest_code(x[i] * inverse, -32, 31));
      wcc += weights[i] * code * code, wcx += weights[i] * code * x[i];
    }
    if (wcc > 0 && wcx * wcx > most * wcc) most = wcx * wcx / wcc, best = wcx / wcc;
  }
  return best;
}

void encode_q6_k(const float* x, std::byte* to) {
  std::array<float, super / part_6> found;
  float largest = 0;
  for (std::size_t p = 0; p < found.size(); ++p) {
    found[p] = find_scale(x + p * part_6);
    if (std::abs(found[p]) > std::abs(largest)) largest = found[p];
  }
  std::byte *high = to + super / 2, *scales = high + super / 4;
  const float scale = put_scale(largest / -128, scales + found.size());
  std::uint8_t codes[super];
  for (std::size_t p = 0; p < found.size(); ++p) {
    const int own = scale != 0 ? nearest_code(found[p] / scale, -128, 127) : 0;
    scales[p] = static_cast<std::byte>(own);
    const float step = scale * static_cast<float>(own);
    for (std::size_t i = p * part_6; i < (p + 1) * part_6; ++i)
      codes[i] = static_cast<std::uint8_t>(step != 0 ? nearest_code(x[i] / step, -32, 31) + 32 : 32);
  }
  for (std::size_t half = 0; half < 2; ++half)
    for (std::size_t i = 0; i < 32; ++i) {
      const std::uint8_t* code = codes + 128 * half + i;  // and those 32, 64 and 96 behind it
      to[64 * half + i] = static_cast<std::byte>((code[0] & 15) | (code[64] & 15) << 4);
      to[64 * half + 32 + i] = static_cast<std::byte>((code[32] & 15) | (code[96] & 15) << 4);
      high[32 * half + i] =
          static_cast<std::byte>(code[0] >> 4 | code[32] >> 4 << 2 | code[64] >> 4 << 4 | code[96] >> 4 << 6);
    }
}

}  // namespace

std::string_view name_of(GgufType type) {
  return format_of(type).name;
}

std::optional<GgufType> parse_gguf_type(std::string_view name) {
  for (const Format& format : formats)
    if (format.name == name) return format.type;
  return std::nullopt;
}

std::int64_t values_of_block(GgufType type) {
  return format_of(type).values;
}
std::int64_t bytes_of_block(GgufType type) {
  return format_of(type).bytes;
}

std::uint64_t bytes_of_row(GgufType type, std::int64_t columns) {
  const Format& format = format_of(type);
  require(columns % format.values == 0, "rows of ", columns, " values are no whole blocks of ", format.name);
  return static_cast<std::uint64_t>(columns / format.values * format.bytes);
}

void encode_gguf(GgufType type, std::span<const float> values, std::span<std::byte> to) {
  const Format& format = format_of(type);
  require(to.size() == bytes_of_row(type, std::ssize(values)), "encode_gguf() gets room of another size");
  if (type == GgufType::f32) return void(std::memcpy(to.data(), values.data(), to.size()));
  if (type == GgufType::f16) return encode_halves<f16>(values, to.data());
  if (type == GgufType::bf16) return encode_halves<bf16>(values, to.data());
  const auto encode = type == GgufType::q8_0   ? encode_q8_0
                      : type == GgufType::q4_0 ? encode_q4_0
                      : type == GgufType::q4_k ? encode_q4_k
                                               : encode_q6_k;
  std::byte* block = to.data();
  for (std::size_t i = 0; i < values.size(); i += static_cast<std::size_t>(format.values)) {
    encode(values.data() + i, block);
    block += format.bytes;
  }
}

}  // namespace sherd::models
