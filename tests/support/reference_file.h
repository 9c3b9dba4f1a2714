#pragma once

#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "base/error.h"
#include "tensor/tensor.h"

namespace sherd::test {

/// A tensor of a reference file, in host memory.
struct ReferenceTensor {
  tensor::Shape shape;
  DType dtype = DType::f32;
  std::vector<std::byte> bytes;

  template <class T>
  std::vector<T> values() const {
    require(dtype == dtype_of<T>(), "the reference holds ", name_of(dtype));
    std::vector<T> out(bytes.size() / sizeof(T));
    std::memcpy(out.data(), bytes.data(), bytes.size());
    return out;
  }
};

/// Reads the safetensors files that scripts/references/make_reference.py and those beside it write (fp32,
/// fp64 and int32, no metadata).
inline std::map<std::string, ReferenceTensor> read_reference(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  require(file.is_open(), "cannot open ", path, ": a script in scripts/ makes it");
  const std::string content{std::istreambuf_iterator<char>(file), {}};
  std::uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, content.data(), 8);
  const std::string header = content.substr(8, header_bytes);
  std::map<std::string, ReferenceTensor> out;
  std::size_t at = 1;
  const auto between = [&](const char* open, const char* close) {
    const std::size_t begin = header.find(open, at) + std::strlen(open), end = header.find(close, begin);
    require(begin != std::string::npos && end != std::string::npos, path, ": unexpected header");
    at = end + std::strlen(close);
    return header.substr(begin, end - begin);
  };
  const auto numbers = [](const std::string& list) {
    std::vector<std::int64_t> values;
    for (std::size_t i = 0; i < list.size(); i = std::min(list.find(',', i), list.size() - 1) + 1)
      values.push_back(std::stoll(list.substr(i)));
    return values;
  };
  while (header.find('"', at) != std::string::npos) {
    const std::string name = between("\"", "\":{");
    ReferenceTensor tensor;
    const std::string dtype = between("\"dtype\":\"", "\"");
    tensor.dtype = dtype == "I32" ? DType::i32 : dtype == "F64" ? DType::f64 : DType::f32;
    const std::vector<std::int64_t> dims = numbers(between("\"shape\":[", "]"));
    tensor.shape = tensor::Shape(std::span<const std::int64_t>(dims));
    const std::vector<std::int64_t> range = numbers(between("\"data_offsets\":[", "]}"));
    const char* first = content.data() + 8 + header_bytes + range[0];
    tensor.bytes.resize(static_cast<std::size_t>(range[1] - range[0]));
    std::memcpy(tensor.bytes.data(), first, tensor.bytes.size());
    out.emplace(name, std::move(tensor));
  }
  return out;
}

}  // namespace sherd::test
