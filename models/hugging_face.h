#pragma once

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "models/gpt_options.h"

namespace sherd::models {

/// Elements in host memory, as checkpoint files hold them.
struct HostTensor {
  tensor::Shape shape;
  DType dtype = DType::f32;
  std::vector<std::byte> bytes;
};

/// Finds a tensor of a Hugging Face state dict by name; nothing when there is none.
using HostTensorSource = std::function<std::optional<HostTensor>(const std::string& name)>;

/// Translation between the parameters of Gpt and the state dicts of Hugging Face's GPT2LMHeadModel and
/// LlamaForCausalLM. Pure: one parameter at a time, any dtype, values only moved. It undoes the grouping of
/// packed qkv, splits gate and up, transposes GPT-2's matrices and drops the rows that pad the vocabulary.
class HuggingFaceLayout {
 public:
  /// Throws Error{config} for options that neither model has (learned positions with RMSNorm, say).
  explicit HuggingFaceLayout(const GptOptions& options);

  /// "gpt2" or "llama", as config.json's model_type.
  const char* model_type() const { return gpt2_ ? "gpt2" : "llama"; }
  /// The tensors that hold the parameter named `parameter`. Throws Error{usage} for a name that Gpt does not
  /// have.
  std::vector<std::string> names(const std::string& parameter) const;
  /// The parameter's value as those tensors.
  std::vector<std::pair<std::string, HostTensor>> to(const std::string& parameter,
                                                     const HostTensor& value) const;
  /// The parameter's value from those tensors; rows that pad the vocabulary are zero. GPT-2 names are also
  /// found without their "transformer." in front, as published files have them. Throws Error{data} naming a
  /// tensor that is missing or has another shape.
  HostTensor from(const std::string& parameter, const HostTensorSource& source) const;

 private:
  struct Part {
    std::string name;
    std::int64_t rows = 0;  // of our matrix's rows (after undoing the transposition)
  };
  struct Entry {
    std::vector<Part> parts;
    std::int64_t columns = 1;
    bool matrix = false, transposed = false, grouped_qkv = false;
    std::int64_t padding_rows = 0;
  };
  Entry entry(const std::string& parameter) const;
  Entry block_entry(const std::string& parameter, const std::string& layer, const std::string& part,
                    const std::string& kind) const;
  /// One tensor of the source, as rows of our matrix.
  HostTensor piece(const Entry& entry, const Part& part, const HostTensorSource& source) const;
  /// Row of [Q; K; V] that each row of the packed projection is.
  std::vector<std::int64_t> qkv_rows() const;

  GptOptions options_;
  bool gpt2_;
};

}  // namespace sherd::models
