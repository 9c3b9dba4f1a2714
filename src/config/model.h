#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/choices.h"

namespace sherd::config {

/// A family of models, as config.json's model_type names it: an index of family_names(). A family picks
/// defaults, and the Hugging Face files that the model is exported as (models/families). No value has a name
/// in code, so that nothing but the lists of families knows them.
enum class ModelType : std::uint8_t {};
/// relative: scores of attention have a bias by how far the key is from the query (Raffel et al. 2020, T5).
enum class PositionType : std::uint8_t { learned, rotary, relative };
enum class Norm : std::uint8_t { layernorm, rmsnorm };
/// Activations from swiglu on have a gate (tensor::Glu).
enum class FfnActivation : std::uint8_t {
  gelu_tanh,
  gelu,
  relu,
  relu2,  ///< its square
  swiglu,
  geglu_tanh,
  geglu,
  swiglu_clamped
};
/// Where a block's norms stand: x + f(norm(x)), x + norm(f(x)) (OLMo 2), x + norm(f(norm(x))) (Gemma 2), or
/// norm(x + f(x)) (Vaswani et al. 2017; BERT), where no norm follows the last block.
enum class NormPlacement : std::uint8_t { pre, post, sandwich, post_residual };
/// The layers behind the blocks.
enum class Head : std::uint8_t {
  lm,   ///< scores of the vocabulary
  mlm,  ///< BERT's for masked tokens: linear layer, activation, norm, scores of the vocabulary with a bias
  /// Scores of a text's labels, by its first token, behind mlm's linear layer, activation and norm (where
  /// norms follow sums: behind a linear layer and tanh, BERT's pooler) and dropout.
  sequence_classification,
  /// Scores of each token's labels, behind the same layers (where norms follow sums: none) and dropout.
  token_classification,
  pretraining,  ///< mlm, and scores of whether the second of two texts goes on with the first
  reward        ///< one number for a text that a decoder has read, by its last token
};
/// A layer's attention: to all tokens that the mask shows, to those of a window among them, or linear.
enum class LayerType : std::uint8_t { full_attention, sliding_attention, linear_attention };

/// The largest that a model may be along each axis. Far above what anyone trains, and such that no count of
/// elements overflows and nothing that is held per layer grows large.
inline constexpr std::int64_t most_layers = 2048, most_hidden = 1 << 20, most_ffn_hidden = 1 << 22,
                              most_heads = 1 << 16, most_linear_head = 1 << 12, most_positions = 1 << 24,
                              most_vocabulary = 1 << 24, most_experts = 1 << 12, most_token_types = 1 << 12,
                              most_labels = 1 << 16, most_buckets = 1 << 12;

/// Section `model.rope_scaling`: rotary positions for longer sequences than a model was first trained on.
/// Keys and meanings are those of transformers' rope_parameters.
struct RopeScaling {
  RotaryScaling type = RotaryScaling::none;  ///< key "rope_type", required; none: there is no such section
  double factor = 1;                         ///< ≥ 1, required but with longrope
  double low_freq_factor = 1, high_freq_factor = 4;  ///< > 0; llama3
  double beta_fast = 32, beta_slow = 1;              ///< > 0; yarn
  /// > 0; of the scores' square root; yarn: default 0.1·ln(factor) + 1; longrope: √(1 + ln(s)/ln(n)), where s
  /// is the factor, by default max_positions over n, the original positions
  double attention_factor = 0;
  bool truncate = true;  ///< yarn: the bounds of its ramp are whole numbers
  /// longrope's divisors of the frequency of each pair of a head that turns: for a seq_length of at most the
  /// original positions, and for a longer one.
  std::vector<double> short_factor, long_factor;
  /// Positions that the model was first trained on; llama3 and longrope: required, yarn: default
  /// max_positions.
  std::int64_t original_max_positions = 0;
  bool operator==(const RopeScaling&) const = default;
};

/// Section `model.sliding_rope`: the rotary positions of layers with a window, where they are not the
/// others'.
struct SlidingRope {
  double rotary_base = 10000;  ///< > 1
  RopeScaling rope_scaling;
  bool operator==(const SlidingRope&) const = default;
};

/// Section `model.encoder`: the first layers are an encoder's, which read the first tokens of a sample; the
/// others are a decoder's, which write the others, and attend to what the encoder made (T5).
struct Encoder {
  std::int64_t num_layers = 0;  ///< of the model's; 0: there is no such section
  std::int64_t seq_length = 0;  ///< of the model's
  bool operator==(const Encoder&) const = default;
};

/// Section `model.mla`: multi-head latent attention (DeepSeek-V2), in the place of num_kv_heads and head_dim.
struct Mla {
  std::int64_t kv_lora_rank = 0;  ///< numbers of which a token's keys and values are made; 0: no such section
  std::int64_t q_lora_rank = 0;   ///< of which its queries are made; 0: these are made of the stream
  std::int64_t qk_nope_head_dim = 128,
               qk_rope_head_dim = 64;  ///< of a key: elements that do not turn, that do
  std::int64_t v_head_dim = 128;       ///< of a value; no more than a key has
  double norm_epsilon = 1e-6;          ///< > 0, of the norms of both latents
  bool operator==(const Mla&) const = default;
};

/// Section `model.linear_attention`: layers of type linear_attention, a gated delta rule (Qwen3-Next), whose
/// every value head keeps a state of key_head_dim x value_head_dim numbers of a text.
struct LinearAttention {
  std::int64_t num_key_heads = 0;    ///< 0: there is no such section
  std::int64_t num_value_heads = 0;  ///< a multiple; 0: as many
  std::int64_t key_head_dim = 128, value_head_dim = 128;
  std::int64_t conv_kernel_dim = 4;  ///< rows of the convolution before queries, keys and values, 1 to 8
  std::int64_t key_width() const { return num_key_heads * key_head_dim; }
  std::int64_t value_width() const { return num_value_heads * value_head_dim; }
  /// Columns of queries, keys and values.
  std::int64_t width() const { return 2 * key_width() + value_width(); }
  bool operator==(const LinearAttention&) const = default;
};

/// Section `model.moe`: experts in place of the feed-forward part of some blocks.
struct Moe {
  std::int64_t experts = 0;          ///< experts of each such block, required; 0: there is no such section
  std::int64_t top_k = 2;            ///< experts of a token
  std::int64_t ffn_hidden_size = 0;  ///< width of each; default the model's
  std::int64_t every = 1;           ///< one block in so many has experts, counted behind the first dense ones
  std::int64_t first_dense = 0;     ///< blocks without experts at the start
  std::int64_t shared_experts = 0;  ///< width of a dense part beside them, in experts
  RouterScores router = RouterScores::softmax;
  bool norm_topk = true;                    ///< a token's weights add up to 1; default false where top_k is 1
  double routed_scaling_factor = 1;         ///< > 0; multiplies the weights
  std::int64_t groups = 1, top_groups = 1;  ///< equal groups of experts, and how many of them a token takes
  double capacity_factor = 0;  ///< ≥ 0; of a micro-batch's fair share that an expert takes; 0: all
  Drop drop = Drop::by_weight;
  double aux_loss = 0.01;  ///< ≥ 0; factor of the balance loss
  BalanceLoss aux_loss_type = BalanceLoss::all_choices;
  double z_loss = 0;         ///< ≥ 0; factor of the router z-loss
  bool router_bias = false;  ///< the router's logits have a bias that is trained; by type
  /// A bias of each expert, which counts for the choice alone (`e_score_correction_bias`); with bias_update
  /// always there; by type.
  bool correction_bias = false;
  double bias_update = 0;  ///< [0, 1]; by how much it moves with a step
  double jitter = 0;       ///< [0, 0.99]; a router's input is multiplied by [1 − jitter, 1 + jitter]
  bool shared_expert_gate = false;  ///< the shared part is multiplied by a sigmoid of its own
  bool use_residual = false;  ///< a dense part of the model's width beside the experts, and a softmax of both

