#include "config/hugging_face.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include "base/excerpt.h"
#include "config/tables.h"

namespace sherd::config {
namespace {

/// What the tables read. Fields beside the model are keys from which several of its follow.
struct Published {
  Model model;
  std::string activation, dtype, torch_dtype;
  bool use_sliding_window = false, router_losses = false;
  std::int64_t window = 0, window_layers = 28;
  double rope_theta = 0,
         inner_theta = 0;  ///< at the top, and in rope_parameters, which goes before; 0: not said
  double router_loss = 0.001;
  RopeScaling rope;
  bool original_missing = false;  ///< rope says nothing of the positions that it scales
  std::vector<std::string> layer_types;
};

using Keys = std::vector<Key<Published>>;

template <class U>
void put(Keys& keys, U Published::*member, Key<U> key) {
  keys.push_back(inside(member, std::move(key)));
}
void put(Keys& keys, Key<Model> key) {
  put(keys, &Published::model, std::move(key));
}

/// A key that may have one value alone, the one for which the models are the same.
Key<Published> only(std::string name, std::function<bool(const Value&)> same, std::string reason) {
  return custom<Published>(std::move(name), "", [same, reason](Published&, const Value& value) {
    if (!same(value)) value.error(value.node.brief(), " is not supported: ", reason);
  });
}
/// What concerns several keys, or none.
template <class... Args>
[[noreturn]] void refuse(const Value& file, const Args&... args) {
  fail(ErrorKind::config, file.node.place.file, ": ", args...);
}
bool is_true(const Value& value) {
  return value.node.is(Node::Kind::boolean) && value.node.boolean;
}

bool is_silu(const Value& value) {
  return value.node.is_text("silu") || value.node.is_text("swiglu");
}

/// What transformers and others keep in config.json and what no number of the model depends on.
constexpr const char* idle_keys =
    "architectures model_type transformers_version use_cache bos_token_id "
    "eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id forced_bos_token_id "
    "forced_eos_token_id tokenizer_class prefix id2label label2id num_labels problem_type "
    "task_specific_params finetuning_task output_attentions output_hidden_states output_scores "
    "return_dict return_dict_in_generate torchscript use_bfloat16 is_decoder tie_encoder_decoder "
    "chunk_size_feed_forward gradient_checkpointing pretraining_tp auto_map attn_implementation "
    "reorder_and_upcast_attn classifier_dropout summary_type summary_use_proj summary_activation "
    "summary_proj_to_labels summary_first_dropout unsloth_version unsloth_fixed n_ctx temperature "
    "top_k top_p typical_p do_sample num_beams num_beam_groups diversity_penalty repetition_penalty "
    "length_penalty early_stopping max_length min_length no_repeat_ngram_size "
    "encoder_no_repeat_ngram_size bad_words_ids num_return_sequences remove_invalid_values "
    "exponential_decay_length_penalty suppress_tokens begin_suppress_tokens "
    "cross_attention_hidden_size rope_interleaved n_special predict_special_tokens output_past "
    "max_sequence_length is_llama_config transformers.js_config model_max_length eos_token "
    "bos_token pad_token ";

/// Keys that all families have.
void put_common(Keys& keys) {
  std::istringstream names(idle_keys);
  for (std::string name; names >> name;)
    keys.push_back(custom<Published>(name, "", [](Published&, const Value&) {}));
  for (const auto& [name, member] :
       {std::pair("dtype", &Published::dtype), std::pair("torch_dtype", &Published::torch_dtype)})
    keys.push_back(custom<Published>(name, "", [member](Published& published, const Value& value) {
      if (!value.node.is(Node::Kind::string)) return;
      const std::string& type = value.text();
      published.*member = type.starts_with("torch.") ? type.substr(6) : type;
    }));
  keys.push_back(only("is_encoder_decoder", is_false, "the model has no encoder here"));
  keys.push_back(only("add_cross_attention", is_false, "the model has no encoder here"));
  keys.push_back(only("pruned_heads", is_empty, "all heads are there"));
  keys.push_back(only("quantization_config", never,
                      "take the files of the model before it was quantised, in bf16, fp16 or fp32"));
  keys.push_back(only("use_mrope", is_false, "positions are those of text"));
  keys.push_back(only("neftune_noise_alpha", equals_number(0), "embeddings get no noise"));
  keys.push_back(only("text_config", never, "the model reads text alone here"));
}

void put_sizes(Keys& keys) {
  using M = Model;
  put(keys, integer("vocab_size", &M::vocab_size, "", 1, most_vocabulary));
  put(keys, real("initializer_range", &M::init_std, "", 0, infinity, true));
  put(keys, boolean("tie_word_embeddings", &M::tie_embeddings));
}

Table<Published> gpt2_table() {
  using M = Model;
  Table<Published> table;
  Keys& keys = table.keys;
  put_common(keys), put_sizes(keys);
  put(keys,
      integer("n_positions", &M::max_positions, "", 1, most_positions).alias("max_position_embeddings"));
  put(keys, integer("n_embd", &M::hidden_size, "", 1, most_hidden).alias("hidden_size"));
  put(keys, integer("n_layer", &M::num_layers, "", 1, most_layers).alias("num_hidden_layers"));
  put(keys, integer("n_head", &M::num_heads, "", 1, most_heads).alias("num_attention_heads"));
  put(keys, integer("n_inner", &M::ffn_hidden_size, "", 1, most_ffn_hidden));
  keys.push_back(text("activation_function", &Published::activation, ""));
  put(keys, real("resid_pdrop", &M::dropout, "", 0, 0.99));
  put(keys, real("embd_pdrop", &M::embedding_dropout, "", 0, 0.99));
  put(keys, real("attn_pdrop", &M::attention_dropout, "", 0, 0.99));
  put(keys, real("layer_norm_epsilon", &M::norm_epsilon, "", 0, infinity, true));
  keys.push_back(only("scale_attn_weights", is_true, "scores are divided by the root of a head's size"));
  keys.push_back(only("scale_attn_by_inverse_layer_idx", is_false, "all layers scale their scores alike"));
  return table;
}

void put_rope(Keys& keys) {
  const auto read = [](Published& published, const Value& given_section) {
    // Some files say "type" and "rope_type" alike.
    Node node = given_section.node;
    const Node* kind = node.find("rope_type") ? node.find("rope_type") : node.find("type");
    published.original_missing =
        kind && kind->is_text("llama3") && !node.find("original_max_position_embeddings");
    if (published.original_missing) {  // transformers takes max_position_embeddings, which may come later
      Node later = *kind;
      later.kind = Node::Kind::integer, later.integer = 1, later.number = 1;
      node.members.emplace_back("original_max_position_embeddings", std::move(later));
    }
    const Node *old = node.find("type"), *type = node.find("rope_type");
    if (old && type && type->is(Node::Kind::string) && old->is_text(type->text))
      std::erase_if(node.members, [](const auto& member) { return member.first == "type"; });
    const Value section{node, given_section.path, given_section.context};
    struct Rope {
      RopeScaling scaling;
      double theta = 0;
    };
    Table<Rope> table;
    for (Key<RopeScaling>& key : rope_table().keys) table.keys.push_back(inside(&Rope::scaling, key));
    table.keys.push_back(real("rope_theta", &Rope::theta, "", 1, infinity, true));
    table.keys.push_back(custom<Rope>("finetuned", "", [](Rope&, const Value&) {}));
    const auto refused = [&](const char* name, std::function<bool(const Value&)> same, const char* reason) {
      table.keys.push_back(custom<Rope>(name, "", [=](Rope&, const Value& value) {
        if (!same(value)) value.error(value.node.brief(), " is not supported: ", reason);
      }));
    };
    refused("partial_rotary_factor", equals_number(1), "all of a head is rotated");
    refused("mscale", never, "attention_factor says by how much scores grow");
    refused("mscale_all_dim", never, "attention_factor says by how much scores grow");
    Rope rope;
    const Given given = read_section(table, rope, section);
    if (rope.theta > 0) published.inner_theta = rope.theta;
    if (!given.contains("rope_type")) {
      for (const auto& [name, value] : given)
        if (name != "rope_theta" && name != "partial_rotary_factor") section.error("needs \"rope_type\"");
      return;
    }
    finish_rope(rope.scaling, given, section);
    published.rope = rope.scaling;
  };
  keys.push_back(custom<Published>("rope_scaling", "", read));
  keys.push_back(custom<Published>("rope_parameters", "", read));
  keys.push_back(real("rope_theta", &Published::rope_theta, "", 1, infinity, true));
  keys.push_back(only("partial_rotary_factor", equals_number(1), "all of a head is rotated"));
}

void read_layer_types(Published& published, const Value& value) {
  value.expect(Node::Kind::array);
  for (const Node& item : value.node.items)
    published.layer_types.push_back(Value{item, value.path, value.context}.text());
}

void put_experts(Keys& keys, ModelType type) {
  const auto moe = [&](Key<Moe> key) { put(keys, inside(&Model::moe, std::move(key))); };
  moe(integer("num_local_experts", &Moe::experts, "", 1, most_experts).alias("num_experts"));
  moe(integer("num_experts_per_tok", &Moe::top_k, "", 1, most_experts));
  keys.push_back(boolean("output_router_logits", &Published::router_losses));
  keys.push_back(real("router_aux_loss_coef", &Published::router_loss, "", 0, infinity));
  if (type == ModelType::mixtral) {
    keys.push_back(
        only("router_jitter_noise", equals_number(0),
             "there it changes what experts read; model.moe.jitter changes what the router reads"));
    return;
  }
  moe(integer("moe_intermediate_size", &Moe::ffn_hidden_size, "", 1, most_ffn_hidden));
  moe(integer("decoder_sparse_step", &Moe::every, "", 1, most_layers));
  moe(boolean("norm_topk_prob", &Moe::norm_topk));
  keys.push_back(only("shared_expert_intermediate_size", equals_number(0), "there are no shared experts"));
  keys.push_back(custom<Published>("mlp_only_layers", "", [](Published& published, const Value& value) {
    // The first so many layers are dense; a list of others has no key here.
    value.expect(Node::Kind::array);
    std::int64_t first = 0;
    for (const Node& item : value.node.items)
      if (!item.is(Node::Kind::integer) || item.integer != first++)
        value.error(value.node.brief(), " is not supported: only the first layers can be dense ones");
    published.model.moe.first_dense = first;
  }));
}

Table<Published> decoder_table(ModelType type) {
  using M = Model;
  Table<Published> table;
  Keys& keys = table.keys;
  put_common(keys), put_sizes(keys), put_rope(keys);
  const bool qwen = type == ModelType::qwen2 || type == ModelType::qwen3 || type == ModelType::qwen3_moe;
  put(keys, integer("max_position_embeddings", &M::max_positions, "", 1, most_positions));
  put(keys, integer("hidden_size", &M::hidden_size, "", 1, most_hidden));
  put(keys, integer("intermediate_size", &M::ffn_hidden_size, "", 1, most_ffn_hidden));
  put(keys, integer("num_hidden_layers", &M::num_layers, "", 1, most_layers));
  put(keys, integer("num_attention_heads", &M::num_heads, "", 1, most_heads));
  Key<Published> kv_heads =
      custom<Published>("num_key_value_heads", "", [](Published& published, const Value& value) {
        // Null is num_attention_heads, whatever the class has where the key is absent.
        published.model.num_kv_heads = value.node.is(Node::Kind::null) ? 0 : value.integer(1, most_heads);
      });
  kv_heads.reads_null = true;
  keys.push_back(std::move(kv_heads));
  put(keys, integer("head_dim", &M::head_dim, "", 1, most_hidden));
  keys.push_back(text("hidden_act", &Published::activation, ""));
  put(keys, real("rms_norm_eps", &M::norm_epsilon, "", 0, infinity, true));
  put(keys, real("attention_dropout", &M::attention_dropout, "", 0, 0.99));
  keys.push_back(only("attention_bias", is_false, "the projections of attention have no biases here"));
  keys.push_back(only("mlp_bias", is_false, "the feed-forward part has no biases here"));
  if (type != ModelType::llama) {
    Key<Published> window =
        custom<Published>("sliding_window", "", [](Published& published, const Value& value) {
          published.window = value.node.is(Node::Kind::null) ? 0 : value.integer(1, most_positions);
        });
    window.reads_null = true;
    keys.push_back(std::move(window));
  }
  if (type == ModelType::llama) {
    keys.push_back(only("activation", is_silu, "the activation is SiLU"));
    keys.push_back(only("sliding_window", never,
                        "the family has none; where transformers passes it over, "
                        "take it out of the file"));
  }
  if (qwen) {
    keys.push_back(only("use_qk_norm", type == ModelType::qwen2 ? is_false : is_true, "the family decides"));
    keys.push_back(only("qkv_bias", type == ModelType::qwen2 ? is_true : is_false, "the family decides"));
    keys.push_back(boolean("use_sliding_window", &Published::use_sliding_window));
    keys.push_back(integer("max_window_layers", &Published::window_layers, "", 0, most_layers));
  }
  keys.push_back(custom<Published>("layer_types", "", read_layer_types));
  if (type == ModelType::mixtral || type == ModelType::qwen3_moe) put_experts(keys, type);
  return table;
}

/// What the classes of transformers take where a key is absent.
Published class_defaults(ModelType type) {
  Published p;
  Model& m = p.model;
  m.type = type;
  const bool gpt2 = type == ModelType::gpt2;
  m.position = gpt2 ? Positions::learned : Positions::rotary;
  m.norm = gpt2 ? Norm::layernorm : Norm::rmsnorm;
  m.bias = m.tie_embeddings = gpt2;
  m.qkv_bias = gpt2 || type == ModelType::qwen2;
  m.qk_norm = type == ModelType::qwen3 || type == ModelType::qwen3_moe;
  m.dropout = m.attention_dropout = m.embedding_dropout = gpt2 ? 0.1 : 0;
  m.norm_epsilon = gpt2 || type == ModelType::mixtral ? 1e-5 : 1e-6;
  p.activation = gpt2 ? "gelu_new" : "silu";
  const auto sizes = [&](std::int64_t vocabulary, std::int64_t hidden, std::int64_t ffn, std::int64_t layers,
                         std::int64_t heads, std::int64_t kv_heads, std::int64_t positions) {
    m.vocab_size = vocabulary, m.hidden_size = hidden, m.ffn_hidden_size = ffn, m.num_layers = layers;
    m.num_heads = heads, m.num_kv_heads = kv_heads, m.max_positions = positions;
  };
  switch (type) {
    case ModelType::gpt2:
      sizes(50257, 768, 0, 12, 12, 0, 1024);
      break;
    case ModelType::llama:
      sizes(32000, 4096, 11008, 32, 32, 0, 2048);
      break;
    case ModelType::mistral:
      sizes(32000, 4096, 14336, 32, 32, 8, 131072), p.window = 4096;
      break;
    case ModelType::mixtral:
      sizes(32000, 4096, 14336, 32, 32, 8, 131072);
      p.rope_theta = 1e6;
      m.moe.experts = 8, m.moe.top_k = 2, m.moe.norm_topk = true;
      break;
    case ModelType::qwen2:
    case ModelType::qwen3:
      sizes(151936, 4096, 22016, 32, 32, 32, 32768), p.window = 4096;
      if (type == ModelType::qwen3) m.head_dim = 128;
      break;
    case ModelType::qwen3_moe:
      sizes(151936, 2048, 6144, 24, 32, 4, 32768), p.window = 4096;
      m.moe.experts = 128, m.moe.top_k = 8, m.moe.ffn_hidden_size = 768, m.moe.norm_topk = false;
      break;
  }
  return p;
}

FfnActivation activation_of(const Published& p, const Value& file) {
  const std::string& name = p.activation;
  if (p.model.type == ModelType::gpt2) {
    if (name == "gelu_new" || name == "gelu_pytorch_tanh" || name == "gelu_fast")
      return FfnActivation::gelu_tanh;
    if (name == "gelu") return FfnActivation::gelu;
  } else if (name == "silu" || name == "swish") {
    return FfnActivation::swiglu;
  }
  refuse(file, p.model.type == ModelType::gpt2 ? "activation_function" : "hidden_act", " \"", excerpt(name),
         "\" is not supported: ",
         p.model.type == ModelType::gpt2 ? "\"gelu_new\" and \"gelu\" are" : "\"silu\" is");
}

/// Qwen's models see all before in their first layers, or in all.
void settle_window(Published& p, const Value& file) {
  const bool qwen = p.model.type == ModelType::qwen2 || p.model.type == ModelType::qwen3 ||
                    p.model.type == ModelType::qwen3_moe;
  if (qwen && !p.use_sliding_window) p.window = 0;
  std::int64_t cut = p.model.num_layers;  // layers with a window
  if (qwen && p.use_sliding_window && p.model.type != ModelType::qwen3_moe)
    cut = std::max<std::int64_t>(0, p.model.num_layers - p.window_layers);
  if (!p.layer_types.empty() && p.model.type != ModelType::qwen3_moe)
    cut = std::count(p.layer_types.begin(), p.layer_types.end(), "sliding_attention");
  for (const std::string& type : p.layer_types)
    if (type != "full_attention" && type != "sliding_attention")
      refuse(file, "layer_types: \"", excerpt(type), "\" is not supported");
  if (p.window > 0 && cut != 0 && cut != p.model.num_layers)
    refuse(file, "sliding_window in ", cut, " of ", p.model.num_layers,
           " layers is not supported: all of them, or none, can have one");
  p.model.sliding_window = cut > 0 ? p.window : 0;
}

void settle(Published& p, const Given& given, const Value& file) {
  Model& m = p.model;
  if (m.num_kv_heads == 0) m.num_kv_heads = m.num_heads;
  if (m.head_dim == 0 && m.hidden_size % m.num_heads != 0)
    refuse(file, "hidden size ", m.hidden_size, " is not a multiple of ", m.num_heads, " heads");
  if (m.head_dim == 0) m.head_dim = m.hidden_size / m.num_heads;
  if (m.ffn_hidden_size == 0) m.ffn_hidden_size = 4 * m.hidden_size;
  m.activation = activation_of(p, file);
  m.seq_length = m.max_positions;
  if (p.rope_theta > 0) m.rotary_base = p.rope_theta;
  if (p.inner_theta > 0) m.rotary_base = p.inner_theta;
  m.rope_scaling = p.rope;
  if (p.original_missing ||
      (m.rope_scaling.type == RopeType::yarn && m.rope_scaling.original_max_positions == 0))
    m.rope_scaling.original_max_positions = m.max_positions;
  if (m.type != ModelType::gpt2) settle_window(p, file);
  if (m.moe.experts == 0) return;
  if (m.moe.ffn_hidden_size == 0) m.moe.ffn_hidden_size = m.ffn_hidden_size;
  if (m.moe.first_dense % m.moe.every != 0)
    refuse(file, "decoder_sparse_step ", m.moe.every, " behind ", m.moe.first_dense,
           " mlp_only_layers is not supported: it must divide their number");
  // transformers adds the loss only where the router's logits are asked for.
  m.moe.aux_loss = p.router_losses ? p.router_loss : 0;
  m.moe.aux_loss_type = p.router_losses ? AuxLoss::hf : AuxLoss::switch_layers;
  if (!p.router_losses && given.contains("router_aux_loss_coef"))
    file.context.note(
        "router_aux_loss_coef",
        "no effect: output_router_logits is false, and transformers adds the loss only where it "
        "is true; model.moe.aux_loss sets it");
}

const std::vector<ModelType> all_types = {ModelType::gpt2,     ModelType::llama, ModelType::mistral,
                                          ModelType::qwen2,    ModelType::qwen3, ModelType::mixtral,
                                          ModelType::qwen3_moe};

ModelType type_of(const Value& file) {
  const Node* node = file.node.find("model_type");
  std::string known;
  for (const ModelType type : all_types) {
    if (node && node->is_text(name_of(type))) return type;
    known += cat(known.empty() ? "" : ", ", name_of(type));
  }
  refuse(file, "model_type ", node ? node->brief() : "is absent, so the family is not known;",
         node ? " is not supported;" : "", " there are ", known);
}

}  // namespace

PublishedModel from_hugging_face(std::string_view text, const std::string& name) {
  Context context;
  context.advice =
      "Sherd does not know whether the model depends on it; where it does not, take it out of the file";
  Node tree = parse_tree(text, name);
  drop_notes(tree);
  const Value file{tree, "", context};
  PublishedModel out;
  context.attempt([&] {
    file.expect(Node::Kind::object);
    const ModelType type = type_of(file);
    Published published = class_defaults(type);
    const Given given =
        read_section(type == ModelType::gpt2 ? gpt2_table() : decoder_table(type), published, file);
    settle(published, given, file);
    out.model = published.model;
    out.dtype = published.dtype.empty() ? published.torch_dtype : published.dtype;  // as transformers 5
  });
  context.raise();
  out.notes = std::move(context.notes);
  return out;
}

}  // namespace sherd::config
