#include "models/hub/compressed_files.h"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "base/error.h"
#include "models/compressed/matrix.h"
#include "tensor/host_values.h"
#include "tensor/safetensors/low_bits.h"

namespace sherd::models {
namespace {

using tensor::SafetensorsEntry;
using tensor::SafetensorsFolder;
using tensor::Shape;

class CompressedFile final : public LowBitMatrix {
 public:
  /// `module`: the name without its "weight".
  CompressedFile(const SafetensorsFolder& files, std::string module)
      : files_(files),
        module_(std::move(module)),
        packed_(files.find(module_ + "weight_packed") != nullptr),
        codes_name_(module_ + (packed_ ? "weight_packed" : "weight")) {}

  void check(const PublishedTensor& as, const Findings& findings) const override {
    for (const char* beside : {"weight_shape", "weight_scale", "weight_zero_point", "input_scale",
                               "input_zero_point", "weight_packed"})
      findings.expected.insert(module_ + beside);
    if (files_.find(module_ + "weight_g_idx"))
      findings.types.push_back(module_ + "weight_g_idx (groups in the order of activations)");
    if (as.shape.rank() != 2 || as.stacked > 0 || as.transposed)
      return findings.misshapen.push_back(cat(codes_name_, ", compressed, for ", as.in_file().str()));
    const SafetensorsEntry& codes = *files_.find(codes_name_);
    const std::int64_t out = as.shape[0], in = as.shape[1];
    if (packed_ ? bits_of(codes, out, in) == 0 : shape_of(codes) != as.shape.str())
      return findings.misshapen.push_back(
          cat(codes_name_, " ", shape_of(codes), " for ", as.shape.str(), packed_ ? " of 4 or 8 bits" : ""));
    const SafetensorsEntry* scales = files_.find(module_ + "weight_scale");
    if (!scales) return findings.missing.push_back(module_ + "weight_scale");
    if (!layout_of(*scales, out, in))
      findings.misshapen.push_back(cat(module_, "weight_scale ", shape_of(*scales), " for ", as.shape.str()));
    else if (!scales->dtype || !is_floating(*scales->dtype))
      findings.types.push_back(cat(module_, "weight_scale (", scales->dtype_name, ")"));
    check_zero_point(*scales, out, findings);
  }

  void read(const PublishedTensor& as, std::int64_t first, std::span<float> to) override {
    const std::int64_t out = as.shape[0], in = as.shape[1];
    if (scales_.empty()) read_scales(out, in);
    for (std::int64_t at = first; at < first + std::ssize(to);) {
      const std::int64_t row = at / in, begin = at % in,
                         n = std::min(in - begin, first + std::ssize(to) - at);
      read_row(row, begin, in, to.subspan(static_cast<std::size_t>(at - first), static_cast<std::size_t>(n)));
      at += n;
    }
  }

 private:
  /// Rows and columns that share a scale, and scales to a row of the matrix.
  struct Layout {
    std::int64_t rows = 1, columns = 1, across = 1;
  };
  static std::optional<Layout> layout_of(const SafetensorsEntry& scales, std::int64_t out, std::int64_t in) {
    constexpr std::int64_t side = tensor::fp8_file_block;
    if (scales.numel() == 1) return Layout{out, in, 1};
    if (scales.shape.empty() || scales.shape.size() > 2) return std::nullopt;
    const std::int64_t rows = scales.shape[0], across = scales.shape.size() == 2 ? scales.shape[1] : 1;
    if (rows == out && across > 0 && in % across == 0) return Layout{1, in / across, across};
    if (rows == parts_of(out, side) && across == parts_of(in, side)) return Layout{side, side, across};
    return std::nullopt;
  }

  /// The bits of a code that is packed; 0: none that is read.
  static std::int64_t bits_of(const SafetensorsEntry& codes, std::int64_t out, std::int64_t in) {
    if (codes.dtype != DType::i32 || codes.shape.size() != 2 || codes.shape[0] != out) return 0;
    for (const std::int64_t bits : {4, 8})
      if (codes.shape[1] == parts_of(in * bits, 32)) return bits;
    return 0;
  }

  /// A zero point for each scale, in int8; or packed, along the outputs.
  void check_zero_point(const SafetensorsEntry& scales, std::int64_t out, const Findings& findings) const {
    const std::string name = module_ + "weight_zero_point";
    const SafetensorsEntry* points = files_.find(name);
    if (!points) return;
    const bool packed = points->dtype == DType::i32;
    const std::int64_t across =
        scales.numel() / std::max<std::int64_t>(1, scales.shape.empty() ? 1 : scales.shape[0]);
    if (!packed && points->numel() != scales.numel())
      findings.misshapen.push_back(cat(name, " ", shape_of(*points), " for scales ", shape_of(scales)));
    else if (packed && (points->shape.size() != 2 || points->shape[0] != parts_of(out, 8) ||
                        points->shape[1] != across))
      findings.misshapen.push_back(cat(name, " ", shape_of(*points), " for ", out, " outputs of 4 bits"));
    else if (!packed && points->dtype_name != "I8" && points->dtype_name != "F8_E4M3")
      findings.types.push_back(cat(name, " (", points->dtype_name, ")"));
  }

