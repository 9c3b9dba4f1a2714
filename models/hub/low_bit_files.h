#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "models/hub/hugging_face.h"
#include "tensor/safetensors/safetensors_folder.h"

namespace sherd::models {

// Matrices that published files have in few bits (`quantization_config` in config.json), each in several
// tensors:
//
//   MXFP4           NAME_blocks, NAME_scales (GPT-OSS)
//   FP8 in squares  NAME in E4M3, NAME_scale_inv for each square of 128 x 128 (DeepSeek-V3)
//   bitsandbytes    in 4 bits: NAME in bytes, NAME.absmax, NAME.quant_map and
//   NAME.quant_state.bitsandbytes__nf4
//                   or …__fp4, JSON; of scales in 8 bits NAME.nested_absmax and NAME.nested_quant_map, too.
//                   In 8 bits: NAME in int8, and SCB beside it, the largest magnitude of each row
//   compressed-tensors  NAME in int8 or E4M3, or weight_packed, beside weight_scale (compressed_files.h)

/// How many parts of that size cover an extent.
inline std::int64_t parts_of(std::int64_t extent, std::int64_t part) {
  return extent / part + (extent % part != 0);
}

/// "[2, 3]".
std::string shape_of(const tensor::SafetensorsEntry& entry);

/// A matrix of a folder in one of these forms.
class LowBitMatrix {
 public:
  virtual ~LowBitMatrix() = default;

  /// The findings of a check of all tensors of a folder.
  struct Findings {
    std::set<std::string>& expected;  ///< names of tensors that belong to the model
    std::vector<std::string>&missing, &misshapen, &types;
  };
  /// Adds the matrix's tensors to `expected`, and to the other lists those that do not fit `as`.
  virtual void check(const PublishedTensor& as, const Findings& findings) const = 0;
  /// Values from element `first` of `as` on, its rows being outputs; check() found nothing.
  virtual void read(const PublishedTensor& as, std::int64_t first, std::span<float> to) = 0;
};

/// The matrix of that name, as long as `files` lives; null where it is in no such form. Throws Error{data}
/// where what the files say of it cannot be read.
std::unique_ptr<LowBitMatrix> find_low_bits(const tensor::SafetensorsFolder& files, const std::string& name);

}  // namespace sherd::models
