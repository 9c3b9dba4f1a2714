#include "models/hub/low_bit_files.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "base/text/excerpt.h"
#include "config/json_tree.h"
#include "models/hub/compressed_files.h"
#include "tensor/host_values.h"
#include "tensor/safetensors/low_bits.h"

namespace sherd::models {
namespace {

using tensor::SafetensorsEntry;
using tensor::SafetensorsFolder;
using tensor::Shape;

/// Whether `as` is a matrix: only matrices are stored in few bits. Any other goes to the findings.
bool is_matrix(const PublishedTensor& as, const std::string& name, const LowBitMatrix::Findings& findings) {
  if (as.shape.rank() == 2) return true;
  findings.misshapen.push_back(cat(name, ", in few bits, for ", as.shape.str()));
  return false;
}

/// Elements [first, first + to.size()) of a tensor of the files, in fp32.
void read_numbers(const SafetensorsFolder& files, const std::string& name, std::int64_t first,
                  std::span<float> to) {
  const DType type = *files.find(name)->dtype;
  const std::size_t size = size_of(type);
  std::vector<std::byte> bytes(to.size() * size);
  files.read_bytes(name, static_cast<std::uint64_t>(first) * size, bytes);
  tensor::convert_values(bytes, type, std::as_writable_bytes(to), DType::f32);
}

class Mxfp4Matrix final : public LowBitMatrix {
 public:
  Mxfp4Matrix(const SafetensorsFolder& files, std::string name) : files_(files), name_(std::move(name)) {}

  void check(const PublishedTensor& as, const Findings& findings) const override {
    if (!is_matrix(as, name_ + "_blocks", findings)) return;
    const std::int64_t in = as.shape[as.transposed ? 0 : 1];
    if (as.stack != PublishedTensor::Stack::tensors)
      return findings.misshapen.push_back(cat(name_, "_blocks for ", as.in_file().str()));
    if (in % tensor::mxfp4_block != 0)
      return findings.misshapen.push_back(
          cat(name_, "_blocks for rows of ", in, " elements, no multiple of ", tensor::mxfp4_block));
    const std::int64_t out = as.shape.numel() / in, blocks = in / tensor::mxfp4_block;
    for (const auto& [part, shape] :
         {std::pair<const char*, Shape>{"_blocks", {as.stacked, out, blocks, tensor::mxfp4_codes}},
          {"_scales", {as.stacked, out, blocks}}}) {
      findings.expected.insert(name_ + part);
      const SafetensorsEntry& bytes = *files_.find(name_ + part);
      if (shape_of(bytes) != shape.str())
        findings.misshapen.push_back(cat(name_, part, " ", shape_of(bytes), " for ", shape.str()));
      else if (bytes.dtype != DType::u8)
        findings.types.push_back(cat(name_, part, " (", bytes.dtype_name, ")"));
    }
  }

  void read(const PublishedTensor& as, std::int64_t first, std::span<float> to) override {
    const std::int64_t at = as.first() + first, begin = at / tensor::mxfp4_block,
                       end = parts_of(at + std::ssize(to), tensor::mxfp4_block);
    std::vector<std::byte> blocks(static_cast<std::size_t>((end - begin) * tensor::mxfp4_codes)),
        scales(static_cast<std::size_t>(end - begin));
    files_.read_bytes(name_ + "_blocks", static_cast<std::uint64_t>(begin * tensor::mxfp4_codes), blocks);
    files_.read_bytes(name_ + "_scales", static_cast<std::uint64_t>(begin), scales);
    tensor::decode_mxfp4(blocks, scales, at, to);
  }

 private:
  const SafetensorsFolder& files_;
  const std::string name_;
};

class TiledFp8Matrix final : public LowBitMatrix {
 public:
  TiledFp8Matrix(const SafetensorsFolder& files, const std::string& name)
      : files_(files), name_(name), scales_name_(name + "_scale_inv") {}

