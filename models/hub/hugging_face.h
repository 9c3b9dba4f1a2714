#pragma once

#include <optional>
#include <string>
#include <vector>

#include "config/model.h"
#include "models/gpt_options.h"

namespace sherd::models {

/// A tensor of a Hugging Face state dict.
struct PublishedTensor {
  std::string name;
  tensor::Shape shape;      ///< as it is published
  bool transposed = false;  ///< its columns are rows of the parameter (GPT-2's matrices)
};

/// A parameter of Gpt as rows of published tensors. Vectors have rows of one element.
struct PublishedParameter {
  /// Rows [row, row + rows) of the parameter are those of tensor `tensor` from `tensor_row` on, once it is
  /// not transposed; -1: they pad the vocabulary, and are in none.
  struct Rows {
    std::int64_t row, rows;
    int tensor;
    std::int64_t tensor_row;
  };
  std::vector<PublishedTensor> tensors;
  std::vector<Rows> rows;  ///< in ascending order, together all
  std::int64_t columns = 1;
};

/// Where the parameters of Gpt are in the state dicts of Hugging Face's transformers: GPT-2, Llama, Mistral,
/// Qwen2, Qwen3, Mixtral, Qwen3-MoE, by the names under which models are published. Pure. Packed qkv has its
/// queries, keys and values apart there, gate and up likewise, GPT-2's matrices are transposed, and rows that
/// pad the vocabulary are left out.
class HuggingFaceLayout {
 public:
  /// `family`: as which the model is published (config::published_as()); not given: gpt2 or llama by norm and
  /// positions, mixtral where it has experts. Throws Error{config} for options that none has (learned
  /// positions with RMSNorm, say).
  explicit HuggingFaceLayout(const GptOptions& options, std::optional<config::ModelType> family = {});

  config::ModelType family() const { return family_; }
  bool tied() const { return options_.tied_embeddings; }
  /// Of an adapter's parameters: where they are in PEFT's files, or AdapterHub's. Throws Error{usage} for a
  /// name that Gpt does not have.
  PublishedParameter published(const std::string& parameter) const;
  /// What published files may lack in front of all names but the head's: "transformer." or "model.".
  const char* prefix() const { return gpt2_ ? "transformer." : "model."; }

 private:
  /// What stands in front of names in a block.
  std::string at_block(const std::string& block) const;
  PublishedParameter of_block(const std::string& parameter, const std::string& layer, const std::string& part,
                              const std::string& kind) const;
  PublishedParameter of_qkv(const std::string& at, const std::string& kind) const;
  std::optional<PublishedParameter> of_mlp(const std::string& at, const std::string& part,
                                           const std::string& kind) const;
  PublishedParameter of_expert(const std::string& at, const std::string& expert, bool up) const;

  GptOptions options_;
  config::ModelType family_;
  bool gpt2_;
};

}  // namespace sherd::models
