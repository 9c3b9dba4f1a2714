#pragma once

// Families of models, as Hugging Face's transformers publishes them: a file for each and its relatives, and a
// line in families.cpp. To add one, write a file like phi3.cpp, name it in families.cpp, and give its
// defaults in src/config/model.cpp, which say which norm, positions, activation and biases it has. Nothing
// else in the project knows families.

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "models/hub/json_keys.h"

namespace sherd::models {

/// The names of tensors in layers of linear attention.
struct LinearNames {
  std::string prefix = "linear_attn", qkv = "in_proj_qkv", z = "in_proj_z";
  std::vector<std::string> ba{"in_proj_b", "in_proj_a"};  ///< of one name: grouped by key heads
  bool grouped = false;                                   ///< `qkv` has z too, and is grouped by key heads
};

/// The names by which a family calls the tensors of its state dicts; the defaults are Llama's. A list of
/// several names: the parameter is published as that many tensors; of one: as it is packed here, but queries,
/// keys and values not grouped by heads.
struct TensorNames {
  std::string prefix = "model.";  ///< begins all names but the head's; some published files lack it
  std::string tokens = "embed_tokens", positions = "", token_types = "", embedding_norm = "";
  std::string norm = "norm", blocks = "layers";
  // In a block.
  std::string norm_1 = "input_layernorm", norm_2 = "post_attention_layernorm";
  std::string post_norm_1 = "", post_norm_2 = "";  ///< behind the parts
  std::vector<std::string> qkv{"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"};
  std::string q_norm = "self_attn.q_norm", k_norm = "self_attn.k_norm", projection = "self_attn.o_proj";
  std::string sinks = "self_attn.sinks";
  // Latent attention; `q`: queries without latents.
  std::string q = "self_attn.q_proj", q_down = "self_attn.q_a_proj",
              q_latent_norm = "self_attn.q_a_layernorm";
  std::string q_up = "self_attn.q_b_proj", kv_down = "self_attn.kv_a_proj_with_mqa";
  std::string kv_latent_norm = "self_attn.kv_a_layernorm", kv_up = "self_attn.kv_b_proj";
  // A decoder's attention to an encoder; and relative positions, in a stack's first block.
  std::string cross_norm = "", cross_projection = "", positions_table = "";
  std::vector<std::string> cross_qkv{};
  std::vector<std::string> up{"mlp.gate_proj", "mlp.up_proj"};
  std::string plain_up = "";  ///< in the place of these, of a model without gates
  std::string down = "mlp.down_proj";
  std::string router = "mlp.gate", experts = "mlp.experts";
  std::string correction_bias = "mlp.gate.e_score_correction_bias";
  std::string shared = "mlp.shared_experts", shared_gate = "mlp.shared_expert_gate";
  // In an expert.
  std::vector<std::string> expert_up{"gate_proj", "up_proj"};
  std::string expert_down = "down_proj";
  /// One tensor has the matrices of all experts, [experts, in, out], in which gates and ups take turns; their
  /// biases are NAME_bias.
  bool stacked_experts = false;
  LinearNames linear{};
  // Behind the blocks, without the prefix.
  std::string head = "lm_head", head_dense = "", head_norm = "", head_bias = "";
  std::string classifier = "";    ///< of labels
  std::string rewards = "score";  ///< of a decoder's
  /// BERT's pooler, in the place of head_dense, with the prefix; and without it the layer behind the pooler
  /// that scores pairs of texts.
  std::string pooler = "", sentence_head = "";
  std::vector<std::string> copies{};  ///< tables that files may have too, and which must be that of `tokens`
  /// The beginnings of names of tensors that files may have and the model does not.
  std::vector<std::string> passed_over{};
  bool transposed = false;   ///< matrices of the blocks are [in, out]
  bool interleaved = false;  ///< rotary positions turn elements 2i and 2i + 1 of a head, not i and i + d/2
  bool more_layers = false;  ///< files may have layers behind the model's, which predict further tokens
};

/// How a family's GGUF files differ from others' (models/gguf), and what llama.cpp's graph of it lacks.
struct Gguf {
  const char* architecture = nullptr;  ///< null: llama.cpp reads no such models
  bool pairs = false;         ///< rotary positions turn elements 2i and 2i + 1 of a head, not i and i + d/2
  bool packed_qkv = false;    ///< queries, keys and values are one tensor
  bool packed_up = false;     ///< gates and ups are one
  bool own_head = false;      ///< scores have a table of their own also where it is that of tokens
  bool windows = false;       ///< layers may have a window
  bool rope_factors = false;  ///< pairs of a head may have factors of their own
  bool tiled_values = false;  ///< linear attention's value heads of a key head lie apart
  const char *norm_2 = "ffn_norm", *post_norm_1 = "post_attention_norm", *post_norm_2 = "post_ffw_norm";
  /// The first thing of such a model that the graph does not have; null: nothing.
  std::optional<std::string> (*lacks)(const config::Model&) = nullptr;
};

/// One family.
struct Family {
  const char* name;                           ///< model_type; one of config::family_names()
  const char* architecture;                   ///< the class of transformers
  const char* sequence_classifier = nullptr;  ///< the class for models that classify texts
  const char* token_classifier = nullptr;     ///< the class for models that classify tokens
  const char* pretraining = nullptr;          ///< the class for models that learn pairs of texts
  /// The class of models with that head; empty: there is none.
  std::string class_of(config::Head head) const;
  /// Changes the family's defaults in a configuration to those of its class, for keys that a config.json
  /// lacks.
  void (*class_defaults)(Published&) = nullptr;
  /// Makes of keys that were read what follows from several; null: nothing does.
  void (*settle)(Published&) = nullptr;
  JsonKeys keys;  ///< in the order in which they are written
  TensorNames names = {};
  /// The names in the blocks of an encoder in front of a decoder, and of the norm behind them.
  TensorNames encoder_names = {};
  std::vector<std::string> lora_targets{"q_proj", "v_proj"};  ///< PEFT's defaults
  std::vector<std::string> ia3_targets{"k_proj", "v_proj", "down_proj"};
  /// Keys of section `model` that its class has and not all classes have, of those in optional_parts().
  std::vector<std::string_view> has{"sliding_window"};
  bool can(std::string_view key) const { return std::find(has.begin(), has.end(), key) != has.end(); }
  /// The first thing of such a model that the class does not have, beside what config::defaults_of()
  /// and the list above say; null: nothing more.
  std::optional<std::string> (*lacks)(const config::Model&) = nullptr;
  Gguf gguf = {};
};

/// A part of a model that only some classes have, and whether the model has it.
struct OptionalPart {
  std::string_view key;  ///< of section `model`
  bool there;
};
std::vector<OptionalPart> optional_parts(const config::Model& model);

/// All families, in the order in which they are tried for a model whose own family cannot say it.
const std::vector<Family>& families();
/// The family's description here.
const Family& family_of(config::ModelType type);

// The things that Llama's relatives have in common.

/// Sets the sizes that a class has where its config.json leaves them out.
struct ClassSizes {
  std::int64_t vocabulary, hidden, ffn, layers, heads, kv_heads, positions;
};
void set_sizes(config::Model& model, const ClassSizes& sizes);
/// SiLU, as hidden_act.
JsonKey silu();
/// Sizes, activation, norm and attention's dropout.
JsonKeys decoder_sizes(JsonKey activation = silu());
/// attention_bias and mlp_bias, which must be false; `written`: which of them such a file has.
JsonKeys no_biases(bool attention_written, bool mlp_written);
/// attention_bias, and where the class has it mlp_bias.
JsonKeys bias_keys(bool of_mlp);
struct WindowKeys {
  bool listed = false;  ///< layer_types says which layers have it
  bool always = false;  ///< the class needs one, also where no layer has it
  bool linear = false;  ///< layers have linear attention, and no window
};
/// sliding_window, and layer_types.
JsonKeys window_keys(WindowKeys has = {});
/// The keys of experts that all such classes have; `count`: what the number of experts is called.
JsonKeys experts_keys(std::string count, std::string other_count);
/// The first thing of the experts that no class of transformers has.
std::optional<std::string> lacks_experts(const config::Model& model);
/// The same for classes like Mixtral's, whose every block has experts weighed by a softmax of those chosen.
std::optional<std::string> lacks_mixture(const config::Model& model);
/// The keys of classes like DeepSeek's, whose experts lie in groups beside shared ones, and of their routers
/// of sigmoids.
JsonKeys grouped_experts_keys(bool norm_topk = true);  ///< norm_topk: weights may sum to 1
JsonKeys sigmoid_router_keys();
std::optional<std::string> lacks_grouped_experts(const config::Model& model);
std::optional<std::string> lacks_sigmoid_router(const config::Model& model);
/// The first thing that a llama.cpp graph lacks whose queries are as wide as the stream.
std::optional<std::string> lacks_other_heads(const config::Model& model);
/// The first thing that a llama.cpp graph lacks with experts in every block, whose weights do or do not sum
/// to 1.
std::optional<std::string> lacks_other_experts(const config::Model& model, bool weights_sum_to_1);
/// Lets intermediate_size be written as the width of an expert.
void write_expert_width(JsonKeys& keys);

}  // namespace sherd::models
