#include "models/hub/low_bit_export.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <numeric>

#include "base/error.h"
#include "models/hub/low_bit_files.h"
#include "tensor/formats/four_bits.h"
#include "tensor/formats/fp8_code.h"
#include "tensor/formats/fp8_number.h"
#include "tensor/formats/stored_format.h"
#include "tensor/host_values.h"
#include "tensor/safetensors/low_bits.h"

namespace sherd::models {
namespace {

using tensor::Fp8Format;
using tensor::Fp8Number;
using tensor::SafetensorsFolderWriter;
using tensor::SafetensorsSpec;
using Json = nlohmann::ordered_json;

/// Bytes of quant_state where it tells an offset, which files have to know before: its text is filled up with
/// spaces.
constexpr std::size_t state_bytes = 256;
constexpr std::int64_t side = tensor::fp8_file_block;

bool is_four_bits(StoredFormat format) {
  return format == StoredFormat::nf4 || format == StoredFormat::fp4 || format == StoredFormat::nf4_double ||
         format == StoredFormat::fp4_double;
}
bool is_double(StoredFormat format) {
  return format == StoredFormat::nf4_double || format == StoredFormat::fp4_double;
}
const char* kind_of(StoredFormat plain) {
  return plain == StoredFormat::nf4 ? "nf4" : "fp4";
}

/// Rows of outputs, and what goes into them.
std::pair<std::int64_t, std::int64_t> extents(const PublishedTensor& tensor) {
  return {tensor.shape[tensor.transposed ? 1 : 0], tensor.shape[tensor.transposed ? 0 : 1]};
}
std::string scb_name(const std::string& weight) {
  return weight.substr(0, weight.size() - std::string("weight").size()) + "SCB";
}

/// As bitsandbytes says it, but for its end.
std::string state_of(const PublishedTensor& tensor, StoredFormat plain) {
  const auto [out, in] = extents(tensor);
  return cat(R"({"quant_type": ")", kind_of(plain), R"(", "blocksize": )", tensor::four_bit_block,
             R"(, "dtype": "float32", "shape": [)", out, ", ", in, "]");
}

[[noreturn]] void refuse(const std::string& name) {
  fail(ErrorKind::data, "a value of ", name, " is infinite or no number, and has no form in few bits");
}
void require_finite(const std::string& name, std::span<const float> values) {
  if (!std::all_of(values.begin(), values.end(), [](float value) { return std::isfinite(value); }))
    refuse(name);
}

template <class T>
std::span<const std::byte> bytes_of(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}

}  // namespace

double MatrixExport::count(std::span<const float> values, std::span<const float> stand_for) {
  double lost = 0, all = 0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double value = values[i], away = value - static_cast<double>(stand_for[i]);
    lost += away * away, all += value * value;
  }
  rounded_away_ += lost, squares_ += all;
  return all > 0 ? std::sqrt(lost / all) : 0;
}

double MatrixExport::error() const {
  return squares_ > 0 ? std::sqrt(rounded_away_ / squares_) : 0;
}

LowBitExport::LowBitExport(StoredFormat format, const GptConfig& model, std::set<std::string> linear)
    : format_(format),
      plain_format_(format == StoredFormat::nf4_double   ? StoredFormat::nf4
                    : format == StoredFormat::fp4_double ? StoredFormat::fp4
                                                         : format),
      linear_(std::move(linear)) {
  const TensorNames& names = family_of(model.type).names;
  const bool stacked = names.stacked_experts && model.moe.experts > 0;
  if (format == StoredFormat::mxfp4 && !stacked)
    fail(ErrorKind::config, "mxfp4 is the form of GPT-OSS's experts; take nf4, fp4, int8 or fp8");
  if (format == StoredFormat::fp8 && (names.transposed || stacked))
    fail(ErrorKind::config,
         "fp8 is written for matrices [out, in], one for each layer, which this family has not; take ",
         stacked ? "mxfp4" : "nf4, fp4 or int8");
}