  /// Whether the block of that index has experts.
  bool in(std::int64_t block) const {
    return experts > 0 && block >= first_dense && (block - first_dense) % every == every - 1;
  }
  /// How many of a model's blocks have experts.
  std::int64_t blocks(std::int64_t layers) const {
    return experts == 0 || layers < first_dense ? 0 : (layers - first_dense) / every;
  }
  bool operator==(const Moe&) const = default;
};

/// Section `model`: a decoder-only or an encoder-only transformer, or with `encoder` both in one. `type`
/// picks the defaults of the fields marked "by type"; every field may still be set by itself. The section is
/// for `sherd train`; callers with a model of their own leave it out.
struct Model {
  ModelType type{};
  std::int64_t vocab_size = 0;  ///< token ids; 0 (default): as the dataset's tokenizer says
  /// The embedding's rows are rounded up to a multiple of this; the extra rows take no part in the loss.
  std::int64_t pad_vocab_to_multiple_of = 128;
  std::int64_t seq_length = 0;  ///< tokens per sample, required
  /// Longest sequence that the model is made for: rows of learned positions, of which samples use the first
  /// `seq_length`; default seq_length.
  std::int64_t max_positions = 0;
  std::int64_t hidden_size = 0;   ///< required
  std::int64_t num_layers = 0;    ///< required
  std::int64_t num_heads = 0;     ///< required; query heads
  std::int64_t num_kv_heads = 0;  ///< key-value heads, divides num_heads; default num_heads
  std::int64_t head_dim = 0;      ///< default hidden_size / num_heads
  /// Default 8/3·hidden_size rounded up to a multiple of 64 in families with SwiGLU, 4·hidden_size in others.
  std::int64_t ffn_hidden_size = 0;
  /// Whether a token sees itself and those before it alone; else it sees all of its document (an encoder). By
  /// type.
  bool causal = true;
  PositionType position = PositionType::learned;  ///< by type
  double rotary_base = 10000;                     ///< > 1; rotary only
  double partial_rotary_factor = 1;               ///< (0, 1]; of a head's elements, the first ones, that turn
  RopeScaling rope_scaling;                       ///< rotary only
  std::optional<SlidingRope> sliding_rope;        ///< nothing: as in the other layers
  /// The last of every so many layers has no rotary positions (NoPE); 0: all layers have them.
  std::int64_t no_rope_layer_interval = 0;
  /// Queries at position p are multiplied by 1 + β·ln(1 + ⌊p/n⌋), n being the positions that the model was
  /// first trained on (rope_scaling.original_max_positions, else max_positions). 0: they are not.
  double llama_4_scaling_beta = 0;
  /// Tokens that a query sees, itself among them, and without `causal` as many behind it; 0: all.
  std::int64_t sliding_window = 0;
  /// Which layers have the window, or a linear attention in the place of theirs: a pattern that repeats.
  /// Empty: none of the latter, and the window in all, where there is one.
  std::vector<LayerType> layer_types;
  /// relative: numbers of a head by distance. Without `causal` half of them are for keys behind the query.
  std::int64_t relative_attention_num_buckets = 32;
  std::int64_t relative_attention_max_distance = 128;  ///< from here on all distances share the last one
  bool qk_norm = false;  ///< RMSNorm of each head of queries and keys, before rotary positions; by type
  /// Whether all query heads together have one norm, and all key heads one; with qk_norm; by type.
  bool qk_norm_all_heads = false;
  bool attention_sinks = false;  ///< a score of each head beside those of keys, whose value is 0; by type
  double attn_logit_softcapping = 0;   ///< > 0: scores s of attention become c·tanh(s/c); by type
  double final_logit_softcapping = 0;  ///< > 0: and so those of the vocabulary; by type
  Norm norm = Norm::layernorm;         ///< by type
  bool norm_bias = true;               ///< LayerNorm has a bias; by type
  double norm_epsilon = 1e-5;          ///< > 0
  bool norm_unit_offset = false;       ///< RMSNorm multiplies by 1 + its weight; by type
  NormPlacement norm_placement = NormPlacement::pre;    ///< by type
  FfnActivation activation = FfnActivation::gelu_tanh;  ///< by type; gelu is x·Φ(x)
  double dropout = 0;            ///< dropout of what blocks add to the residual stream, [0, 1); by type
  double attention_dropout = 0;  ///< dropout of attention weights; default `dropout`
  /// dropout of the embeddings' sum, and with `encoder` behind both last norms; default `dropout`
  double embedding_dropout = 0;
  double ffn_dropout = 0;        ///< dropout of what the feed-forward part's activation gives
  std::int64_t token_types = 0;  ///< rows of a table of types of tokens (segments); 0: none; by type
  /// A norm behind the embeddings' sum, in the place of the first layer's own; by type.
  bool embedding_norm = false;
  bool scale_embeddings = false;    ///< times √hidden_size, in the dtype of the model; by type
  double embedding_multiplier = 1;  ///< of the embeddings, ≠ 0
  double residual_multiplier = 1;   ///< of what blocks add to the residual stream, ≠ 0
  double attention_multiplier = 0;  ///< of queries times keys, > 0; 0: 1/√head_dim
  double logits_scaling = 1;        ///< that the scores of the vocabulary are divided by, > 0
  Head head = Head::lm;             ///< by type
  std::vector<std::string> labels;  ///< names of the classes that texts or their tokens have; classifies()
  bool tie_embeddings = true;       ///< the output projection is the embedding; by type
  bool bias = true;                 ///< linear layers have a bias; by type
  bool mlp_bias = true;             ///< with `bias`: those of feed-forward parts and experts have one too
  /// Bias of the projection to queries, keys and values; true wherever `bias` is; default `bias`, or by type.
  bool qkv_bias = true;
  /// Deviation of normal initial weights, > 0; divided by √(2·num_layers) where they feed the residual
  /// stream.
  double init_std = 0.02;
  /// Weights of linear layers begin with init_std over the square root of their inputs, queries' also of
  /// head_dim (Mesh TensorFlow's; T5); by type.
  bool width_scaled_init = false;
  std::int64_t decoder_start_token_id = 0;  ///< with `encoder`: what a decoder's text begins with
  Encoder encoder;
  bool attention_gate = false;  ///< what attention finds is multiplied by a sigmoid of its own; by type
  Mla mla;
  LinearAttention linear_attention;
  Moe moe;

