#pragma once

#include <optional>
#include <string>
#include <vector>

#include "models/families/family.h"
#include "models/gpt_config.h"

namespace sherd::models {

/// A tensor of a Hugging Face state dict.
struct PublishedTensor {
  std::string name;
  tensor::Shape shape;      ///< as it is published
  bool transposed = false;  ///< its columns are rows of the parameter (GPT-2's matrices)
  /// A tensor of a file may stack `stacked` tensors of that shape, of which this one is number `place`; 0: it
  /// is a whole one.
  std::int64_t place = 0, stacked = 0;
  /// How a tensor of a file stacks those of shape [a, b].
  enum class Stack : std::uint8_t {
    tensors,  ///< [stacked, a, b]
    rows,     ///< [stacked·a, b], one behind the other
    columns   ///< [a, b·stacked]: column j of number i is column j·stacked + i
  };
  Stack stack = Stack::tensors;

  tensor::Shape in_file() const;
  /// Whether its elements lie apart from each other in the file.
  bool takes_turns() const { return stacked > 0 && stack == Stack::columns; }
  /// Its first element in the file's tensor, where its elements lie together.
  std::int64_t first() const { return place * shape.numel(); }
};

/// A parameter of Gpt as rows of published tensors. Vectors have rows of one element.
struct PublishedParameter {
  /// Rows [row, row + rows) of the parameter are those of tensor `tensor` from `tensor_row` on, once it is
  /// not transposed; -1: they pad the vocabulary, and are in none.
  struct RowRun {
    std::int64_t row, rows;
    int tensor;
    std::int64_t tensor_row;
  };
  std::vector<PublishedTensor> tensors;
  std::vector<RowRun> rows;  ///< in ascending order, together all
  std::int64_t columns = 1;
};

/// Where the parameters of Gpt are in the state dicts of Hugging Face's transformers, by the names under
/// which its family is published (models/families). Pure. Packed qkv has its queries, keys and values apart
/// there, or ungrouped, gate and up likewise; GPT-2's matrices are transposed; rows that pad the vocabulary
/// are left out.
class HuggingFaceLayout {
 public:
  /// The model's layout as published_as() says. Throws Error{config} for a model that no family can be.
  explicit HuggingFaceLayout(const GptConfig& config);

  const char* family() const { return family_->name; }
  bool tied() const { return config_.tied(); }
  /// An adapter's parameters are where PEFT's files have them, or AdapterHub's. Throws Error{usage} for a
  /// name that Gpt does not have.
  PublishedParameter published(const std::string& parameter) const;
  /// The files are an adapter's, as PEFT has them: parameters of the model itself have "base_model.model." in
  /// front.
  HuggingFaceLayout of_adapter() const;
  bool is_of_adapter() const { return !in_front_.empty(); }
  /// The published name of the vocabulary's scores, where they have a table of their own.
  std::string head() const { return in_front_ + plain_head(); }
  /// Whether files may lack that parameter, which then begins anew: of an encoder what stands behind its
  /// blocks.
  bool may_lack(const std::string& parameter) const {
    return config_.head != config::Head::lm && is_of_head(parameter);
  }
  /// Where states are that modules have beside parameters (nn::StepState): routers' correction biases in
  /// fp32, [experts], by the module's path.
  std::vector<std::pair<std::string, PublishedTensor>> states() const;
  /// The files have each matrix of a layer's experts in one tensor, [experts, out, in], gates before ups, as
  /// transformers 5 holds them.
  void take_stacked_experts() { experts_stacked_ = true; }
  /// Where transformers 5 has the weight of an expert's layer in memory, in a module's parameter that all
  /// experts share ("model.layers.0.mlp.experts.gate_up_proj"), whatever the files have; nothing for other
  /// parameters.
  std::optional<PublishedParameter> among_experts(const std::string& parameter) const;
  /// The name of such a tensor of the first layer with experts; empty: the model has none.
  std::string stacked_experts() const;
  /// Tensors that files may have beside the table of tokens, and that must equal it.
  std::vector<std::string> copies_of_tokens() const;
  /// Whether files may have a tensor of that name that the model does not have.
  bool passes_over(const std::string& tensor) const;
  /// The part that published files may lack in front of all names but the head's: "transformer." or "model.".
  const std::string& prefix() const { return names().prefix; }

 private:
  const TensorNames& names() const { return family_->names; }
  std::string plain_head() const {
    return (config_.gives_rewards() ? names().rewards
            : config_.classifies()  ? names().classifier
                                    : names().head) +
           ".weight";
  }
  /// The place of a parameter by names without the prefix of all.
  PublishedParameter plainly_published(const std::string& parameter) const;
  /// The part in front of names in a block: "model.layers.0.".
  std::string at_block(const std::string& block) const;
  std::optional<PublishedParameter> of_stacks(std::int64_t layer, const std::string& part,
                                              const std::string& kind) const;
  std::optional<PublishedParameter> of_block(const std::string& layer, const std::string& part,
                                             const std::string& kind) const;
  void append_pairs(std::vector<PublishedParameter::RowRun>& rows, std::int64_t row, int tensor,
                    std::int64_t from, std::int64_t turned) const;
  PublishedParameter of_qkv(const std::string& at, const std::string& kind) const;
  PublishedParameter of_gates(const std::string& at, const std::string& kind) const;
  std::optional<PublishedParameter> of_linear(const std::string& at, const std::string& part) const;
  std::optional<PublishedParameter> of_table_or_norm(const std::string& parameter) const;
  std::optional<PublishedParameter> of_experts(const std::string& at, const std::string& part,
                                               const std::string& kind) const;
  std::optional<PublishedParameter> of_latents(const std::string& at, const std::string& part) const;
  PublishedParameter of_stacked(const std::string& at, std::int64_t expert, bool up,
                                const std::string& kind) const;

  GptConfig config_;
  const Family* family_;
  bool experts_stacked_ = false;
  std::string in_front_;  ///< of names of the model's own parameters
};

}  // namespace sherd::models