  void check(const PublishedTensor& as, const Findings& findings) const override {
    findings.expected.insert(scales_name_);
    const SafetensorsEntry &codes = *files_.find(name_), &scales = *files_.find(scales_name_);
    const auto squares = [&](int dim) { return parts_of(as.shape[dim], side); };
    if (as.stacked > 0 || shape_of(codes) != as.in_file().str())
      findings.misshapen.push_back(cat(name_, " ", shape_of(codes), " for ", as.in_file().str()));
    else if (as.shape.rank() != 2 || shape_of(scales) != Shape{squares(0), squares(1)}.str())
      findings.misshapen.push_back(cat(scales_name_, " ", shape_of(scales), " for ", as.shape.str(),
                                       " in squares of ", tensor::fp8_file_block));
    else if (!scales.dtype || !is_floating(*scales.dtype))
      findings.types.push_back(cat(scales_name_, " (", scales.dtype_name, ")"));
  }

  void read(const PublishedTensor& as, std::int64_t first, std::span<float> to) override {
    const std::int64_t columns = as.shape[1], squares = parts_of(columns, side), end = first + std::ssize(to);
    std::vector<std::byte> codes(to.size());
    files_.read_bytes(name_, static_cast<std::uint64_t>(first), codes);
    tensor::decode_e4m3(codes, to);
    for (std::int64_t at = first; at < end;) {  // a square's elements of a row
      const std::int64_t row = at / columns, square = at % columns / side,
                         stop = std::min({end, (row + 1) * columns, row * columns + (square + 1) * side});
      if (row / side != scales_of_) {
        scales_.resize(static_cast<std::size_t>(squares));
        read_numbers(files_, scales_name_, row / side * squares, scales_);
        scales_of_ = row / side;
      }
      for (; at < stop; ++at)
        to[static_cast<std::size_t>(at - first)] *= scales_[static_cast<std::size_t>(square)];
    }
  }

 private:
  static constexpr std::int64_t side = tensor::fp8_file_block;
  const SafetensorsFolder& files_;
  const std::string name_, scales_name_;
  std::vector<float> scales_;
  std::int64_t scales_of_ = -1;  ///< the row of squares
};

/// bitsandbytes' 4 bits. (A matrix that is transposed elsewhere, GPT-2's, has rows of outputs there.)
class FourBitMatrix final : public LowBitMatrix {
 public:
  FourBitMatrix(const SafetensorsFolder& files, const std::string& name, const std::string& state)
      : files_(files), name_(name), state_name_(state) {
    std::vector<std::byte> bytes(files.find(state)->bytes);
    files.read_bytes(state, 0, bytes);
    const config::Node root = config::parse_tree({reinterpret_cast<const char*>(bytes.data()), bytes.size()},
                                                 cat(files.path().string(), ": ", state));
    const std::string where = cat(files.path().string(), ": ", state);
    const auto refuse = [&](const char* key, const char* what) {
      fail(ErrorKind::data, where, ": its ", key, " is ", what, ": have bitsandbytes write the files again");
    };
    const auto count = [&](const char* key, std::int64_t least) {
      constexpr std::int64_t most = std::int64_t{1} << 20;
      const config::Node* node = root.find(key);
      if (!node || !node->is(config::Node::Kind::integer) || node->integer < least || node->integer > most)
        refuse(key, "no number of elements that a block can have");
      return node->integer;
    };
    block_ = count("blocksize", 2);
    if (block_ % 2 != 0) refuse("blocksize", "odd");
    nested_ = root.find("nested_blocksize") != nullptr;
    if (nested_) {
      nested_block_ = count("nested_blocksize", 1);
      const config::Node* offset = root.find("nested_offset");
      const bool whole = offset && offset->is(config::Node::Kind::integer);
      const double value = !offset ? std::numeric_limits<double>::quiet_NaN()
                           : whole ? static_cast<double>(offset->integer)
                                   : offset->number;
      if (!(std::abs(value) <= std::numeric_limits<float>::max())) refuse("nested_offset", "no number");
      offset_ = static_cast<float>(value);
    }
    const config::Node* shape = root.find("shape");
    if (!shape || !shape->is(config::Node::Kind::array) || shape->items.size() != 2)
      refuse("shape", "not that of a matrix");
    for (const config::Node& extent : shape->items) {
      if (!extent.is(config::Node::Kind::integer) || extent.integer < 0)
        refuse("shape", "not that of a matrix");
      shape_.push_back(extent.integer);
    }
  }