  template <class T>
  std::vector<T> whole(const std::string& name) const {
    std::vector<T> out(files_.find(name)->bytes / sizeof(T));
    files_.read_bytes(name, 0, std::as_writable_bytes(std::span(out)));
    return out;
  }

  void read_scales(std::int64_t out, std::int64_t in) {
    const SafetensorsEntry& entry = *files_.find(module_ + "weight_scale");
    layout_ = *layout_of(entry, out, in);
    bits_ = packed_ ? bits_of(*files_.find(codes_name_), out, in) : 8;
    scales_.resize(static_cast<std::size_t>(entry.numel()));
    tensor::convert_values(whole<std::byte>(module_ + "weight_scale"), *entry.dtype,
                           std::as_writable_bytes(std::span(scales_)), DType::f32);
    zeros_.assign(scales_.size(), 0);
    const std::string name = module_ + "weight_zero_point";
    const SafetensorsEntry* points = files_.find(name);
    if (!points) return;
    const std::vector<std::byte> bytes = whole<std::byte>(name);
    for (std::size_t i = 0; i < zeros_.size(); ++i) {
      if (points->dtype == DType::i32) {
        const std::size_t row = i / static_cast<std::size_t>(layout_.across),
                          group = i % static_cast<std::size_t>(layout_.across);
        // Eight rows to a number of 32 bits.
        const std::size_t word = row / 8 * static_cast<std::size_t>(layout_.across) + group;
        zeros_[i] = number(unpack_int4(bytes[word * 4 + row % 8 / 2], static_cast<std::int64_t>(row)));
      } else {
        zeros_[i] = points->dtype_name == "I8" ? number(std::to_integer<std::uint8_t>(bytes[i])) : 0;
      }
    }
  }

  static float number(std::uint8_t code) { return static_cast<float>(static_cast<std::int8_t>(code)); }

  /// Elements of a row from `begin` on.
  void read_row(std::int64_t row, std::int64_t begin, std::int64_t in, std::span<float> to) {
    const std::int64_t end = begin + std::ssize(to), per_byte = 8 / bits_;
    const std::int64_t row_bytes = packed_ ? parts_of(in * bits_, 32) * 4 : in, skipped = begin / per_byte;
    codes_.resize(static_cast<std::size_t>((end + per_byte - 1) / per_byte - skipped));
    files_.read_bytes(codes_name_, static_cast<std::uint64_t>(row * row_bytes + skipped), codes_);
    const bool e4m3 = files_.find(codes_name_)->dtype_name == "F8_E4M3";
    if (e4m3) tensor::decode_e4m3(codes_, to);
    for (std::int64_t column = begin; column < end; ++column) {
      const std::byte byte = codes_[static_cast<std::size_t>(column / per_byte - skipped)];
      float& value = to[static_cast<std::size_t>(column - begin)];
      if (!e4m3)
        value = bits_ == 4 ? number(unpack_int4(byte, column))
                : packed_  ? static_cast<float>(std::to_integer<int>(byte) - 128)
                           : number(std::to_integer<std::uint8_t>(byte));
      const auto scale =
          static_cast<std::size_t>(row / layout_.rows * layout_.across + column / layout_.columns);
      value = (value - zeros_[scale]) * scales_[scale];
    }
  }

  const SafetensorsFolder& files_;
  const std::string module_;
  const bool packed_;
  const std::string codes_name_;
  Layout layout_;
  std::int64_t bits_ = 8;
  std::vector<float> scales_, zeros_;  ///< once they were asked for
  std::vector<std::byte> codes_;
};

}  // namespace

std::unique_ptr<LowBitMatrix> find_compressed(const SafetensorsFolder& files, const std::string& name) {
  constexpr std::string_view weight = "weight";
  if (!name.ends_with(".weight")) return nullptr;
  const std::string module = name.substr(0, name.size() - weight.size());
  const SafetensorsEntry* entry = files.find(name);
  const bool codes = entry && (entry->dtype_name == "I8" || entry->dtype_name == "F8_E4M3");
  if (!entry ? files.find(module + "weight_packed") == nullptr
             : !codes || files.find(module + "weight_scale") == nullptr)
    return nullptr;
  return std::make_unique<CompressedFile>(files, module);
}

}  // namespace sherd::models