  /// `vocabulary` rounded up to a multiple of pad_vocab_to_multiple_of.
  std::int64_t padded_vocab(std::int64_t vocabulary) const {
    return (vocabulary + pad_vocab_to_multiple_of - 1) / pad_vocab_to_multiple_of * pad_vocab_to_multiple_of;
  }
  std::int64_t padded_vocab() const { return padded_vocab(vocab_size); }
  /// Rows of the packed projection to queries, keys and values.
  std::int64_t qkv_width() const { return (num_heads + 2 * num_kv_heads) * head_dim; }
  bool gated() const { return activation >= FfnActivation::swiglu; }
  bool has_encoder() const { return encoder.num_layers > 0; }
  /// Whether the layer of that index is an encoder's in front of a decoder.
  bool encodes(std::int64_t layer) const { return layer < encoder.num_layers; }
  /// Tokens of a sample that the layers with the loss see.
  std::int64_t target_length() const { return seq_length - encoder.seq_length; }
  /// Positions after which queries grow a step, with llama_4_scaling_beta.
  std::int64_t query_positions() const {
    const std::int64_t first = rope_scaling.original_max_positions;
    return first > 0 ? first : max_positions;
  }
  bool norms_all_heads() const { return qk_norm && qk_norm_all_heads; }
  /// The norms of a block that work on the stream's width.
  int block_norms() const { return norm_placement == NormPlacement::sandwich ? 4 : 2; }
  /// Whether the layer has a norm before its attention: the first has none behind one of the embeddings.
  bool norm_before(std::int64_t layer) const {
    const bool there = norm_placement == NormPlacement::pre || norm_placement == NormPlacement::sandwich;
    return there && !(layer == 0 && embedding_norm);
  }
  /// Whether a norm stands between the last block and the head.
  bool final_norm() const { return norm_placement != NormPlacement::post_residual; }
  /// Whether the layer of that index sees a window alone.
  bool slides(std::int64_t layer) const {
    const auto at = static_cast<std::size_t>(layer);
    return sliding_window > 0 &&
           (layer_types.empty() || layer_types[at % layer_types.size()] == LayerType::sliding_attention);
  }
  /// Whether the layer has the linear attention that the section says.
  bool linear(std::int64_t layer) const {
    return !layer_types.empty() &&
           layer_types[static_cast<std::size_t>(layer) % layer_types.size()] == LayerType::linear_attention;
  }
  LayerType layer_type(std::int64_t layer) const {
    return linear(layer)   ? LayerType::linear_attention
           : slides(layer) ? LayerType::sliding_attention
                           : LayerType::full_attention;
  }
  bool any_linear() const {
    return std::count(layer_types.begin(), layer_types.end(), LayerType::linear_attention) > 0;
  }
  /// The tokens that the layer's queries see, as sliding_window says; 0: all.
  std::int64_t window(std::int64_t layer) const { return slides(layer) ? sliding_window : 0; }
  /// Whether the layer has rotary positions.
  bool rotates(std::int64_t layer) const {
    return position == PositionType::rotary &&
           (no_rope_layer_interval == 0 || (layer + 1) % no_rope_layer_interval != 0);
  }
  /// Whether the head scores labels, of texts or of tokens.
  bool classifies() const { return head == Head::sequence_classification || labels_tokens(); }
  bool labels_tokens() const { return head == Head::token_classification; }
  /// The head gives a text one number.
  bool gives_rewards() const { return head == Head::reward; }
  /// A head beside that for masked tokens says whether the second of two texts goes on with the first.
  bool pairs_texts() const { return head == Head::pretraining; }
  /// The head scores something other than tokens of the vocabulary.
  bool scores_texts() const { return classifies() || gives_rewards(); }
  /// Whether the head's table is that of the embeddings.
  bool tied() const { return tie_embeddings && !scores_texts(); }
  /// Scores that mean something, and rows of the head's table.
  std::int64_t scores() const {
    return gives_rewards() ? 1 : classifies() ? static_cast<std::int64_t>(labels.size()) : vocab_size;
  }
  std::int64_t padded_scores() const { return scores_texts() ? (scores() + 7) / 8 * 8 : padded_vocab(); }
  bool has_qkv_bias() const { return bias || qkv_bias; }
  bool has_mlp_bias() const { return bias && mlp_bias; }
  bool operator==(const Model&) const = default;
};

/// The names of all families, in the order of ModelType. Each has a file in models/families too.
std::vector<std::string> family_names();
/// The family of that name. Throws Error{usage} where there is none.
ModelType family_named(std::string_view name);
/// A model with the family's defaults and no sizes.
const Model& defaults_of(ModelType type);

/// The model with what 0 stands for filled in: max_positions, num_kv_heads, head_dim, ffn_hidden_size, those
/// of `moe` and of yarn; and with the shortest layer_types that say the same of its layers. Throws
/// Error{config} naming the first key that does not fit the others, or is beyond the bounds above; vocab_size
/// may be 0.
Model resolved(Model model);

/// A `model` section alone, {"model": {…}}, as text that the parser reads to the same.
std::string section_of(const Model& model);

std::string_view name_of(ModelType type);            ///< "gpt2", "llama", …
std::string_view name_of(RotaryScaling type);        ///< "default", "linear", "llama3", "yarn"
std::string_view name_of(PositionType type);         ///< "learned", "rotary", "relative"
std::string_view name_of(Norm norm);                 ///< "layernorm", "rmsnorm"
std::string_view name_of(FfnActivation activation);  ///< "gelu_tanh", "gelu", "swiglu", …
std::string_view name_of(NormPlacement placement);   ///< "pre", "post", "sandwich", "post_residual"
std::string_view name_of(Head head);                 ///< "lm", "mlm", "sequence_classification", …
std::string_view name_of(LayerType type);  ///< "full_attention", "sliding_attention", "linear_attention"

}  // namespace sherd::config
