#include "models/hub/config_json.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <set>
#include <utility>

#include "base/error.h"
#include "base/text/excerpt.h"
#include "models/families/family.h"

namespace sherd::models {
namespace {

using config::LayerType;
using config::Model;
using config::ModelType;
using config::Node;
using config::Value;

/// Throws about something that concerns several keys, or none.
template <class... Args>
[[noreturn]] void refuse(const Value& file, const Args&... args) {
  fail(ErrorKind::config, file.node.place.file, ": ", args...);
}

const Family& family_in(const Value& file) {
  const Node* node = file.node.find("model_type");
  std::string known;
  for (const Family& family : families()) {
    if (node && node->is_text(family.name)) return family;
    known += cat(known.empty() ? "" : ", ", family.name);
  }
  refuse(file, "model_type ", node ? node->brief() : "is absent, so the family is not known;",
         node ? " is not supported;" : "", " there are ", known);
}

/// The values of a model that its config.json leaves out.
Published class_defaults(const Family& family) {
  Published out;
  out.model = config::defaults_of(config::family_named(family.name));
  out.model.qkv_bias = out.model.has_qkv_bias();
  family.class_defaults(out);
  return out;
}

/// All keys of such a file; what a family says of one goes before what all do.
JsonKeys keys_of(const Family& family) {
  JsonKeys out = family.keys;
  for (JsonKey& key : common_keys())
    if (std::none_of(family.keys.begin(), family.keys.end(),
                     [&](const JsonKey& own) { return own.name == key.name; }))
      out.push_back(std::move(key));
  return out;
}

/// Which layers have the window: by the list, by the class's pattern, or by the number of those before them
/// that have none.
void settle_window(Published& p, const Value& file, const Family& family) {
  const std::int64_t layers = p.model.num_layers, named = std::ssize(p.layer_types);
  if (named > 0 && named != layers)
    refuse(file, "layer_types names ", counted(named, "layer"), " of ", layers);
  const auto sliding = std::count(p.layer_types.begin(), p.layer_types.end(), LayerType::sliding_attention);
  if (p.use_sliding_window && p.window == 0 && sliding > 0 && family.can("layer_types"))
    refuse(file, "layer_types has ", counted(sliding, "layer"),
           " with sliding_attention, and sliding_window does not say what they see");
  if (!p.use_sliding_window) p.window = 0;
  const std::vector<LayerType> pattern = std::exchange(p.model.layer_types, {});  // of the class
  std::vector<LayerType> types = p.layer_types;
  for (std::int64_t i = 0; i < layers && named == 0; ++i)
    types.push_back(!pattern.empty()          ? pattern[static_cast<std::size_t>(i) % pattern.size()]
                    : i < p.first_full_layers ? LayerType::full_attention
                                              : LayerType::sliding_attention);
  const std::int64_t cut = std::count(types.begin(), types.end(), LayerType::sliding_attention);
  if (p.window > 0 && cut != 0 && cut != layers && !family.can("layer_types"))
    refuse(file, "sliding_window in ", cut, " of ", layers,
           " layers is not supported: the class has it in all of them or in none");
  p.model.sliding_window = cut > 0 ? p.window : 0;
  const bool linear = std::count(types.begin(), types.end(), LayerType::linear_attention) > 0;
  if (p.model.sliding_window > 0 || linear) p.model.layer_types = std::move(types);
}

config::RopeScaling scaling_of(const PublishedRope& rope, const Published& p) {
  config::RopeScaling out = rope.scaling;
  const Model& m = p.model;
  if (out.type == RotaryScaling::longrope && p.first_positions > 0) {
    out.original_max_positions = p.first_positions;
    return out;
  }
  if (rope.original_missing) out.original_max_positions = m.max_positions;
  return out;
}

/// Sections go before the keys beside them, and rope_scaling before rope_parameters, as in transformers 5.
void settle_rope(Published& p, const Value& file, const Family& family) {
  Model& m = p.model;
  if (p.older_rope) p.rope = *p.older_rope;
  if (p.rope_theta > 0) m.rotary_base = p.rope_theta;
  if (p.rope.theta > 0) m.rotary_base = p.rope.theta;
  m.rope_scaling = scaling_of(p.rope, p);
  if (m.rope_scaling.type == RotaryScaling::longrope)
    file.context.note("rope_scaling",
                      cat("LongRoPE's factors for long sequences are taken where model.seq_length is beyond ",
                          m.rope_scaling.original_max_positions,
                          ", as it is unless you set it: it begins as max_position_embeddings"));
  for (const double share : {p.partial_rotary_factor, p.rope.share})
    if (share > 0) m.partial_rotary_factor = share;
  if (m.partial_rotary_factor != 1 && !family.can("partial_rotary_factor"))
    refuse(file, "partial_rotary_factor ", m.partial_rotary_factor,
           " is not supported: the class turns all of a head");
  m.llama_4_scaling_beta = p.rope.query_beta.value_or(0);
  if (m.llama_4_scaling_beta > 0 && !family.can("llama_4_scaling_beta"))
    refuse(file, "llama_4_scaling_beta ", m.llama_4_scaling_beta,
           " is not supported: the class does not scale its queries");
  if (m.mla.kv_lora_rank > 0 && p.rope.mscale_all_dim > 0 && m.rope_scaling.type != RotaryScaling::none) {
    const double factor = std::max(1.0, m.rope_scaling.factor),
                 scale = 0.1 * p.rope.mscale_all_dim * std::log(factor) + 1;
    m.attention_multiplier =
        scale * scale / std::sqrt(static_cast<double>(m.mla.qk_nope_head_dim + m.mla.qk_rope_head_dim));
  }
  if (!family.can("sliding_rope")) {
    if (p.sliding)
      refuse(file, "rope_parameters.sliding_attention is not supported: all layers have the same positions");
    return;
  }
  if (p.sliding && p.sliding->share > 0 && p.sliding->share != m.partial_rotary_factor)
    refuse(file, "rope_parameters.sliding_attention.partial_rotary_factor ", p.sliding->share,
           " is not supported: it must be the other layers' ", m.partial_rotary_factor);
  config::SlidingRope own{p.sliding_theta > 0 ? p.sliding_theta : m.rotary_base, {}};
  if (p.sliding) own.rope_scaling = scaling_of(*p.sliding, p);
  if (p.sliding && p.sliding->theta > 0) own.rotary_base = p.sliding->theta;
  if (own == config::SlidingRope{m.rotary_base, m.rope_scaling} && !config::defaults_of(m.type).sliding_rope)
    m.sliding_rope.reset();
  else
    m.sliding_rope = own;
}

void settle_experts(Published& p, const config::Given& given, const Value& file) {
  config::Moe& moe = p.model.moe;
  if (moe.experts == 0) return;
  if (p.shared_width > 0) {
    if (moe.ffn_hidden_size == 0 || p.shared_width % moe.ffn_hidden_size != 0)
      refuse(file, "shared_expert_intermediate_size ", p.shared_width,
             " is not supported: it must be a multiple of ", "moe_intermediate_size ", moe.ffn_hidden_size);
    moe.shared_experts = p.shared_width / moe.ffn_hidden_size;
  }
  if (p.greedy_experts) moe.groups = moe.top_groups = 1;
  if (moe.first_dense % moe.every != 0)
    refuse(file, "decoder_sparse_step ", moe.every, " behind ", moe.first_dense,
           " mlp_only_layers is not supported: it must divide their number");
  // transformers adds the loss only where the router's logits are asked for.
  moe.aux_loss = p.router_losses ? p.router_loss : 0;
  moe.aux_loss_type = p.router_losses ? BalanceLoss::pooled : BalanceLoss::all_choices;
  if (!p.router_losses && given.contains("router_aux_loss_coef"))
    file.context.note(
        "router_aux_loss_coef",
        "no effect: output_router_logits is false, and transformers adds the loss only where it "
        "is true; model.moe.aux_loss sets it");
}

/// The names of the labels of a class that classifies.
void settle_labels(Published& p, const Value& file) {
  const Node *count = file.node.find("num_labels"), *names = file.node.find("id2label");
  const std::int64_t labels = count && !count->is(Node::Kind::null)
                                  ? Value{*count, "num_labels", file.context}.integer(2, config::most_labels)
                                  : 2;
  for (std::int64_t i = 0; i < labels; ++i) p.model.labels.push_back(cat("LABEL_", i));
  if (!names || !names->is(Node::Kind::object)) return;
  p.model.labels.clear();
  for (std::size_t i = 0; i < names->members.size(); ++i) {
    const Node* name = names->find(std::to_string(i));
    if (!name) refuse(file, "id2label has ", names->members.size(), " labels, and none of number ", i);
    p.model.labels.push_back(Value{*name, "id2label", file.context}.text());
  }
}

/// A decoder's scores are rewards where there is one.
void require_one_score(const Value& file) {
  const Node *count = file.node.find("num_labels"), *names = file.node.find("id2label");
  const std::int64_t scores = names && names->is(Node::Kind::object)    ? std::ssize(names->members)
                              : count && count->is(Node::Kind::integer) ? count->integer
                                                                        : 2;
  if (scores != 1)
    refuse(file, scores, " labels of a decoder are not supported: a reward is one number (num_labels 1)");
}

/// A class that classifies texts or tokens, or learns pairs of texts.
void settle_head(Published& p, const Value& file, const Family& family) {
  const Node* classes = file.node.find("architectures");
  if (!classes || !classes->is(Node::Kind::array)) return;
  for (const config::Head head : {config::Head::sequence_classification, config::Head::token_classification,
                                  config::Head::pretraining, config::Head::reward})
    if (const std::string name = family.class_of(head);
        !name.empty() && std::any_of(classes->items.begin(), classes->items.end(),
                                     [&](const Node& item) { return item.is_text(name); }))
      p.model.head = head;
  if (p.model.gives_rewards()) require_one_score(file);
  if (!p.model.classifies()) return;
  const bool of_texts = !p.model.labels_tokens();
  if (const Node* pooling = file.node.find("classifier_pooling");
      of_texts && pooling && !pooling->is_text("cls"))
    refuse(file, "classifier_pooling ", pooling->brief(),
           " is not supported: texts are classified by their first token");
  if (const Node* problem = file.node.find("problem_type"); of_texts && problem &&
                                                            !problem->is(Node::Kind::null) &&
                                                            !problem->is_text("single_label_classification"))
    refuse(file, "problem_type ", problem->brief(), " is not supported: a text has one label");
  if (const Node* dropout = file.node.find("classifier_dropout"); dropout && !dropout->is(Node::Kind::null))
    if (const double share = Value{*dropout, "classifier_dropout", file.context}.real(0, 0.99);
        share != p.model.dropout)
      refuse(file, "classifier_dropout ", share, " is not supported: it must be that of the blocks, ",
             p.model.dropout);
  settle_labels(p, file);
}

void settle(Published& p, const config::Given& given, const Value& file, const Family& family) {
  Model& m = p.model;
  m.seq_length = m.max_positions;
  if (family.settle) family.settle(p);
  settle_head(p, file, family);
  settle_window(p, file, family);
  settle_rope(p, file, family);
  if (p.listed_no_rope_interval) {
    if (p.no_rope_layers < m.num_layers)
      refuse(file, "no_rope_layers names ", counted(p.no_rope_layers, "layer"), " of ", m.num_layers);
    m.no_rope_layer_interval = *p.listed_no_rope_interval;
  }
  settle_experts(p, given, file);
  if (family.can("bias")) {
    if (p.mlp_bias && !m.bias)
      refuse(file, "mlp_bias true beside attention_bias false is not supported: set both, or neither");
    m.mlp_bias = p.mlp_bias, m.qkv_bias = m.bias;
  }
  if (m.head_dim == 0 && m.mla.kv_lora_rank == 0 && m.hidden_size % m.num_heads != 0)
    refuse(file, "hidden size ", m.hidden_size, " is not a multiple of ", m.num_heads, " heads");
  try {
    m = config::resolved(m);
  } catch (const Error& error) {
    refuse(file, error.what());
  }
}

/// The first thing of the model that the family's class does not have, or has and the model does not.
std::optional<std::string> missing_of(const Model& m, const Family& family) {
  const Model& has = config::defaults_of(config::family_named(family.name));
  const auto said = [](const char* key, bool value) {
    return cat("model.", key, value ? " true" : " false");
  };
  if (m.norm != has.norm) return cat("model.norm \"", config::name_of(m.norm), "\"");
  if (m.norm == config::Norm::layernorm && m.norm_bias != has.norm_bias)
    return said("norm_bias", m.norm_bias);
  if (m.position != has.position) return cat("model.position \"", config::name_of(m.position), "\"");
  if (!family.can("activation") &&
      (m.gated() != has.gated() || (m.gated() && m.activation != has.activation)))
    return cat("model.activation \"", config::name_of(m.activation), "\"");
  Published published;
  published.model = m;
  for (const JsonKey& key : family.keys)
    if (key.can_say && !key.can_say(published))
      return cat("model.activation \"", config::name_of(m.activation), "\"");
  if (m.causal != has.causal) return said("causal", m.causal);
  if (m.scores_texts() || m.pairs_texts() ? family.class_of(m.head).empty() : m.head != has.head)
    return cat("model.head \"", config::name_of(m.head), "\"");
  if (m.embedding_norm != has.embedding_norm) return said("embedding_norm", m.embedding_norm);
  if (m.bias != has.bias && !family.can("bias")) return said("bias", m.bias);
  if (m.bias && m.mlp_bias != (has.bias && has.mlp_bias) && !family.can("mlp_bias"))
    return said("mlp_bias", m.mlp_bias);
  if (m.has_qkv_bias() != (has.has_qkv_bias() || m.bias) && !family.can("qkv_bias"))
    return said("qkv_bias", m.qkv_bias);
  if (m.attention_gate != has.attention_gate) return said("attention_gate", m.attention_gate);
  if (m.attention_sinks != has.attention_sinks) return said("attention_sinks", m.attention_sinks);
  if (m.moe.experts > 0 && m.moe.router_bias != has.moe.router_bias)
    return said("moe.router_bias", m.moe.router_bias);
  if (m.qk_norm != has.qk_norm && !family.can("qk_norm")) return said("qk_norm", m.qk_norm);
  if ((m.mla.kv_lora_rank > 0) != family.can("mla"))
    return m.mla.kv_lora_rank > 0 ? "model.mla" : "a model without model.mla";
  if (m.qk_norm && m.qk_norm_all_heads != has.qk_norm_all_heads)
    return said("qk_norm_all_heads", m.qk_norm_all_heads);
  if (m.norm_unit_offset != has.norm_unit_offset) return said("norm_unit_offset", m.norm_unit_offset);
  if (m.norm_placement != has.norm_placement)
    return cat("model.norm_placement \"", config::name_of(m.norm_placement), "\"");
  if (m.scale_embeddings != has.scale_embeddings) return said("scale_embeddings", m.scale_embeddings);
  for (const OptionalPart& part : optional_parts(m))
    if (part.there && !family.can(part.key)) return cat("model.", part.key);
  if ((m.moe.experts > 0) != family.can("moe"))
    return m.moe.experts > 0 ? "model.moe" : "a model without model.moe";
  return family.lacks ? family.lacks(m) : std::nullopt;
}

/// The part that reads text of a model that reads pictures too, whose class keeps it in text_config; else the
/// whole.
Node text_part(Node tree, bool& is_part) {
  const Node* text = tree.find("text_config");
  is_part = text && text->is(Node::Kind::object) && text->find("model_type");
  if (!is_part) return tree;
  Node out = *text;
  for (const char* name : {"dtype", "torch_dtype", "tie_word_embeddings", "quantization_config"})
    if (const Node* outer = tree.find(name)) {  // which goes before the part's own
      std::erase_if(out.members, [&](const auto& member) { return member.first == name; });
      out.members.emplace_back(name, *outer);
    }
  return out;
}

}  // namespace

PublishedModel from_hugging_face(std::string_view text, const std::string& name) {
  config::Context context;
  context.advice =
      "Sherd does not know whether the model depends on it; where it does not, take it out of the file";
  Node tree = config::parse_tree(text, name);
  config::drop_notes(tree);
  bool is_part = false;
  tree = text_part(std::move(tree), is_part);
  if (is_part)
    context.note("text_config", "the model's part for text is taken, without those for pictures and sound");
  const Value file{tree, "", context};
  PublishedModel out;
  context.attempt([&] {
    file.expect(Node::Kind::object);
    const Family& family = family_in(file);
    const config::Table<Published> table{.keys = keys_of(family)};
    Published published = class_defaults(family);
    settle(published, config::read_section(table, published, file), file, family);
    out.model = published.model;
    out.dtype = published.dtype.empty() ? published.torch_dtype : published.dtype;  // as transformers 5
    if (const Node* quantised = tree.find("quantization_config");
        quantised && quantised->is(Node::Kind::object))
      context.note("quantization_config",
                   "weights in few bits are read as the numbers that they stand for; beside an adapter "
                   "training.adapter.base_format (nf4, fp4, int8, mxfp4, fp8) keeps them in few bits");
  });
  context.raise();
  out.notes = std::move(context.notes);
  return out;
}

ModelType published_as(const Model& model) {
  const Family& own = family_of(model.type);
  const std::optional<std::string> lacking = missing_of(model, own);
  if (!lacking) return model.type;
  std::string reasons = cat(own.name, " not with ", *lacking);
  for (const Family& family : families()) {
    const ModelType type = config::family_named(family.name);
    const std::optional<std::string> missing = missing_of(model, family);
    if (!missing) return type;
    // Families that are something else altogether are passed over in silence.
    const bool near =
        config::defaults_of(type).norm == model.norm && family.can("moe") == (model.moe.experts > 0);
    if (near && &family != &own) reasons += cat(", ", family.name, " not with ", *missing);
  }
  fail(ErrorKind::config, "no family that Hugging Face's transformers knows can be this model: ", reasons,
       ". Train it with other keys to export it; its checkpoints are whole without");
}

namespace {

void put_labels(const Model& model, const std::function<void(const std::string&, Node)>& put) {
  std::vector<std::pair<std::string, Node>> names, numbers;
  for (std::size_t i = 0; i < model.labels.size(); ++i) {
    names.emplace_back(std::to_string(i), config::node_of(model.labels[i]));
    numbers.emplace_back(model.labels[i], config::node_of(static_cast<std::int64_t>(i)));
  }
  put("id2label", config::node_of(std::move(names)));
  put("label2id", config::node_of(std::move(numbers)));
}

}  // namespace

std::string to_hugging_face(const Model& model, std::int64_t vocab_size, std::string_view dtype,
                            std::string_view original) {
  const Family& family = family_of(published_as(model));
  Node out = original.empty() ? config::node_of(std::vector<std::pair<std::string, Node>>{})
                              : config::parse_tree(original, "config.json");
  bool is_part = false;
  out = text_part(std::move(out), is_part);
  // transformers 4 knows the older form alone, which cannot say all.
  // Where it says nothing, positions are scaled as the class has it.
  const bool says_none = model.rope_scaling.type != RotaryScaling::none ||
                         class_defaults(family).rope.scaling.type == RotaryScaling::none;
  const bool older_rope = !out.find("rope_parameters") && !family.can("llama_4_scaling_beta") &&
                          !family.can("sliding_rope") && says_none;
  // Keys that mean the same as some that follow.
  static const std::set<std::string> others{"rope_theta",           "rope_scaling",       "rope_parameters",
                                            "rope_local_base_freq", "no_rope_layers",     "layer_types",
                                            "num_experts",          "num_local_experts",  "dtype",
                                            "torch_dtype",          "quantization_config"};
  std::erase_if(out.members, [](const auto& member) { return others.contains(member.first); });
  const auto put = [&](const std::string& name, Node value) {
    if (Node* there = out.find(name))
      *there = std::move(value);
    else
      out.members.emplace_back(name, std::move(value));
  };
  put("architectures", config::list_of(std::vector<std::string>{family.class_of(model.head)}));
  if (model.classifies()) put_labels(model, put);
  if (model.gives_rewards()) {
    put("id2label",
        config::node_of(std::vector<std::pair<std::string, Node>>{{"0", config::node_of("LABEL_0")}}));
    put("label2id", config::node_of(std::vector<std::pair<std::string, Node>>{
                        {"LABEL_0", config::node_of(std::int64_t{0})}}));
  }
  put("model_type", config::node_of(family.name));
  put("vocab_size", config::node_of(vocab_size));
  Published published;
  published.model = model;
  for (const JsonKey& key : family.keys) {
    const bool stays = key.effect == config::Effect::noted && out.find(key.name);
    if (!key.write || stays || (key.name == "rope_parameters" && older_rope)) continue;
    if (Node value = key.write(published, config::Selection::told);
        !value.is(Node::Kind::null) || key.writes_null)
      put(key.name, std::move(value));
  }
  put("tie_word_embeddings", config::node_of(model.tie_embeddings));
  put("initializer_range", config::node_of(model.init_std));
  put("torch_dtype", config::node_of(std::string(dtype)));
  return out.json(2) + "\n";
}

}  // namespace sherd::models