  void check(const PublishedTensor& as, const Findings& findings) const override {
    if (!is_matrix(as, name_, findings)) return;
    const std::int64_t elements = as.shape.numel(), blocks = parts_of(elements, block_);
    const Shape rows = as.transposed ? Shape{as.shape[1], as.shape[0]} : as.shape;
    if (as.stacked > 0 || Shape{std::span<const std::int64_t>(shape_)} != rows)
      findings.misshapen.push_back(
          cat(name_, " ", Shape{std::span<const std::int64_t>(shape_)}.str(), " for ", rows.str()));
    const auto expect = [&](const std::string& name, std::int64_t count, DType type) {
      findings.expected.insert(name);
      const SafetensorsEntry* entry = files_.find(name);
      if (!entry)
        findings.missing.push_back(name);
      else if (entry->numel() != count)
        findings.misshapen.push_back(cat(name, " ", shape_of(*entry), " for ", count, " numbers"));
      else if (entry->dtype != type)
        findings.types.push_back(cat(name, " (", entry->dtype_name, ")"));
    };
    findings.expected.insert(state_name_);
    const SafetensorsEntry& codes = *files_.find(name_);  // in whatever type bnb_4bit_quant_storage says
    if (codes.bytes != static_cast<std::uint64_t>((elements + 1) / 2))
      findings.misshapen.push_back(cat(name_, " ", shape_of(codes), " for ", elements, " weights of 4 bits"));
    expect(name_ + ".quant_map", 16, DType::f32);
    expect(name_ + ".absmax", blocks, nested_ ? DType::u8 : DType::f32);
    if (!nested_) return;
    expect(name_ + ".nested_absmax", parts_of(blocks, nested_block_), DType::f32);
    expect(name_ + ".nested_quant_map", 256, DType::f32);
  }

  void read(const PublishedTensor& as, std::int64_t first, std::span<float> to) override {
    if (scales_.empty()) read_scales(parts_of(as.shape.numel(), block_));
    const std::int64_t begin = first / 2, end = (first + std::ssize(to) + 1) / 2;
    std::vector<std::byte> codes(static_cast<std::size_t>(end - begin));
    files_.read_bytes(name_, static_cast<std::uint64_t>(begin), codes);
    for (std::size_t i = 0; i < to.size(); ++i) {
      const std::int64_t at = first + static_cast<std::int64_t>(i);
      const auto pair = std::to_integer<std::size_t>(codes[static_cast<std::size_t>(at / 2 - begin)]);
      to[i] = values_[at % 2 == 0 ? pair >> 4 : pair & 15] * scales_[static_cast<std::size_t>(at / block_)];
    }
  }

 private:
  void read_scales(std::int64_t blocks) {
    values_.resize(16), scales_.resize(static_cast<std::size_t>(blocks));
    read_numbers(files_, name_ + ".quant_map", 0, values_);
    if (!nested_) return read_numbers(files_, name_ + ".absmax", 0, scales_);
    std::vector<float> map(256), scales(static_cast<std::size_t>(parts_of(blocks, nested_block_)));
    read_numbers(files_, name_ + ".nested_quant_map", 0, map);
    read_numbers(files_, name_ + ".nested_absmax", 0, scales);
    std::vector<std::byte> codes(scales_.size());
    files_.read_bytes(name_ + ".absmax", 0, codes);
    for (std::size_t i = 0; i < codes.size(); ++i) {
      const float product =
          map[std::to_integer<std::size_t>(codes[i])] * scales[i / static_cast<std::size_t>(nested_block_)];
      scales_[i] = product + offset_;
    }
  }

  const SafetensorsFolder& files_;
  const std::string name_, state_name_;
  std::int64_t block_ = 0, nested_block_ = 0;
  bool nested_ = false;  ///< scales are in 8 bits
  float offset_ = 0;
  std::vector<std::int64_t> shape_;
  std::vector<float> values_, scales_;  ///< of codes and of blocks, once they were asked for
};

/// bitsandbytes' 8 bits.
class EightBitMatrix final : public LowBitMatrix {
 public:
  EightBitMatrix(const SafetensorsFolder& files, const std::string& name, std::string scales)
      : files_(files), name_(name), scales_name_(std::move(scales)) {}

