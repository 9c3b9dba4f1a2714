#pragma once

#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "base/error.h"
#include "models/gguf/gguf_file.h"
#include "support/temp_folder.h"

namespace sherd::test {

/// Half precision by its definition.
inline double half_value(const unsigned char* at) {
  const int bits = at[0] | at[1] << 8, exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double value = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  return bits >> 15 ? -value : value;
}

/// The values of a block of q4_k, by the format's description.
inline void decode_q4_k(const unsigned char* block, double* to) {
  const double scale = half_value(block), least = half_value(block + 2);
  const unsigned char *packed = block + 4, *codes = block + 16;
  for (int part = 0; part < 8; ++part) {
    const int low = part % 4;
    const int own = part < 4 ? packed[low] & 63 : (packed[8 + low] & 15) | packed[low] >> 6 << 4;
    const int from = part < 4 ? packed[4 + low] & 63 : packed[8 + low] >> 4 | packed[4 + low] >> 6 << 4;
    for (int i = 0; i < 32; ++i) {
      const int code = codes[part / 2 * 32 + i] >> (part % 2 * 4) & 15;
      to[part * 32 + i] = scale * own * code - least * from;
    }
  }
}

inline void decode_q6_k(const unsigned char* block, double* to) {
  const unsigned char *low = block, *high = block + 128, *scales = block + 192;
  const double scale = half_value(block + 208);
  for (int i = 0; i < 256; ++i) {
    const int half = i / 128, at = i % 128, quarter = at / 32;
    const int code = (low[half * 64 + at % 64] >> (quarter / 2 * 4) & 15) |
                     (high[half * 32 + at % 32] >> (quarter * 2) & 3) << 4;
    to[i] = scale * static_cast<signed char>(scales[i / 16]) * (code - 32);
  }
}

/// The values of a run of blocks.
inline std::vector<double> decoded(models::GgufType type, const std::string& bytes) {
  const auto* at = reinterpret_cast<const unsigned char*>(bytes.data());
  const std::int64_t size = models::bytes_of_block(type), values = models::values_of_block(type),
                     blocks = std::ssize(bytes) / size;
  std::vector<double> out(static_cast<std::size_t>(blocks * values));
  for (std::int64_t b = 0; b < blocks; ++b, at += size) {
    double* to = out.data() + b * values;
    if (type == models::GgufType::f32) {
      float value = 0;
      std::memcpy(&value, at, 4);
      *to = value;
    }
    if (type == models::GgufType::f16) *to = half_value(at);
    if (type == models::GgufType::bf16) {
      const std::uint32_t bits = static_cast<std::uint32_t>(at[0] | at[1] << 8) << 16;
      float value = 0;
      std::memcpy(&value, &bits, 4);
      *to = value;
    }
    if (type == models::GgufType::q4_k) decode_q4_k(at, to);
    if (type == models::GgufType::q6_k) decode_q6_k(at, to);
    for (int i = 0; i < 32; ++i) {
      if (type == models::GgufType::q8_0) to[i] = half_value(at) * static_cast<signed char>(at[2 + i]);
      if (type == models::GgufType::q4_0)
        to[i] = half_value(at) * ((at[2 + i % 16] >> (i / 16 * 4) & 15) - 8);
    }
  }
  return out;
}

/// A GGUF file, read by the format's description alone; values of metadata as text.
class GgufReader {
 public:
  struct Tensor {
    models::GgufType type;
    std::vector<std::int64_t> shape;  ///< the extent of a row comes last
    std::string bytes;
    std::vector<double> values() const { return decoded(type, bytes); }
  };
  explicit GgufReader(const std::filesystem::path& path) : file_(sherd::testing::read_text(path)) {
    if (text(4) != "GGUF" || take<std::uint32_t>() != 3) throw std::runtime_error("no GGUF file");
    const auto count = take<std::uint64_t>(), keys = take<std::uint64_t>();
    for (std::uint64_t i = 0; i < keys; ++i) {
      const std::string key = text(take<std::uint64_t>());
      metadata[key] = value(take<std::uint32_t>());
    }
    std::vector<std::pair<std::string, std::uint64_t>> places;
    for (std::uint64_t i = 0; i < count; ++i) {
      const std::string name = text(take<std::uint64_t>());
      Tensor& tensor = tensors[name];
      std::vector<std::int64_t> dims(take<std::uint32_t>());
      for (std::int64_t& extent : dims) extent = take<std::int64_t>();
      tensor.shape.assign(dims.rbegin(), dims.rend());
      tensor.type = static_cast<models::GgufType>(take<std::uint32_t>());
      places.emplace_back(name, take<std::uint64_t>());
    }
    const std::uint64_t begin = (at_ + 31) / 32 * 32;
    std::uint64_t expected = 0;  // readers want tensors one behind the other
    for (const auto& [name, place] : places) {
      if (place != expected) throw std::runtime_error(name + " is not where it must be");
      Tensor& tensor = tensors[name];
      std::int64_t numbers = 1;
      for (const std::int64_t extent : tensor.shape) numbers *= extent;
      const auto bytes = static_cast<std::uint64_t>(numbers / models::values_of_block(tensor.type) *
                                                    models::bytes_of_block(tensor.type));
      if (begin + place + bytes > file_.size()) throw std::runtime_error(name + " is cut");
      tensor.bytes = file_.substr(begin + place, bytes);
      expected += (bytes + 31) / 32 * 32;
    }
  }

  std::map<std::string, std::string> metadata;
  std::map<std::string, Tensor> tensors;

 private:
  std::string text(std::uint64_t count) { return file_.substr((at_ += count) - count, count); }
  template <class T>
  T take() {
    T out{};
    std::memcpy(&out, file_.data() + at_, sizeof(T));
    at_ += sizeof(T);
    return out;
  }
  std::string value(std::uint32_t type) {
    switch (type) {
      case 0:
        return std::to_string(take<std::uint8_t>());
      case 4:
        return std::to_string(take<std::uint32_t>());
      case 5:
        return std::to_string(take<std::int32_t>());
      case 6:
        return sherd::cat(take<float>());
      case 7:
        return take<std::uint8_t>() ? "true" : "false";
      case 8:
        return text(take<std::uint64_t>());
      default:
        break;
    }
    if (type != 9) throw std::runtime_error("a value of type " + std::to_string(type));
    const auto of = take<std::uint32_t>();
    const auto count = take<std::uint64_t>();
    std::string out;
    for (std::uint64_t i = 0; i < count; ++i) out += (i ? "|" : "") + value(of);
    return out;
  }

  std::string file_;
  std::size_t at_ = 0;
};

}  // namespace sherd::test
