#pragma once

#include <cstdint>
#include <string_view>

namespace sherd::config {

/// Families, as config.json's model_type names them: each picks defaults, and the Hugging Face files that the
/// model is exported as.
enum class ModelType : std::uint8_t { gpt2, llama, mistral, qwen2, qwen3, mixtral, qwen3_moe };
enum class Positions : std::uint8_t { learned, rotary };
enum class Norm : std::uint8_t { layernorm, rmsnorm };
enum class FfnActivation : std::uint8_t { gelu_tanh, gelu, swiglu };

/// The largest that a model may be along each axis. Far above what anyone trains, and such that no count of
/// elements overflows and nothing that is held per layer grows large.
inline constexpr std::int64_t most_layers = 2048, most_hidden = 1 << 20, most_ffn_hidden = 1 << 22,
                              most_heads = 1 << 16, most_positions = 1 << 24, most_vocabulary = 1 << 24,
                              most_experts = 1 << 12;

enum class Router : std::uint8_t { softmax, softmax_topk, sigmoid };
enum class DropPolicy : std::uint8_t { weight, position };
enum class AuxLoss : std::uint8_t { switch_layers, gshard, hf };

enum class RopeType : std::uint8_t { none, linear, llama3, yarn };

/// Section `model.rope_scaling`: rotary positions for longer sequences than a model was first trained on.
/// Keys and meanings are those of transformers' rope_parameters.
struct RopeScaling {
  RopeType type = RopeType::none;  ///< key "rope_type", required; none: there is no such section
  double factor = 1;               ///< ≥ 1, required
  double low_freq_factor = 1, high_freq_factor = 4;  ///< > 0; llama3
  double beta_fast = 32, beta_slow = 1;              ///< > 0; yarn
  double attention_factor = 0;  ///< > 0; yarn: of the scores' square root; default 0.1·ln(factor) + 1
  bool truncate = true;         ///< yarn: the bounds of its ramp are whole numbers
  /// Positions that the model was first trained on; llama3: required, yarn: default max_positions.
  std::int64_t original_max_positions = 0;
  bool operator==(const RopeScaling&) const = default;
};

/// Section `model.moe`: experts in place of the feed-forward part of some blocks.
struct Moe {
  std::int64_t experts = 0;          ///< of each such block, required; 0: there is no such section
  std::int64_t top_k = 2;            ///< experts of a token
  std::int64_t ffn_hidden_size = 0;  ///< width of each; default the model's
  std::int64_t every = 1;            ///< each so-manieth block behind the first dense ones has experts
  std::int64_t first_dense = 0;      ///< blocks without experts at the start
  std::int64_t shared_experts = 0;   ///< width of a dense part beside them, in experts
  /// Of softmax over all experts, of softmax over those chosen, or sigmoids.
  Router router = Router::softmax;
  bool norm_topk = true;                    ///< a token's weights add up to 1; default false where top_k is 1
  double routed_scaling_factor = 1;         ///< > 0; multiplies the weights
  std::int64_t groups = 1, top_groups = 1;  ///< of equal groups of experts a token takes the best few
  double capacity_factor = 0;  ///< ≥ 0; of a micro-batch's fair share that an expert takes; 0: all
  DropPolicy drop = DropPolicy::weight;
  double aux_loss = 0.01;  ///< ≥ 0; factor of the balance loss
  /// Of each layer's choices, of its first choices, or of all layers together.
  AuxLoss aux_loss_type = AuxLoss::switch_layers;
  double z_loss = 0;       ///< ≥ 0; factor of the router z-loss
  double bias_update = 0;  ///< [0, 1]; by how much a bias of each expert moves with a step; 0: there is none
  double jitter = 0;       ///< [0, 0.99]; a router's input is multiplied by [1 − jitter, 1 + jitter]
  bool shared_expert_gate = false;  ///< the shared part is multiplied by a sigmoid of its own
  bool use_residual = false;  ///< a dense part of the model's width beside the experts, and a softmax of both
  bool operator==(const Moe&) const = default;
};

/// Section `model`: a decoder-only transformer. `type` picks the defaults of the fields marked "by type";
/// every field may still be set by itself. The section is for `sherd train`; callers with a model of their
/// own leave it out.
struct Model {
  ModelType type = ModelType::gpt2;  ///< a family
  std::int64_t vocab_size = 0;       ///< token ids; 0 (default): as the dataset's tokenizer says
  /// The embedding's rows are rounded up to a multiple of this; the extra rows take no part in the loss.
  std::int64_t pad_vocab_to_multiple_of = 128;
  std::int64_t seq_length = 0;  ///< tokens per sample, required
  std::int64_t max_positions =
      0;  ///< longest sequence of the model: rows of learned positions; default seq_length
  std::int64_t hidden_size = 0;   ///< required
  std::int64_t num_layers = 0;    ///< required
  std::int64_t num_heads = 0;     ///< required; query heads
  std::int64_t num_kv_heads = 0;  ///< key-value heads, divides num_heads; default num_heads
  std::int64_t head_dim = 0;      ///< default hidden_size / num_heads
  /// Default 4·hidden (gpt2), 8/3·hidden rounded up to a multiple of 64 (others).
  std::int64_t ffn_hidden_size = 0;
  Positions position = Positions::learned;  ///< by type: learned (gpt2), rotary (others)
  double rotary_base = 10000;               ///< > 1; rotary only
  RopeScaling rope_scaling;                 ///< rotary only
  std::int64_t sliding_window = 0;          ///< tokens that a query sees, itself among them; 0: all before it
  bool qk_norm =
      false;  ///< RMSNorm on each head of queries and keys, before rotary positions; by type: qwen3
  Norm norm = Norm::layernorm;  ///< by type: layernorm (gpt2), rmsnorm (others)
  double norm_epsilon = 1e-5;   ///< > 0
  /// By type: gelu_tanh (gpt2), swiglu (others); gelu is x·Φ(x).
  FfnActivation activation = FfnActivation::gelu_tanh;
  double dropout = 0;            ///< of residual branches, [0, 1); by type: 0.1 (gpt2), 0 (others)
  double attention_dropout = 0;  ///< of attention weights; default `dropout`
  double embedding_dropout = 0;  ///< of the embeddings' sum; default `dropout`
  bool tie_embeddings = true;    ///< the output projection is the embedding; by type: gpt2 yes, others no
  bool bias = true;              ///< of linear layers; by type: gpt2 yes, others no
  bool qkv_bias = true;          ///< of the projection to queries, keys and values; default `bias`, qwen2 yes
  /// Of normal initial weights, > 0; divided by √(2·num_layers) where they feed the residual stream.
  double init_std = 0.02;
  Moe moe;

  /// `vocabulary` rounded up to a multiple of pad_vocab_to_multiple_of.
  std::int64_t padded_vocab(std::int64_t vocabulary) const {
    return (vocabulary + pad_vocab_to_multiple_of - 1) / pad_vocab_to_multiple_of * pad_vocab_to_multiple_of;
  }
  bool operator==(const Model&) const = default;
};

std::string_view name_of(ModelType type);            ///< "gpt2", "llama", …
std::string_view name_of(RopeType type);             ///< "default", "linear", "llama3", "yarn"
std::string_view name_of(Positions positions);       ///< "learned", "rotary"
std::string_view name_of(Norm norm);                 ///< "layernorm", "rmsnorm"
std::string_view name_of(FfnActivation activation);  ///< "gelu_tanh", "gelu", "swiglu"
std::string_view name_of(Router router);             ///< "softmax", "softmax_topk", "sigmoid"
std::string_view name_of(DropPolicy policy);         ///< "weight", "position"
std::string_view name_of(AuxLoss loss);              ///< "switch", "gshard", "hf"

}  // namespace sherd::config