bool LowBitExport::takes(const std::string& parameter, const PublishedTensor& tensor) const {
  if (!linear_.contains(parameter) || tensor.shape.rank() != 2) return false;
  if (format_ == StoredFormat::mxfp4)
    return tensor.stacked > 0 && extents(tensor).second % tensor::mxfp4_block == 0;
  // transformers has experts in parameters of no module, of which bitsandbytes knows nothing.
  return tensor.stacked == 0 && (format_ == StoredFormat::fp8 || !is_of_expert(parameter));
}

std::vector<SafetensorsSpec> LowBitExport::specs(const PublishedTensor& tensor) const {
  const std::string& name = tensor.name;
  const auto [out, in] = extents(tensor);
  const std::int64_t elements = tensor.shape.numel();
  if (is_four_bits(format_)) {
    const std::int64_t blocks = parts_of(elements, tensor::four_bit_block);
    const auto state = static_cast<std::int64_t>(
        is_double(format_) ? state_bytes : state_of(tensor, plain_format_).size() + 1);
    std::vector<SafetensorsSpec> specs{
        {name, DType::u8, {(elements + 1) / 2, 1}},
        {name + ".absmax", is_double(format_) ? DType::u8 : DType::f32, {blocks}},
        {name + ".quant_map", DType::f32, {16}},
        {cat(name, ".quant_state.bitsandbytes__", kind_of(plain_format_)), DType::u8, {state}}};
    if (is_double(format_)) {
      specs.push_back({name + ".nested_absmax", DType::f32, {parts_of(blocks, tensor::double_scales)}});
      specs.push_back({name + ".nested_quant_map", DType::f32, {256}});
    }
    return specs;
  }
  if (format_ == StoredFormat::int8)
    return {{name, DType::u8, {out, in}, "I8"},
            {scb_name(name), DType::f32, {out}},
            {name + "_format", DType::u8, {}}};
  if (format_ == StoredFormat::fp8)
    return {{name, DType::u8, {out, in}, "F8_E4M3"},
            {name + "_scale_inv", DType::f32, {parts_of(out, side), parts_of(in, side)}}};
  const std::int64_t blocks = in / tensor::mxfp4_block;
  return {{name + "_blocks", DType::u8, {tensor.stacked, out, blocks, tensor::mxfp4_codes}},
          {name + "_scales", DType::u8, {tensor.stacked, out, blocks}}};
}

void LowBitExport::write(SafetensorsFolderWriter& files, const PublishedTensor& tensor,
                         std::span<const float> values) {
  if (is_four_bits(format_)) return write_four_bits(files, tensor, values);
  if (format_ == StoredFormat::int8) return write_int8(files, tensor, values);
  if (format_ == StoredFormat::fp8) return write_fp8(files, tensor, values);
  write_mxfp4(files, tensor, values);
}

/// Blocks of the values, as the format of that name has them in memory.
std::vector<std::byte> LowBitExport::quantized(const std::string& name, std::span<const float> values,
                                               StoredFormat format) {
  std::vector<std::byte> blocks(static_cast<std::size_t>(tensor::stored_bytes(format, std::ssize(values))));
  if (!tensor::quantize(format, values, blocks.data(), arena_)) refuse(name);
  return blocks;
}

