#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "models/hub/hugging_face.h"
#include "tensor/host_values.h"
#include "tensor/safetensors/safetensors_folder.h"

// Parameters of Gpt from and to tensors of a Hugging Face state dict, whole and in memory, values only moved.
namespace sherd::models {

/// Elements in host memory, as files hold them.
struct HostTensor {
  tensor::Shape shape;
  DType dtype = DType::f32;
  std::vector<std::byte> bytes;
};

/// Finds a tensor by name; nothing when there is none.
using HostTensorSource = std::function<std::optional<HostTensor>(const std::string& name)>;

/// As rows of the parameter, or back.
inline std::vector<std::byte> turned(const PublishedTensor& tensor, const HostTensor& host, bool to_rows) {
  if (!tensor.transposed) return host.bytes;
  std::vector<std::byte> out(host.bytes.size());
  const std::int64_t rows = tensor.shape[to_rows ? 0 : 1], columns = tensor.shape[to_rows ? 1 : 0];
  tensor::transpose_values(host.bytes.data(), rows, columns, size_of(host.dtype), out.data());
  return out;
}

/// The parameter's value from its tensors; rows that pad are zero.
inline HostTensor from_dict(const HuggingFaceLayout& layout, const std::string& parameter,
                            const HostTensorSource& source) {
  const PublishedParameter p = layout.published(parameter);
  HostTensor out;
  std::vector<std::vector<std::byte>> parts;
  for (const PublishedTensor& tensor : p.tensors) {
    std::optional<HostTensor> found = source(tensor.name);
    require(found && found->shape == tensor.in_file(), "no tensor ", tensor.name, " ",
            tensor.in_file().str());
    out.dtype = found->dtype;
    if (tensor.takes_turns()) {
      const std::size_t size = size_of(out.dtype), count = static_cast<std::size_t>(tensor.shape.numel());
      std::vector<std::byte> own(count * size);
      for (std::size_t i = 0; i < count; ++i)
        std::memcpy(own.data() + i * size,
                    found->bytes.data() + (i * static_cast<std::size_t>(tensor.stacked) +
                                           static_cast<std::size_t>(tensor.place)) *
                                              size,
                    size);
      found->bytes = std::move(own);
    } else if (tensor.stacked > 0) {
      const auto each =
          static_cast<std::ptrdiff_t>(tensor.shape.numel()) * static_cast<std::ptrdiff_t>(size_of(out.dtype));
      const auto begin = found->bytes.begin() + tensor.place * each;
      found->bytes = std::vector<std::byte>(begin, begin + each);
    }
    parts.push_back(turned(tensor, *found, true));
  }
  const std::size_t row = static_cast<std::size_t>(p.columns) * size_of(out.dtype);
  const std::int64_t rows = p.rows.back().row + p.rows.back().rows;
  const bool vector = p.tensors[0].shape.rank() == 1;
  out.shape = vector ? tensor::Shape{rows} : tensor::Shape{rows, p.columns};
  out.bytes.resize(static_cast<std::size_t>(rows) * row);
  for (const auto& run : p.rows)
    if (run.tensor >= 0)
      std::memcpy(
          out.bytes.data() + static_cast<std::size_t>(run.row) * row,
          parts[static_cast<std::size_t>(run.tensor)].data() + static_cast<std::size_t>(run.tensor_row) * row,
          static_cast<std::size_t>(run.rows) * row);
  return out;
}

/// The parameter's value as its tensors.
inline std::vector<std::pair<std::string, HostTensor>> to_dict(const HuggingFaceLayout& layout,
                                                               const std::string& parameter,
                                                               const HostTensor& value) {
  const PublishedParameter p = layout.published(parameter);
  const std::size_t row = static_cast<std::size_t>(p.columns) * size_of(value.dtype);
  std::vector<std::pair<std::string, HostTensor>> out;
  for (std::size_t i = 0; i < p.tensors.size(); ++i) {
    const PublishedTensor& tensor = p.tensors[i];
    HostTensor part{
        tensor.shape, value.dtype,
        std::vector<std::byte>(static_cast<std::size_t>(tensor.shape.numel()) * size_of(value.dtype))};
    for (const auto& run : p.rows)
      if (run.tensor == static_cast<int>(i))
        std::memcpy(part.bytes.data() + static_cast<std::size_t>(run.tensor_row) * row,
                    value.bytes.data() + static_cast<std::size_t>(run.row) * row,
                    static_cast<std::size_t>(run.rows) * row);
    part.bytes = turned(tensor, part, false);
    out.emplace_back(tensor.name, std::move(part));
  }
  return out;
}

/// Both folders have the same tensors, byte for byte.
inline void expect_same_tensors(const tensor::SafetensorsFolder& there,
                                const tensor::SafetensorsFolder& back) {
  ASSERT_EQ(back.names(), there.names());
  for (const std::string& name : there.names()) {
    const auto &a = *there.find(name), &b = *back.find(name);
    EXPECT_EQ(a.shape, b.shape) << name;
    std::vector<std::byte> one(a.bytes), other(b.bytes);
    there.read_bytes(name, 0, one), back.read_bytes(name, 0, other);
    EXPECT_EQ(one, other) << name;
  }
}

}  // namespace sherd::models
