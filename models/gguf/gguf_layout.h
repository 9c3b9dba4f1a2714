#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "models/gguf/gguf_file.h"
#include "models/hub/adapter_targets.h"
#include "models/hub/hugging_face.h"

namespace sherd::models {

/// A parameter of Gpt as tensors of a GGUF file, of which experts' are parts that lie behind each other
/// (PublishedTensor::stacked). Rows of no run are not in the file.
struct GgufParameter : PublishedParameter {
  double shift = 0, factor = 1;  ///< files hold factor·(value + shift)
  bool decay = false;            ///< or -exp(value)
  /// Column i of the tensor is column column_of[i] of the parameter; empty: columns keep their places.
  std::vector<std::int64_t> column_of = {};
};

/// Where the parameters of Gpt are in GGUF files. All families have the same names there; Family::gguf tells
/// how a family's files differ. Pure.
class GgufLayout {
 public:
  /// Throws Error{config} naming what of the model llama.cpp does not compute.
  explicit GgufLayout(const GptConfig& config);

  const Gguf& family() const { return family_->gguf; }
  const GptConfig& config() const { return config_; }
  /// The tensors of a parameter, whose rows and columns these are, 0 columns of a vector: nothing where files
  /// have none, two for a table that makes the scores, too, where these need one of their own. Throws
  /// Error{usage} for a name that Gpt does not have.
  std::vector<GgufParameter> of(const std::string& parameter, std::int64_t rows, std::int64_t columns) const;
  /// The tensors of lora_A or lora_B of a layer with LoRA. `alpha`: the file's, by whose quotient with the
  /// rank readers multiply. Throws Error{config} for a layer whose products these files cannot have.
  std::vector<GgufParameter> of_adapter(const std::string& layer, const std::string& kind,
                                        double alpha) const;
  /// The name of the tensor with the correction biases of the router at `path`.
  static std::string correction_bias(const std::string& path);
  /// Tensors that readers keep in fp32, as llama.cpp's own files do.
  static bool stays_wide(const GgufSpec& tensor);

 private:
  GgufParameter of_block(std::int64_t layer, const std::string& part, const std::string& kind,
                         std::int64_t rows, std::int64_t columns) const;
  GgufParameter of_qkv(const std::string& at, const std::string& kind) const;
  GgufParameter of_latents(const std::string& at, const std::string& part, std::int64_t rows,
                           std::int64_t columns) const;
  GgufParameter of_linear(const std::string& at, const std::string& part, std::int64_t rows,
                          std::int64_t columns) const;
  void append_head(GgufParameter& to, std::int64_t row, std::int64_t count, int tensor, std::int64_t from,
                   std::int64_t turned) const;

  GptConfig config_;
  const Family* family_;
};

}  // namespace sherd::models
