#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "autograd/tape.h"
#include "config/adapter.h"
#include "config/model.h"
#include "sharding/parallel/adapters/bottleneck.h"
#include "sharding/parallel/experts/moe.h"

namespace sherd::models {

enum class Norm : std::uint8_t { layer_norm, rms_norm };
enum class PositionKind : std::uint8_t { learned, rotary };
enum class Mlp : std::uint8_t { gelu_tanh, gelu_erf, swiglu };
/// What goes into the product that it follows; none: nothing does.
tensor::Activation fused_activation(Mlp mlp);

/// Experts in place of the feed-forward part of some blocks.
struct ExpertsOptions {
  std::int64_t count = 0;        ///< of each such block; 0: there are none
  std::int64_t ffn_hidden = 0;   ///< of each expert; 0: that of dense blocks
  std::int64_t every = 1;        ///< each so-manieth of the blocks behind the first dense ones has experts
  std::int64_t first_dense = 0;  ///< blocks
  std::int64_t shared = 0;       ///< a dense part of so many times ffn_hidden beside them, for all tokens
  tensor::Routing routing{.top_k = 2, .normalize = true};
  parallel::RouterLosses losses{.balance = 0.01};
  double capacity_factor = 0;
  parallel::Drop drop = parallel::Drop::by_weight;
  double jitter = 0, bias_update = 0;  ///< as parallel::MoeOptions
  bool shared_gate = false;            ///< the shared part times sigmoid(x·w) (Qwen2-MoE)
  /// A feed-forward part of a dense block's width beside the experts; the two are weighed by a softmax of
  /// x·wᵀ
  /// + b (Rajbhandari et al. 2022, "DeepSpeed-MoE").
  bool residual = false;

  /// Whether the block has experts.
  bool in(std::int64_t block) const {
    return count > 0 && block >= first_dense && (block - first_dense) % every == every - 1;
  }
  /// How many of so many blocks have.
  std::int64_t blocks(std::int64_t layers) const {
    return count == 0 || layers < first_dense ? 0 : (layers - first_dense) / every;
  }
};

/// What is trained beside a model's own weights, which stay as they are (models/adapters/adapters.h).
struct AdapterOptions {
  config::AdapterType type = config::AdapterType::none;
  std::int64_t rank = 8;
  double scale = 1;   ///< of LoRA's products
  float dropout = 0;  ///< of what goes into them
  /// Ends of the names of published modules; at least one where layers have an adapter.
  std::vector<std::string> targets;
  std::int64_t virtual_tokens = 0;  ///< of each prompt; 0: there is none
  std::int64_t prompts = 1;
  std::int64_t encoder_hidden = 0;                     ///< of p-tuning's network
  parallel::BottleneckOptions bottleneck;              ///< of the networks in blocks
  std::string name;                                    ///< of these, in files
  config::ModelType family = config::ModelType::gpt2;  ///< as which the model is published
  bool int8_base = false;  ///< weights of the blocks' linear layers that stay as they are are kept in 8 bits
};

/// The shape of a decoder-only transformer. The defaults are GPT-2 small.
struct GptOptions {
  std::int64_t vocab_size = 50257;
  std::int64_t vocab_multiple = 128;  ///< the tables get rows up to a multiple of this; the loss ignores them
  std::int64_t max_seq = 1024;        ///< longest sequence
  std::int64_t position_rows =
      0;  ///< of the table of learned positions, of which max_seq are used; 0: max_seq
  std::int64_t hidden = 768;
  std::int64_t layers = 12;
  int heads = 12;
  int kv_heads = 0;             ///< key-value heads (grouped queries); 0: as many as heads
  std::int64_t head_dim = 0;    ///< 0: hidden / heads
  std::int64_t ffn_hidden = 0;  ///< 0: 4·hidden, or for SwiGLU 8/3·hidden rounded up to a multiple of 64
  ExpertsOptions experts;
  Norm norm = Norm::layer_norm;
  double norm_eps = 1e-5;
  PositionKind positions = PositionKind::learned;
  tensor::Rotary rotary;
  std::int64_t sliding_window = 0;  ///< tensor::Attention::window
  bool qk_norm = false;             ///< RMSNorm of each query and key head before rotary positions (Qwen3)
  Mlp mlp = Mlp::gelu_tanh;
  bool bias = true;             ///< on every linear layer of the blocks
  bool qkv_bias = false;        ///< on the projection to queries, keys and values in any case (Qwen2)
  bool tied_embeddings = true;  ///< the output projection is the token table
  float embedding_dropout = 0.0f;
  float attention_dropout = 0.0f;  ///< of normalised scores
  float hidden_dropout = 0.0f;     ///< of what blocks add to the residual stream
  double init_std = 0.02;
  AdapterOptions adapter;

  /// Llama's style: RMSNorm, rotary positions, SwiGLU, no biases, untied tables.
  static GptOptions llama();

  /// Fills in what 0 stands for. Throws Error{config} naming the value that does not fit or is too large.
  GptOptions resolved() const;
  std::int64_t padded_vocab() const;
  /// The longest text that fits behind a prompt.
  std::int64_t max_text() const { return max_seq - adapter.virtual_tokens; }
  /// The ids that stand in front of every text, from padded_vocab() on. Throws Error{usage} where there are
  /// several prompts: TaskPrompt (models/adapters/prompt_weights.h) makes a model with one of them.
  std::vector<std::int32_t> prompt() const;

  // ---- of resolved options ----
  std::int64_t qkv_width() const { return (heads + 2 * kv_heads) * head_dim; }
  tensor::Attention geometry() const;
  /// What projects back onto the residual stream starts smaller, so that the stream's variance does not grow
  /// with depth (Radford et al. 2019).
  autograd::Init output_init() const;
  /// What a layer of experts is made with. `pooled`: what these layers share, where their loss asks for it.
  parallel::MoeOptions moe(std::shared_ptr<parallel::PooledChoices> pooled = nullptr) const;
  /// Elements of all parameters, tied ones once; `padding`: with the rows that only pad the vocabulary.
  std::int64_t num_parameters(bool padding = true) const;
};

/// How attention's products count (both conventions are in use; say which with every number).
enum class AttentionFlops : std::uint8_t {
  full,  ///< every score, as Narayanan et al. 2021 count: 72·B·L·s·h²·(1 + s/6h + V/12hL) per iteration
  causal_half  ///< only what the causal mask leaves: s/12h instead of s/6h
};

/// Floating-point operations that one token costs in a training step (forward and backward) on sequences of
/// `seq` tokens, of experts those that a token takes, of a model with an adapter without what the adapter
/// adds; multiplied by tokens per second this gives model
/// FLOP/s, the numerator of MFU. With `recompute` full every block's forward counts a second time (hardware
/// FLOPs); the output projection never does. Padding does not count.
double flops_per_token(const GptOptions& options, std::int64_t seq, AttentionFlops convention,
                       autograd::Recompute recompute = autograd::Recompute::none);

}  // namespace sherd::models