void LowBitExport::write_four_bits(SafetensorsFolderWriter& files, const PublishedTensor& tensor,
                                   std::span<const float> values) {
  const std::vector<std::byte> made = quantized(tensor.name, values, plain_format_);
  const std::size_t blocks = made.size() / tensor::four_bit_block_bytes;
  std::vector<std::byte> codes(blocks * tensor::four_bit_codes);
  std::vector<float> scales(blocks), map(16), kept(values.size());
  for (std::size_t b = 0; b < blocks; ++b) {
    const std::byte* from = made.data() + b * tensor::four_bit_block_bytes;
    std::memcpy(codes.data() + b * tensor::four_bit_codes, from, tensor::four_bit_codes);
    std::memcpy(&scales[b], from + tensor::four_bit_codes, sizeof(float));
  }
  codes.resize((values.size() + 1) / 2);
  const bool nf4 = plain_format_ == StoredFormat::nf4;
  std::copy_n(nf4 ? tensor::nf4_values : tensor::fp4_values, 16, map.begin());
  std::string state = state_of(tensor, plain_format_);
  if (is_double(format_)) {
    std::vector<std::byte> scale_codes(blocks);
    std::vector<float> nested(
        static_cast<std::size_t>(parts_of(static_cast<std::int64_t>(blocks), tensor::double_scales))),
        nested_map(tensor::scale_values().begin(), tensor::scale_values().end());
    const double sum = std::accumulate(scales.begin(), scales.end(), 0.0);
    const auto offset = static_cast<float>(sum / static_cast<double>(blocks));
    for (std::size_t g = 0; g < nested.size(); ++g) {
      const std::size_t begin = g * tensor::double_scales,
                        n = std::min<std::size_t>(tensor::double_scales, blocks - begin);
      const std::span group = std::span(scales).subspan(begin, n);
      nested[g] = tensor::scale_codes(group, offset, scale_codes.data() + begin);
      for (std::size_t i = 0; i < n; ++i)
        group[i] = nested_map[std::to_integer<std::size_t>(scale_codes[begin + i])] * nested[g] + offset;
    }
    state += cat(R"(, "nested_blocksize": )", tensor::double_scales, R"(, "nested_dtype": "float32", )",
                 R"("nested_offset": )", Json(static_cast<double>(offset)).dump());
    files.write(tensor.name + ".absmax", 0, scale_codes);
    files.write(tensor.name + ".nested_absmax", 0, bytes_of(nested));
    files.write(tensor.name + ".nested_quant_map", 0, bytes_of(nested_map));
  } else {
    files.write(tensor.name + ".absmax", 0, bytes_of(scales));
  }
  state += "}";
  if (is_double(format_)) state.resize(state_bytes, ' ');
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto pair = std::to_integer<std::size_t>(codes[i / 2]);
    kept[i] = map[i % 2 == 0 ? pair >> 4 : pair & 15] * scales[i / tensor::four_bit_block];
  }
  count(values, kept);
  files.write(tensor.name, 0, codes);
  files.write(tensor.name + ".quant_map", 0, bytes_of(map));
  files.write(cat(tensor.name, ".quant_state.bitsandbytes__", kind_of(plain_format_)), 0,
              std::as_bytes(std::span(state)));
}

/// As LLM.int8() has weights: rounded to fp16, and then to 127ths of a row's largest magnitude.
void LowBitExport::write_int8(SafetensorsFolderWriter& files, const PublishedTensor& tensor,
                              std::span<const float> values) {
  const auto [out, in] = extents(tensor);
  std::vector<std::byte> half(values.size() * sizeof(std::uint16_t)), codes(values.size());
  std::vector<float> narrow(values.size()), largest(static_cast<std::size_t>(out)), kept(values.size());
  tensor::convert_values(std::as_bytes(values), DType::f32, half, DType::f16);
  tensor::convert_values(half, DType::f16, std::as_writable_bytes(std::span(narrow)), DType::f32);
  require_finite(tensor.name, narrow);  // also what fp16 does not hold
  for (std::size_t row = 0; row < largest.size(); ++row) {
    const std::size_t begin = row * static_cast<std::size_t>(in), end = begin + static_cast<std::size_t>(in);
    for (std::size_t i = begin; i < end; ++i) largest[row] = std::max(largest[row], std::abs(narrow[i]));
    // In torch's order, which bitsandbytes is written in.
    const float inverse = largest[row] > 0 ? 1.0f / largest[row] * 127.0f : 0;
    for (std::size_t i = begin; i < end; ++i) {
      const auto code = static_cast<std::int8_t>(std::nearbyint(narrow[i] * inverse));
      codes[i] = static_cast<std::byte>(code);
      kept[i] = static_cast<float>(code) * largest[row] / 127.0f;
    }
  }
  count(values, kept);
  files.write(tensor.name, 0, codes);
  files.write(scb_name(tensor.name), 0, bytes_of(largest));
  files.write(tensor.name + "_format", 0, std::vector<std::byte>(1));
}

