#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "nn/weight_source.h"
#include "tensor/slice.h"

// Weights of a source as numbers in fp32, of which other weights are made.
namespace sherd::models {

/// Elements [begin, begin + count) of a parameter of that shape. `device`: through whose memory they come.
std::vector<float> read_values(nn::WeightSource& source, const std::string& name, const tensor::Shape& shape,
                               std::int64_t begin, std::int64_t count, device::Device& device);
/// All of them.
inline std::vector<float> read_values(nn::WeightSource& source, const std::string& name,
                                      const tensor::Shape& shape, device::Device& device) {
  return read_values(source, name, shape, 0, shape.numel(), device);
}

/// The rows of a table [rows, width] that `ids` names, in their order; a source is asked in ascending order.
template <class Id>
std::vector<float> read_rows(nn::WeightSource& source, const std::string& table, std::int64_t rows,
                             std::int64_t width, const std::vector<Id>& ids, device::Device& device);

/// Writes elements [begin, begin + to.numel()) of `slice` of a parameter, all of whose values these are,
/// rounded to to's dtype.
void write_slice(const std::vector<float>& values, const tensor::Slice& slice, std::int64_t begin,
                 const tensor::Tensor& to);

}  // namespace sherd::models
