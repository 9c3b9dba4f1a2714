#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string_view>
#include <vector>

#include "autograd/tape.h"
#include "config/config.h"
#include "sharding/parallel/experts/moe.h"

namespace sherd::models {

/// The description from which a Gpt is built: the section `model` of a configuration, and the adapter that is
/// trained beside its weights, which then stay as they are. Made by hand it begins in GPT-2's style without
/// sizes and without dropout.
struct GptConfig : config::Model {
  /// Has no effect with type none. Once resolved by gpt_config(), `targets` names modules of the family that
  /// the model is published as, which is `type`.
  config::Adapter adapter = {};
  /// A model with the defaults of a family ("llama") and no sizes.
  static GptConfig of_family(std::string_view name) {
    return {config::defaults_of(config::family_named(name))};
  }
  /// Fills in what 0 stands for. Throws Error{config} naming the key that does not fit or is too large.
  GptConfig resolved() const;
  /// The longest text that fits behind a prompt.
  std::int64_t max_text() const { return seq_length - adapter.virtual_tokens(); }
  /// The ids that stand in front of every text, from padded_vocab() on. Throws Error{usage} where there are
  /// several prompts: TaskPrompt (models/adapters/prompt_weights.h) makes a model with one of them.
  std::vector<std::int32_t> prompt() const;
  /// Elements of all parameters of a resolved or unresolved model, tied ones once, an adapter's left out;
  /// `padding`: with the rows that only pad the vocabulary.
  std::int64_t num_parameters(bool padding = true) const;

  // The parts of a resolved model, in the words of the rooms below.
  tensor::Attention attention(std::int64_t layer) const;
  /// Nothing where the layer has no rotary positions.
  std::optional<tensor::Rotary> rotary(std::int64_t layer) const;
  /// The function that the feed-forward part's first product ends with; none where it has a gate.
  tensor::Activation fused_activation() const;
  /// The power of relu where that is the activation of the feed-forward part, behind the product: 1, or 2
  /// where it is squared (So et al. 2021, "Primer"). 0: the activation is another.
  int relu_power() const {
    return activation == config::FfnActivation::relu ? 1 : activation == config::FfnActivation::relu2 ? 2 : 0;
  }
  /// The function that the product of the head's linear layer ends with.
  tensor::Activation head_activation() const;
  /// The head is BERT's pooler: tanh follows that layer, and no norm.
  bool pools() const { return head == config::Head::sequence_classification && !final_norm(); }
  /// Whether a linear layer stands in the head before its scores: BERT's labels of tokens have none.
  bool has_head_dense() const {
    return head != config::Head::lm && !gives_rewards() && !(labels_tokens() && !final_norm());
  }
  /// Whether scores have a bias.
  bool has_head_bias() const { return head != config::Head::lm && !gives_rewards(); }
  /// The unit of a feed-forward part that has a gate.
  tensor::Glu glu() const;
  /// The factor of a table's embeddings of that dtype, to which published models round the root of the width;
  /// prompts stand beside them without it.
  double embedding_root(DType dtype) const;
  /// The number that is added to the gains of norms.
  double norm_shift() const { return norm_unit_offset ? 1 : 0; }
  autograd::Init init() const { return autograd::Init::normal(0, init_std); }
  /// The initial values of a weight of so many inputs.
  autograd::Init init_of(std::int64_t inputs) const;
  /// Weights that project back onto the residual stream start smaller, so that the stream's variance does not
  /// grow with depth (Radford et al. 2019), but where norms follow each sum, or widths scale them.
  autograd::Init output_init(std::int64_t inputs = 1) const;
  /// A layer of experts; `pooled`: what these layers share, where their loss asks for it.
  parallel::MoeOptions experts(std::shared_ptr<parallel::PooledChoices> pooled = nullptr) const;
};

/// The transformer that the configuration's `model` section describes, with the adapter of its section
/// `training`. `vocabulary`: the dataset's token ids, taken where the section leaves vocab_size out. Throws
/// Error{config} when the section is absent. A model may have fewer ids than the data's tokenizer: texts that
/// use one of the others are refused where they come.
GptConfig gpt_config(const config::Config& config, std::int64_t vocabulary);

/// How attention's products count (both conventions are in use; say which with every number).
enum class AttentionFlops : std::uint8_t {
  full,  ///< every score, as Narayanan et al. 2021 count: 72·B·L·s·h²·(1 + s/6h + V/12hL) per iteration
  causal_half  ///< only what the causal mask leaves: s/12h instead of s/6h
};

/// Floating-point operations that one token costs in a training step (forward and backward) on sequences of
/// `seq` tokens: an expert's where the token takes it, an adapter's not. Multiplied by tokens per second this
/// is model FLOP/s, the numerator of MFU: what is computed again, and padding, do not count.
double flops_per_token(const GptConfig& config, std::int64_t seq, AttentionFlops convention);

/// Scores of whether the second of two texts goes on with the first, and with those that mean nothing, so
/// that tensor ranks can share them.
inline constexpr std::int64_t sentence_scores = 2, padded_sentence_scores = 8;

/// Whether a parameter of Gpt, or the path of a layer, is an expert's.
inline bool is_of_expert(std::string_view parameter) {
  return parameter.find(".mlp.experts.") != std::string_view::npos;
}
/// Whether a parameter of Gpt stands behind its blocks and their norm.
inline bool is_of_head(std::string_view parameter) {
  return parameter.starts_with("head") || parameter.starts_with("pooler.") ||
         parameter.starts_with("sentence_head.");
}

}  // namespace sherd::models
