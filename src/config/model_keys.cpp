#include "config/tables.h"

// Section `model`.
namespace sherd::config {
namespace {

/// In the order of RotaryScaling.
const std::vector<std::string> rope_types = {"default", "linear", "llama3", "yarn"};

/// Which types a key of rope_scaling means something for.
struct RopeKey {
  const char* name;
  bool llama3, yarn;
};
constexpr RopeKey rope_keys[] = {{"low_freq_factor", true, false},
                                 {"high_freq_factor", true, false},
                                 {"beta_fast", false, true},
                                 {"beta_slow", false, true},
                                 {"attention_factor", false, true},
                                 {"truncate", false, true},
                                 {"original_max_position_embeddings", true, true}};

Table<RopeScaling> rope_table() {
  using T = RopeScaling;
  Table<T> table;
  std::vector<Key<T>>& keys = table.keys;
  keys.push_back(choice("rope_type", &T::type, rope_types, "\"linear\"").alias("type"));
  keys.push_back(real("factor", &T::factor, "8", 1));
  keys.push_back(real("low_freq_factor", &T::low_freq_factor, "2", 0, infinity, true));
  keys.push_back(real("high_freq_factor", &T::high_freq_factor, "8", 0, infinity, true));
  keys.push_back(real("beta_fast", &T::beta_fast, "16", 0, infinity, true));
  keys.push_back(real("beta_slow", &T::beta_slow, "2", 0, infinity, true));
  keys.push_back(real("attention_factor", &T::attention_factor, "1.2", 0, infinity, true));
  keys.push_back(boolean("truncate", &T::truncate));
  keys.push_back(
      integer("original_max_position_embeddings", &T::original_max_positions, "32", 1, most_positions));
  describe(
      keys,
      {required("rope_type", "how positions are scaled; default: not at all"),
       {"factor", "by how much sequences may be longer", "", "required, but with rope_type default", true},
       derived("low_freq_factor", "required with llama3",
               "llama3: waves longer than the first length over this are scaled in full"),
       derived("high_freq_factor", "required with llama3",
               "llama3: waves shorter than the first length over this are not scaled"),
       {"beta_fast", "yarn: dimensions that turn more often than this in the first length are not scaled"},
       {"beta_slow",
        "yarn: dimensions that turn less often than this in the first length are scaled in full"},
       derived("attention_factor", "0.1 · ln `factor` + 1", "yarn: factor of rotated queries and keys"),
       {"truncate", "yarn: the bounds between both are whole dimensions"},
       derived("original_max_position_embeddings", "llama3: required; yarn: `max_positions`",
               "llama3, yarn: the first length, positions that the model was first trained on")});
  return table;
}

void finish_rope(RopeScaling& rope, const Given& given, const Value& section) {
  const std::string type(name_of(rope.type));
  const auto require_key = [&](const char* name) {
    if (!given.contains(name)) section.error("needs \"", name, "\"");
  };
  require_key("rope_type");
  if (rope.type != RotaryScaling::none) require_key("factor");
  for (const RopeKey& key : rope_keys) {
    const bool used =
        (key.llama3 && rope.type == RotaryScaling::llama3) || (key.yarn && rope.type == RotaryScaling::yarn);
    if (!used && given.contains(key.name))
      section.context.note(join(section.path, key.name), cat("no effect with rope_type \"", type, "\""));
    if (rope.type == RotaryScaling::llama3 && key.llama3) require_key(key.name);
  }
  if (rope.type == RotaryScaling::llama3 && rope.low_freq_factor >= rope.high_freq_factor)
    section.error("low_freq_factor ", rope.low_freq_factor, " must be below high_freq_factor ",
                  rope.high_freq_factor);
  if (rope.type == RotaryScaling::yarn && rope.beta_slow >= rope.beta_fast)
    section.error("beta_slow ", rope.beta_slow, " must be below beta_fast ", rope.beta_fast);
  // What has no effect is not kept.
  RopeScaling used;
  used.type = rope.type;
  if (rope.type != RotaryScaling::none) used.factor = rope.factor;
  if (rope.type == RotaryScaling::llama3)
    used.low_freq_factor = rope.low_freq_factor, used.high_freq_factor = rope.high_freq_factor;
  if (rope.type == RotaryScaling::yarn) {
    used.beta_fast = rope.beta_fast, used.beta_slow = rope.beta_slow, used.truncate = rope.truncate;
    used.attention_factor = rope.attention_factor;
  }
  if (rope.type == RotaryScaling::llama3 || rope.type == RotaryScaling::yarn)
    used.original_max_positions = rope.original_max_positions;
  rope = used;
}

}  // namespace

void read_rope(RopeScaling& rope, const Value& section) {
  const Given given = read_section(rope_table(), rope, section);
  finish_rope(rope, given, section);
}

namespace {

Key<Model> rope_key() {
  Key<Model> key = custom<Model>(
      "rope_scaling", "", [](Model& model, const Value& section) { read_rope(model.rope_scaling, section); });
  key.list = [](const std::string& prefix, std::vector<KeyInfo>& out) {
    list_keys(rope_table(), prefix, out);
  };
  return key;
}

std::vector<Text> model_texts() {
  return {
      {"type",
       "defaults, and the family as which the model is [exported](hugging_face.md); \"others\" are all that "
       "are not "
       "named"},
      required("seq_length", "tokens per sample"),
      derived(
          "max_positions", "`seq_length`",
          "longest sequence that the model is made for: rows of learned positions, of which samples use the "
          "first `seq_length`"),
      required("hidden_size", "width"),
      required("num_layers", "blocks"),
      required("num_heads", "query heads"),
      derived("num_kv_heads", "`num_heads`", "key-value heads (grouped queries); divides `num_heads`"),
      derived("head_dim", "`hidden_size` / `num_heads`", "size of a head; any, where it is given (Qwen3)"),
      derived("ffn_hidden_size", "gpt2 4 · `hidden_size`; others 8/3 of it, up to a multiple of 64",
              "inner width of the MLP"),
      {"vocab_size", "token ids; 0: the tokenizer's"},
      {"pad_vocab_to_multiple_of",
       "the embedding gets rows up to a multiple of this; they take no part in the loss"},
      {"position", "rotary needs an even head size"},
      {"rotary_base", "of rotary positions (`rope_theta`)"},
      {"sliding_window",
       "tokens that a query sees, itself among them; those before are neither seen nor computed. 0: all"},
      {"qk_norm", "RMSNorm of each query and key head, before rotary positions"},
      {"norm", "of blocks, and before the head"},
      {"norm_epsilon", "added to the variance"},
      {"activation", "of the MLP; gelu is x·Φ(x), gelu_tanh its approximation, swiglu has a gate"},
      {"dropout", "share dropped of what blocks add to the residual stream"},
      derived("attention_dropout", "`dropout`", "of attention's weights"),
      derived("embedding_dropout", "`dropout`", "of the embeddings' sum"),
      {"tie_embeddings", "the output projection is the embedding"},
      {"bias", "of the blocks' linear layers"},
      derived("qkv_bias", "`bias`; qwen2 `true`", "of the projection to queries, keys and values"),
      {"init_std", "of normal initial weights; divided by √(2 · layers) where they feed the residual stream"},
  };
}

Table<Model> model_table() {
  using T = Model;
  Table<T> table;
  std::vector<Key<T>>& keys = table.keys;
  keys.push_back(choice("type", &T::type, family_names(), "\"llama\""));
  keys.push_back(integer("vocab_size", &T::vocab_size, "50257", 0, most_vocabulary));
  keys.push_back(integer("pad_vocab_to_multiple_of", &T::pad_vocab_to_multiple_of, "64", 1, 1 << 20));
  keys.push_back(integer("seq_length", &T::seq_length, "64", 1, most_positions));
  keys.push_back(integer("max_positions", &T::max_positions, "512", 1, most_positions));
  keys.push_back(integer("hidden_size", &T::hidden_size, "48", 1, most_hidden));
  keys.push_back(integer("num_layers", &T::num_layers, "3", 1, most_layers));
  keys.push_back(integer("num_heads", &T::num_heads, "2", 1, most_heads));
  keys.push_back(integer("num_kv_heads", &T::num_kv_heads, "2", 1, most_heads));
  keys.push_back(integer("head_dim", &T::head_dim, "6", 1, most_hidden));
  keys.push_back(integer("ffn_hidden_size", &T::ffn_hidden_size, "100", 1, most_ffn_hidden));
  keys.push_back(choice("position", &T::position, {"learned", "rotary"}, "\"rotary\""));
  keys.push_back(real("rotary_base", &T::rotary_base, "5e5", 1, infinity, true));
  keys.push_back(rope_key());
  keys.push_back(integer("sliding_window", &T::sliding_window, "16", 0, most_positions));
  keys.push_back(boolean("qk_norm", &T::qk_norm));
  keys.push_back(choice("norm", &T::norm, {"layernorm", "rmsnorm"}, "\"rmsnorm\""));
  keys.push_back(real("norm_epsilon", &T::norm_epsilon, "1e-6", 0, infinity, true));
  keys.push_back(choice("activation", &T::activation, {"gelu_tanh", "gelu", "swiglu"}, "\"swiglu\""));
  keys.push_back(real("dropout", &T::dropout, "0.2", 0, 0.99));
  keys.push_back(real("attention_dropout", &T::attention_dropout, "0.2", 0, 0.99));
  keys.push_back(real("embedding_dropout", &T::embedding_dropout, "0.2", 0, 0.99));
  keys.push_back(boolean("tie_embeddings", &T::tie_embeddings));
  keys.push_back(boolean("bias", &T::bias));
  keys.push_back(boolean("qkv_bias", &T::qkv_bias));
  keys.push_back(real("init_std", &T::init_std, "0.01", 0, infinity, true));
  keys.push_back(moe_key());
  describe(keys, model_texts());
  return table;
}

/// What follows from the keys that were given, once all are read.
void fill(Model& model, const Given& given, const Value& section) {
  const Model& family = defaults_of(model.type);
  if (!given.contains("attention_dropout")) model.attention_dropout = model.dropout;
  if (!given.contains("embedding_dropout")) model.embedding_dropout = model.dropout;
  if (!given.contains("qkv_bias")) model.qkv_bias = model.bias || family.qkv_bias;
  try {
    model = resolved(model);
  } catch (const Error& error) {
    section.error(error.what());
  }
}

void note_idle(const Model& model, const Given& given, const Value& section) {
  for (const char* name : {"rotary_base", "rope_scaling"})
    if (given.contains(name) && model.position != Positions::rotary)
      section.context.note(join(section.path, name), "no effect with learned positions");
  if (model.sliding_window >= model.seq_length)
    section.context.note(join(section.path, "sliding_window"),
                         cat("no effect: sequences have ", model.seq_length, " tokens"));
}

void read_model(Config& config, const Value& section) {
  section.expect(Node::Kind::object);
  std::size_t type = 0;
  if (const Node* given = section.node.find("type"); given && !given->is(Node::Kind::null))
    type = Value{*given, join(section.path, "type"), section.context}.choice(family_names());
  Model model = families()[type].defaults;
  const Given given = read_section(model_table(), model, section);
  for (const char* name : {"seq_length", "hidden_size", "num_layers", "num_heads"})
    if (!given.contains(name)) section.error("needs \"", name, "\"");
  fill(model, given, section);
  note_idle(model, given, section);
  if (const auto moe = given.find("moe"); moe != given.end())
    finish_moe(model.moe, {*moe->second, join(section.path, "moe"), section.context});
  config.model = model;
}

}  // namespace

Key<Config> model_key() {
  Key<Config> key = custom<Config>("model", "", read_model);
  key.list = [](const std::string& prefix, std::vector<KeyInfo>& out) {
    list_keys(model_table(), prefix, out);
  };
  return key;
}

std::string_view name_of(RotaryScaling type) {
  return rope_types[static_cast<std::size_t>(type)];
}
std::string_view name_of(Positions positions) {
  return positions == Positions::rotary ? "rotary" : "learned";
}
std::string_view name_of(Norm norm) {
  return norm == Norm::rmsnorm ? "rmsnorm" : "layernorm";
}

std::string_view name_of(FfnActivation activation) {
  switch (activation) {
    case FfnActivation::gelu_tanh:
      return "gelu_tanh";
    case FfnActivation::gelu:
      return "gelu";
    case FfnActivation::swiglu:
      break;
  }
  return "swiglu";
}

}  // namespace sherd::config
