#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "base/dtype.h"

namespace sherd::models {

/// The forms of compressed-tensors for weights of linear layers, which vLLM, SGLang and transformers read.
/// All are symmetric: a code times a scale.
enum class CompressedKind : std::uint8_t {
  int8,  ///< codes -128…127, a scale for each output; inputs in int8 too ("W8A8")
  fp8,   ///< E4M3, a scale for each output; inputs in E4M3 too
  int4   ///< codes -8…7, a scale for each group of inputs of an output; inputs stay as they are ("W4A16")
};

/// "int8", "fp8" or "int4".
std::optional<CompressedKind> parse_compressed_kind(std::string_view name);
const char* name_of(CompressedKind kind);

/// How a model's linear layers are compressed.
struct CompressedScheme {
  CompressedKind kind = CompressedKind::int8;
  std::int64_t group = 128;  ///< inputs of an output that share a scale, of int4
  /// The inputs of int8 and fp8 have one scale a layer, which calibration found, in place of one a token.
  bool static_inputs = false;
  bool activation_order = false;   ///< GPTQ takes the columns with the largest inputs first
  DType scale_dtype = DType::f32;  ///< of the scales in files

  bool rounds_inputs() const { return kind != CompressedKind::int4; }
  /// Inputs that share a scale, of a layer that has so many.
  std::int64_t group_of(std::int64_t inputs) const { return kind == CompressedKind::int4 ? group : inputs; }
};

}  // namespace sherd::models
