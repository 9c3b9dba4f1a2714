#pragma once

#include <memory>
#include <string>

#include "models/hub/low_bit_files.h"

namespace sherd::models {

/// A matrix in a form of compressed-tensors, for find_low_bits(): NAME in int8 or E4M3, or `weight_packed` in
/// codes of 4 or 8 bits, with `weight_scale` of the tensor, of outputs, of groups of inputs, or of squares of
/// 128 x 128. Zero points are read; scales of inputs are passed over. Null where it is in none.
std::unique_ptr<LowBitMatrix> find_compressed(const tensor::SafetensorsFolder& files,
                                              const std::string& name);

}  // namespace sherd::models