  void check(const PublishedTensor& as, const Findings& findings) const override {
    if (!is_matrix(as, name_, findings)) return;
    const Shape rows = as.transposed ? Shape{as.shape[1], as.shape[0]} : as.shape;
    findings.expected.insert(scales_name_);
    if (!files_.find(scales_name_)) return findings.missing.push_back(scales_name_);
    const SafetensorsEntry &codes = *files_.find(name_), &scales = *files_.find(scales_name_);
    const std::string format = name_ + "_format";
    findings.expected.insert(format);
    if (const SafetensorsEntry* entry = files_.find(format)) {
      std::byte layout{1};
      if (entry->dtype == DType::u8 && entry->numel() == 1)
        files_.read_bytes(format, 0, std::span(&layout, 1));
      if (layout != std::byte{0})
        findings.types.push_back(cat(name_,
                                     " (in an order of an older bitsandbytes: load and save it with 0.45 "
                                     "or later)"));
    }
    if (as.stacked > 0 || shape_of(codes) != rows.str())
      findings.misshapen.push_back(cat(name_, " ", shape_of(codes), " for ", rows.str()));
    else if (scales.numel() != rows[0])
      findings.misshapen.push_back(cat(scales_name_, " ", shape_of(scales), " for ", rows[0], " rows"));
    else if (scales.dtype != DType::f32)
      findings.types.push_back(cat(scales_name_, " (", scales.dtype_name, ")"));
  }

  void read(const PublishedTensor& as, std::int64_t first, std::span<float> to) override {
    const std::int64_t columns = as.shape[as.transposed ? 0 : 1], row = first / columns,
                       end = parts_of(first + std::ssize(to), columns);
    std::vector<float> scales(static_cast<std::size_t>(end - row));
    read_numbers(files_, scales_name_, row, scales);
    std::vector<std::byte> codes(to.size());
    files_.read_bytes(name_, static_cast<std::uint64_t>(first), codes);
    for (std::size_t i = 0; i < to.size(); ++i) {
      const std::int64_t at = first + static_cast<std::int64_t>(i);
      // In bitsandbytes' order, with its constant for 1/127.
      to[i] = static_cast<float>(std::to_integer<std::int8_t>(codes[i])) *
              scales[static_cast<std::size_t>(at / columns - row)] * 7.874015718698502e-3f;
    }
  }

 private:
  const SafetensorsFolder& files_;
  const std::string name_, scales_name_;
};

}  // namespace

std::string shape_of(const SafetensorsEntry& entry) {
  return Shape{std::span<const std::int64_t>(entry.shape)}.str();
}

std::unique_ptr<LowBitMatrix> find_low_bits(const SafetensorsFolder& files, const std::string& name) {
  if (auto compressed = find_compressed(files, name)) return compressed;
  const SafetensorsEntry* entry = files.find(name);
  if (!entry) {
    if (files.find(name + "_blocks") && files.find(name + "_scales"))
      return std::make_unique<Mxfp4Matrix>(files, name);
    return nullptr;
  }
  if (entry->dtype_name == "F8_E4M3" && files.find(name + "_scale_inv"))
    return std::make_unique<TiledFp8Matrix>(files, name);
  for (const char* kind : {"nf4", "fp4"})
    if (const std::string state = cat(name, ".quant_state.bitsandbytes__", kind); files.find(state))
      return std::make_unique<FourBitMatrix>(files, name, state);
  if (files.find(name + ".absmax"))
    fail(ErrorKind::data, files.path().string(), ": ", name, " has scales of bitsandbytes (.absmax), and no ",
         name, ".quant_state.bitsandbytes__nf4 or __fp4: the files are not whole; save them again");
  if (entry->dtype_name != "I8" || !name.ends_with("weight")) return nullptr;
  return std::make_unique<EightBitMatrix>(files, name,
                                          name.substr(0, name.size() - std::string("weight").size()) + "SCB");
}

}  // namespace sherd::models