void LowBitExport::write_fp8(SafetensorsFolderWriter& files, const PublishedTensor& tensor,
                             std::span<const float> values) {
  const auto [out, in] = extents(tensor);
  require_finite(tensor.name, values);
  const std::int64_t across = parts_of(in, side);
  std::vector<std::uint32_t> largest(static_cast<std::size_t>(parts_of(out, side) * across));
  const auto square = [&, in = in](std::size_t i) {
    const auto at = static_cast<std::int64_t>(i);
    return static_cast<std::size_t>(at / in / side * across + at % in / side);
  };
  for (std::size_t i = 0; i < values.size(); ++i)
    largest[square(i)] = std::max(largest[square(i)], Fp8Number::bits(std::abs(values[i])));
  std::vector<float> scales(largest.size()), kept(values.size());
  std::vector<std::byte> codes(values.size());
  for (std::size_t s = 0; s < scales.size(); ++s)
    scales[s] = Fp8Number::value(tensor::fp8_scale_bits(Fp8Format::e4m3, largest[s]));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const float scale = scales[square(i)];
    const float inverse = Fp8Number::value(tensor::fp8_inverse_bits(Fp8Number::bits(scale)));
    const std::uint32_t code = tensor::fp8_encode<Fp8Format::e4m3, Fp8Number>(values[i], inverse);
    codes[i] = std::byte(code);
    kept[i] = tensor::fp8_decode<Fp8Format::e4m3, Fp8Number>(code) * scale;
  }
  count(values, kept);
  files.write(tensor.name, 0, codes);
  files.write(tensor.name + "_scale_inv", 0, bytes_of(scales));
}

void LowBitExport::write_mxfp4(SafetensorsFolderWriter& files, const PublishedTensor& tensor,
                               std::span<const float> values) {
  const std::vector<std::byte> made = quantized(tensor.name, values, StoredFormat::mxfp4);
  const std::size_t blocks = made.size() / tensor::mxfp4_block_bytes;
  std::vector<std::byte> codes(blocks * tensor::mxfp4_codes), scales(blocks);
  for (std::size_t b = 0; b < blocks; ++b) {
    const std::byte* from = made.data() + b * tensor::mxfp4_block_bytes;
    std::memcpy(codes.data() + b * tensor::mxfp4_codes, from, tensor::mxfp4_codes);
    scales[b] = from[tensor::mxfp4_codes];
  }
  std::vector<float> kept(values.size());
  tensor::decode_mxfp4(codes, scales, 0, kept);
  count(values, kept);
  files.write(tensor.name + "_blocks", tensor.place * std::ssize(codes), codes);
  files.write(tensor.name + "_scales", tensor.place * std::ssize(scales), scales);
}

std::string LowBitExport::described(const std::string& config, const std::vector<std::string>& plain,
                                    const std::string& dtype) const {
  Json out = Json::parse(config);
  std::vector<std::string> skipped;  // the modules of these
  for (const std::string& name : plain)
    if (name.ends_with(".weight")) skipped.push_back(name.substr(0, name.rfind('.')));
  const bool four = is_four_bits(format_);
  if (four || format_ == StoredFormat::int8)
    out["quantization_config"] = {{"quant_method", "bitsandbytes"},
                                  {"load_in_4bit", four},
                                  {"load_in_8bit", !four},
                                  {"bnb_4bit_quant_type", four ? kind_of(plain_format_) : "fp4"},
                                  {"bnb_4bit_use_double_quant", is_double(format_)},
                                  {"bnb_4bit_compute_dtype", dtype},
                                  {"bnb_4bit_quant_storage", "uint8"},
                                  {"llm_int8_threshold", 6.0},
                                  {"llm_int8_skip_modules", skipped}};
  else if (format_ == StoredFormat::fp8)
    out["quantization_config"] = {{"quant_method", "fp8"},
                                  {"fmt", "e4m3"},
                                  {"activation_scheme", "dynamic"},
                                  {"weight_block_size", {side, side}},
                                  {"modules_to_not_convert", skipped}};
  else
    out["quantization_config"] = {{"quant_method", "mxfp4"}, {"modules_to_not_convert", skipped}};
  return out.dump(2) + "\n";
}

}  // namespace sherd::models
