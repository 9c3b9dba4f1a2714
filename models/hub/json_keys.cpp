#include "models/hub/json_keys.h"

#include <algorithm>
#include <cmath>
#include <sstream>

#include "base/text/excerpt.h"
#include "config/published.h"
#include "tensor/safetensors/low_bits.h"

namespace sherd::models {

using config::Node;
using config::RopeScaling;
using config::Value;

JsonKey only(std::string name, std::function<bool(const Value&)> same, std::string reason) {
  return config::custom<Published>(std::move(name), "", [same, reason](Published&, const Value& value) {
    if (!same(value)) value.error(value.node.brief(), " is not supported: ", reason);
  });
}

JsonKey idle(std::string name) {
  JsonKey key = config::custom<Published>(std::move(name), "", [](Published&, const Value&) {});
  key.effect = config::Effect::noted;
  return key;
}

JsonKey activation(std::string name, std::vector<std::pair<std::string, config::FfnActivation>> names,
                   std::string known) {
  const auto read = [=](Published& published, const Value& value) {
    for (const auto& [text, activation] : names)
      if (value.text() == text) return void(published.model.activation = activation);
    fail(ErrorKind::config, value.node.place.file, ": ", name, " \"", excerpt(value.text()),
         "\" is not supported: ", known);
  };
  const auto write = [names](const Published& published) {
    for (const auto& [text, activation] : names)
      if (published.model.activation == activation) return config::node_of(text);
    return Node();
  };
  JsonKey key = config::custom<Published>(name, "", read, write);
  key.can_say = [names](const Published& published) {
    return std::any_of(names.begin(), names.end(),
                       [&](const auto& each) { return each.second == published.model.activation; });
  };
  return key;
}

std::function<bool(const Value&)> equals_text(std::string text) {
  return [text = std::move(text)](const Value& value) { return value.node.is_text(text.c_str()); };
}

bool is_true(const Value& value) {
  return value.node.is(Node::Kind::boolean) && value.node.boolean;
}

namespace {

/// Keys that transformers and others keep in config.json and on which no number of the model depends.
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

/// Takes a key out of a section, if it is there and not null.
std::optional<Node> taken(Node& section, const char* name) {
  std::optional<Node> out;
  if (const Node* node = section.find(name); node && !node->is(Node::Kind::null)) out = *node;
  std::erase_if(section.members, [&](const auto& member) { return member.first == name; });
  return out;
}

/// The type of scaling, by either of its names; null: none is told.
const Node* kind_of(const Node& rope) {
  const Node* type = rope.find("rope_type");
  return type ? type : rope.find("type");
}

/// Takes out the keys that stand beside those of model.rope_scaling.
void take_others(PublishedRope& to, Node& rope, const Value& section) {
  const auto value = [&](const Node& node, const char* name) {
    return Value{node, section.path + "." + name, section.context};
  };
  taken(rope, "finetuned");
  if (const auto base = taken(rope, "rope_theta"))
    to.theta = value(*base, "rope_theta").real(1, config::infinity, true);
  if (const auto share = taken(rope, "partial_rotary_factor"))
    to.share = value(*share, "partial_rotary_factor").real(0, 1, true);
  if (const auto beta = taken(rope, "llama_4_scaling_beta"))
    to.query_beta = value(*beta, "llama_4_scaling_beta").real(0);
  taken(rope, "max_position_embeddings");  // the model's own, once more
  // Positions of pictures, which are one number for a token of text.
  taken(rope, "mrope_section"), taken(rope, "mrope_interleaved");
  // Yarn's factor of scores as a quotient, which attention_factor goes before.
  const auto scale = [&](const char* name) {
    const auto node = taken(rope, name);
    return node ? value(*node, name).real(0) : 0.0;
  };
  const double mscale = scale("mscale"), of_all = scale("mscale_all_dim");
  to.mscale_all_dim = of_all;
  const auto own = taken(rope, "attention_factor");
  const Node *factor = rope.find("factor"), *kind = kind_of(rope);
  if (own) {
    rope.members.emplace_back("attention_factor", *own);
  } else if (mscale > 0 && of_all > 0 && factor && kind && kind->is_text("yarn")) {
    const double s = std::log(value(*factor, "factor").real(1));
    rope.members.emplace_back("attention_factor",
                              config::node_of((0.1 * mscale * s + 1) / (0.1 * of_all * s + 1)));
  }
}

PublishedRope read_rope(const Value& given) {
  given.expect(Node::Kind::object);
  Node rope = given.node;
  const Node *old = rope.find("type"), *type = rope.find("rope_type");
  // Some files say "type" and "rope_type" alike.
  if (old && type && type->is(Node::Kind::string) && old->is_text(type->text)) taken(rope, "type");
  const Node* kind = kind_of(rope);
  const std::size_t problems = given.context.problems.size();
  PublishedRope out;
  if (kind && kind->is_text("su"))  // Phi-3's first name for it
    for (auto& [name, node] : rope.members)
      if (node.is_text("su")) node.text = "longrope";
  out.original_missing = kind && (kind->is_text("llama3") || kind->is_text("longrope")) &&
                         !rope.find("original_max_position_embeddings");
  if (out.original_missing) {  // transformers takes max_position_embeddings, which may come later
    Node later = *kind;
    later.kind = Node::Kind::integer, later.integer = 1, later.number = 1;
    rope.members.emplace_back("original_max_position_embeddings", std::move(later));
  }
  take_others(out, rope, given);
  const bool empty = std::all_of(rope.members.begin(), rope.members.end(),
                                 [](const auto& member) { return member.second.is(Node::Kind::null); });
  if (!empty) config::read_rope(out.scaling, {rope, given.path, given.context});
  if (given.context.problems.size() > problems) throw config::Reported{};
  return out;
}

constexpr const char *full_layers = "full_attention", *sliding_layers = "sliding_attention";

/// One section for all layers, or one for each of their types.
void read_rope_section(Published& published, const Value& given) {
  given.expect(Node::Kind::object);
  const Node *full = given.node.find(full_layers), *sliding = given.node.find(sliding_layers);
  if (!full && !sliding) return void(published.rope = read_rope(given));
  for (const auto& [name, node] : given.node.members)
    if (name != full_layers && name != sliding_layers)
      given.error(excerpt(name), " stands beside sections for types of layers");
  const auto there = [](const Node* node) { return node && !node->is(Node::Kind::null); };
  if (there(full)) published.rope = read_rope(given.at(full_layers));
  if (there(sliding)) published.sliding = read_rope(given.at(sliding_layers));
}

/// The older form, of the layers without a window where there are layers with one.
void read_older_section(Published& published, const Value& given) {
  Published read;
  read_rope_section(read, given);
  if (read.sliding) published.sliding = read.sliding;
  const bool empty = given.node.members.empty();  // as if it were not there
  if (!empty) published.older_rope = read.rope;
}

/// Says yarn's factors of cosines and of scores as mscale and mscale_all_dim.
void put_mscale(Node& rope, const config::Model& m) {
  const RopeScaling& yarn = m.rope_scaling;
  if (yarn.type != RotaryScaling::yarn || m.attention_multiplier == 0 || yarn.factor <= 1) return;
  const double step = 0.1 * std::log(yarn.factor);
  const double all = std::sqrt(m.attention_multiplier * std::sqrt(static_cast<double>(m.head_dim))),
               own = (yarn.attention_factor > 0 ? yarn.attention_factor : 1 + step) * all;
  const auto rounded = [](double x) { return std::round(x * 1e12) / 1e12; };
  std::erase_if(rope.members, [](const auto& member) { return member.first == "attention_factor"; });
  rope.members.emplace_back("mscale", config::node_of(rounded((own - 1) / step)));
  rope.members.emplace_back("mscale_all_dim", config::node_of(rounded((all - 1) / step)));
}

/// rope_parameters of the layers without a window, or of those with one.
Node written_parameters(const Published& p, const RopeKeys& has, bool sliding) {
  const config::Model& m = p.model;
  const bool own = sliding && m.sliding_rope;
  Node out = config::written_rope(own ? m.sliding_rope->rope_scaling : m.rope_scaling);
  out.members.emplace_back("rope_theta", config::node_of(own ? m.sliding_rope->rotary_base : m.rotary_base));
  if (has.partial)
    out.members.emplace_back("partial_rotary_factor", config::node_of(m.partial_rotary_factor));
  if (has.mscale) put_mscale(out, m);
  if (has.query_scaling)
    out.members.emplace_back("llama_4_scaling_beta", config::node_of(m.llama_4_scaling_beta));
  return out;
}

/// Whose values are read as what they stand for (models/hub/low_bit_files.h).
bool is_read(const Value& value) {
  if (!value.node.is(Node::Kind::object)) return value.node.is(Node::Kind::null);
  const Node *method = value.node.find("quant_method"), *block = value.node.find("weight_block_size");
  const auto is_side = [](const Node& side) {
    return side.is(Node::Kind::integer) && side.integer == tensor::fp8_file_block;
  };
  const Node* form = value.node.find("format");
  const auto is_form = [&](const char* name) { return form && form->is_text(name); };
  return method &&
         (method->is_text("mxfp4") || method->is_text("bitsandbytes") ||
          (method->is_text("compressed-tensors") &&
           (is_form("int-quantized") || is_form("float-quantized") || is_form("pack-quantized") ||
            is_form("naive-quantized"))) ||
          (method->is_text("fp8") && block && block->is(Node::Kind::array) && block->items.size() == 2 &&
           std::all_of(block->items.begin(), block->items.end(), is_side)));
}

}  // namespace

JsonKeys common_keys() {
  using M = config::Model;
  JsonKeys keys{whole("vocab_size", &M::vocab_size, 1, config::most_vocabulary),
                positive("initializer_range", &M::init_std),
                flag("tie_word_embeddings", &M::tie_embeddings),
                only("is_encoder_decoder", config::is_false, "the model has no encoder here"),
                only("add_cross_attention", config::is_false, "the model has no encoder here"),
                only("pruned_heads", config::is_empty, "all heads are there"),
                only("quantization_config", is_read,
                     "take the files of the model before it was quantised, in bf16, fp16 or fp32"),
                only("use_mrope", config::is_false, "positions are those of text"),
                only("neftune_noise_alpha", config::equals_number(0), "embeddings get no noise"),
                only("text_config", config::never, "it does not say its model_type")};
  for (const auto& [name, member] :
       {std::pair("dtype", &Published::dtype), std::pair("torch_dtype", &Published::torch_dtype)})
    keys.push_back(config::custom<Published>(name, "", [member](Published& published, const Value& value) {
      if (!value.node.is(Node::Kind::string)) return;
      const std::string& type = value.text();
      published.*member = type.starts_with("torch.") ? type.substr(6) : type;
    }));
  std::istringstream names(idle_keys);
  for (std::string name; names >> name;) keys.push_back(idle(name));
  return keys;
}

/// transformers 4 knows the older form alone, 5 both: both say the same.
JsonKeys rope_keys(RopeKeys has) {
  const auto theta = [](const Published& p) { return config::node_of(p.model.rotary_base); };
  const auto scaling = [has](const Published& p) {
    const RopeScaling& rope = p.model.rope_scaling;
    if (rope.type == RotaryScaling::none) return Node();
    Node out = config::written_rope(rope);
    if (has.mscale) put_mscale(out, p.model);
    return out;
  };
  const auto parameters = [=](const Published& p) {
    Node full = written_parameters(p, has, false);
    if (!has.sliding) return full;
    return config::node_of(std::vector<std::pair<std::string, Node>>{
        {full_layers, std::move(full)}, {sliding_layers, written_parameters(p, has, true)}});
  };
  const auto local = [](const Published& p) {
    return config::node_of(p.model.sliding_rope ? p.model.sliding_rope->rotary_base : p.model.rotary_base);
  };
  const auto share = [](const Published& p) { return config::node_of(p.model.partial_rotary_factor); };
  JsonKeys out{in_file(config::real("rope_theta", &Published::rope_theta, "", 1, config::infinity, true)),
               config::custom<Published>("rope_scaling", "", read_older_section).with(config::or_null),
               config::custom<Published>("rope_parameters", "", read_rope_section, parameters)};
  if (!has.query_scaling)  // which the older form cannot say
    std::move(out[0]).written(theta), std::move(out[1]).written(scaling);
  JsonKey factor =
      in_file(config::real("partial_rotary_factor", &Published::partial_rotary_factor, "", 0, 1, true));
  out.push_back(has.partial ? std::move(factor).written(share) : std::move(factor));
  if (has.local_base)
    out.push_back(
        config::real("rope_local_base_freq", &Published::sliding_theta, "", 1, config::infinity, true)
            .written(local));
  return out;
}

}  // namespace sherd::models
