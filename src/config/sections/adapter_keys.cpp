#include <algorithm>
#include <cmath>

#include "config/adapter.h"
#include "config/published.h"
#include "config/sections/tables.h"

namespace sherd::config {
namespace {

constexpr std::int64_t most_layer = 1 << 20;

const std::vector<std::string> adapter_types{"lora", "ia3", "prompt_tuning", "p_tuning", "bottleneck"};

bool is_lora(const Adapter& adapter) {
  return adapter.type == AdapterType::lora;
}
bool has_targets(const Adapter& adapter) {
  return is_lora(adapter) || adapter.type == AdapterType::ia3;
}
bool is_bottleneck(const Adapter& adapter) {
  return adapter.type == AdapterType::bottleneck;
}

/// Names of modules, or of parameters: a string, or a list of them.
template <class T>
Key<T> names_key(const char* name, const char* example, std::vector<std::string> T::*field,
                 const char* such_as) {
  const auto read = [field, such_as](T& keys, const Value& value) {
    std::vector<std::string>& out = keys.*field;
    out.clear();
    if (value.node.is(Node::Kind::string)) {
      if (!value.text().empty()) out.push_back(value.text());
      return;
    }
    value.expect(Node::Kind::array);
    for (std::size_t i = 0; i < value.node.items.size(); ++i) {
      const Value item = value.item(i);
      if (item.text().empty()) item.error("must be ", such_as, ", not \"\"");
      out.push_back(item.text());
    }
  };
  return custom<T>(name, example, read, [field](const T& keys) { return list_of(keys.*field); })
      .takes({"string, or list of strings",
              R"({"type": ["string", "array"], "items": {"type": "string", "minLength": 1}})"});
}

Key<Adapter> modules_key(const char* name, const char* example, std::vector<std::string> Adapter::*field) {
  return names_key(name, example, field, "the name of a module, such as \"q_proj\"").where(has_targets);
}

std::vector<Key<Adapter>> targets_keys() {
  return {
      modules_key("targets", "[\"q_proj\", \"v_proj\"]", &Adapter::targets)
          .means("modules that get an adapter: names as they are published, or ends of them "
                 "(`\"q_proj\"`, `\"attn.c_proj\"`), or regular expressions of whole names "
                 "(`\".*layers\\.[0-3]\\..*_proj\"`), or `\"all-linear\"`. Empty: PEFT's choice, `c_attn` "
                 "of GPT-2 and `q_proj`, `v_proj` of the others; for IA³ `c_attn`, `mlp.c_proj`, and "
                 "`k_proj`, `v_proj`, `down_proj`",
                 also("target_modules")),
      modules_key("exclude", "[\"o_proj\"]", &Adapter::exclude)
          .means("modules that get none although `targets` names them, likewise", also("exclude_modules"),
                 unless_default),
      modules_key("modules_to_save", "[\"embed_tokens\", \"lm_head\"]", &Adapter::modules_to_save)
          .means("modules that are trained whole beside `lora` and `ia3`, likewise: the table of tokens and "
                 "the head. They cost their gradients and optimizer's states",
                 unless_default)};
}

/// {"q_proj": 8}: numbers by regular expressions.
template <class N>
Key<LoraKeys> pattern_key(const char* name, const char* example,
                          std::vector<std::pair<std::string, N>> LoraKeys::*field,
                          std::function<N(const Value&)> number) {
  const auto read = [field, number](LoraKeys& lora, const Value& value) {
    value.expect(Node::Kind::object);
    (lora.*field).clear();
    for (const auto& [pattern, node] : value.node.members)
      (lora.*field).emplace_back(pattern, number({node, cat(value.path, ".", pattern), value.context}));
  };
  const auto write = [field](const LoraKeys& lora) {
    std::vector<std::pair<std::string, Node>> members;
    for (const auto& [pattern, value] : lora.*field) members.emplace_back(pattern, node_of(value));
    return node_of(std::move(members));
  };
  return custom<LoraKeys>(name, example, read, write).takes({"section", R"({"type": "object"})"});
}

Key<LoraKeys> layers_key() {
  const auto read = [](LoraKeys& lora, const Value& value) {
    lora.layers.clear();
    if (value.node.is(Node::Kind::integer)) {
      lora.layers.push_back(value.integer(0, most_layer));
      return;
    }
    value.expect(Node::Kind::array);
    for (std::size_t i = 0; i < value.node.items.size(); ++i)
      lora.layers.push_back(value.item(i).integer(0, most_layer));
    std::sort(lora.layers.begin(), lora.layers.end());
    lora.layers.erase(std::unique(lora.layers.begin(), lora.layers.end()), lora.layers.end());
  };
  return custom<LoraKeys>("layers", "[0, 1]", read, [](const LoraKeys& lora) { return list_of(lora.layers); })
      .takes({"integer, or list of them",
              R"({"type": ["integer", "array"], "items": {"type": "integer", "minimum": 0}})"})
      .means("numbers of the blocks whose modules get one, from 0; empty: all", also("layers_to_transform"),
             unless_default);
}

Key<LoraKeys> target_parameters_key() {
  return names_key("target_parameters", "[\"experts.gate_up_proj\", \"experts.down_proj\"]",
                   &LoraKeys::target_parameters, "the name of a parameter, such as \"experts.down_proj\"")
      .means(
          "experts' weights that get one in each expert: ends of the names that they have in "
          "transformers' memory, `mlp.experts.gate_up_proj` and `mlp.experts.down_proj`. With these "
          "`targets` may be empty. They have no `dropout` ([more](adapters.md#experts))",
          unless_default);
}

Key<LoraKeys> init_key() {
  Key<LoraKeys> key =
      word<LoraKeys>(
          "init_lora_weights", {"uniform", "gaussian", "pissa", "olora"}, "\"pissa\"",
          [](const LoraKeys& lora) { return static_cast<int>(lora.init); },
          [](LoraKeys& lora, int index) { lora.init = static_cast<LoraInit>(index); })
          .means(
              "how LoRA's products begin: zero, with A drawn from ±1/√in (`uniform`, PEFT's `true`) or "
              "normal(0, 1/`rank`); or as a part of each weight, which is taken away from it "
              "([more](adapters.md#parts-of-the-weights))",
              unless_default);
  key.read = [by_name = key.read](LoraKeys& lora, const Value& value) {
    if (!value.node.is(Node::Kind::boolean)) return by_name(lora, value);
    if (!value.boolean()) value.error("must be true or a name: with false B would not begin as zero");
    lora.init = LoraInit::uniform;
  };
  return key;
}

constexpr std::int64_t most_id = std::int64_t{1} << 30;

Key<LoraKeys> token_indices_key() {
  const auto ids_of = [](const Value& value) {
    std::vector<std::int64_t> out;
    if (value.node.is(Node::Kind::integer)) return out.push_back(value.integer(0, most_id)), out;
    value.expect(Node::Kind::array);
    for (std::size_t i = 0; i < value.node.items.size(); ++i) {
      out.push_back(value.item(i).integer(0, most_id));
      if (std::find(out.begin(), out.end() - 1, out.back()) != out.end() - 1)
        value.item(i).error("is there twice");
    }
    return out;
  };
  const auto read = [ids_of](LoraKeys& lora, const Value& value) {
    lora.token_indices.clear();
    if (!value.node.is(Node::Kind::object)) {
      if (std::vector<std::int64_t> ids = ids_of(value); !ids.empty())
        lora.token_indices.emplace_back("", std::move(ids));
      return;
    }
    for (const auto& [module, node] : value.node.members)
      if (std::vector<std::int64_t> ids = ids_of({node, cat(value.path, ".", module), value.context});
          ids.empty())
        value.error("names no ids of ", module);
      else
        lora.token_indices.emplace_back(module, std::move(ids));
  };
  const auto write = [](const LoraKeys& lora) {
    const auto& all = lora.token_indices;
    if (all.size() < 2 && (all.empty() || all[0].first.empty()))
      return list_of(all.empty() ? std::vector<std::int64_t>() : all[0].second);
    std::vector<std::pair<std::string, Node>> members;
    for (const auto& [module, ids] : all) members.emplace_back(module, list_of(ids));
    return node_of(std::move(members));
  };
  return custom<LoraKeys>("trainable_token_indices", "[128256, 128257]", read, write)
      .takes({"integer, or list of them, or section of lists",
              R"({"type": ["integer", "array", "object"], "items": {"type": "integer", "minimum": 0}})"})
      .means(
          "ids of tokens whose vectors are trained, too, while the others of the table stay as they are: "
          "a list, or lists by module, `{\"embed_tokens\": [5], \"lm_head\": [5]}` "
          "([more](adapters.md#new-tokens))",
          unless_default);
}

std::vector<Key<LoraKeys>> lora_keys() {
  using L = LoraKeys;
  return {
      integer("rank", &L::rank, "16", 1, most_adapter_rank).means("of LoRA's products", also("r")),
      real("alpha", &L::alpha, "32", 0, infinity, true)
          .means("LoRA's products are multiplied by `alpha` / `rank`", also("lora_alpha"),
                 Concerns::training),
      boolean("use_rslora", &L::rslora)
          .means("LoRA's products are multiplied by `alpha` / √`rank` instead", Concerns::training),
      boolean("use_dora", &L::dora)
          .means("the rows of weight and products together have magnitudes that are trained for themselves, "
                 "at first those of the weights: DoRA ([more](adapters.md#what-is-computed))",
                 unless_default),
      real("dropout", &L::dropout, "0.05", 0)
          .then([](L& lora, const Value& value) {
            if (lora.dropout >= 1) value.error("must be below 1, not ", lora.dropout);
          })
          .takes({"number >= 0, below 1", R"({"type": "number", "minimum": 0, "exclusiveMaximum": 1})"})
          .means("of what goes into LoRA's products", also("lora_dropout"), Concerns::training),
      pattern_key<std::int64_t>("rank_pattern", "{\"v_proj\": 16}", &L::rank_pattern,
                                [](const Value& value) { return value.integer(1, most_adapter_rank); })
          .means("ranks of some modules: by regular expressions of their names, or of ends of these",
                 by("`rank`"), unless_default),
      pattern_key<double>("alpha_pattern", "{\"v_proj\": 64}", &L::alpha_pattern,
                          [](const Value& value) { return value.real(0, infinity, true); })
          .means("alphas of some modules, likewise", by("`alpha`"), Concerns::training, unless_default),
      layers_key(),
      target_parameters_key(),
      init_key(),
      token_indices_key()};
}

Key<Adapter> adapter_type_key() {
  return word<Adapter>(
             "type", adapter_types, "\"lora\"", [](const Adapter& a) { return static_cast<int>(a.type) - 1; },
             [](Adapter& a, int index) { a.type = static_cast<AdapterType>(index + 1); })
      .means(
          "what is trained beside the model, whose own weights stay as they are, to the bit: LoRA's low-rank "
          "products, IA³'s factors, a prompt's vectors, plain or made by a network, or networks of few "
          "features in its blocks ([more](adapters.md))",
          instead_of("init_from"));
}

/// As base_format has them.
const std::vector<std::pair<std::string, StoredFormat>> base_formats{
    {"compute", StoredFormat::compute}, {"bf16", StoredFormat::bf16}, {"int8", StoredFormat::int8},
    {"nf4", StoredFormat::nf4},         {"fp4", StoredFormat::fp4},   {"mxfp4", StoredFormat::mxfp4},
    {"fp8", StoredFormat::fp8}};

constexpr const char* not_in_four_bits = "no effect: base_format is neither nf4 nor fp4";
bool in_four_bits(const Adapter& adapter) {
  return adapter.base_format == StoredFormat::nf4 || adapter.base_format == StoredFormat::fp4;
}

/// Adapters of that type have the key of a prompt.
std::function<bool(const Adapter&)> has_prompt_key(const std::string& key) {
  if (key == "init" || key == "init_text")
    return [](const Adapter& adapter) { return adapter.type == AdapterType::prompt_tuning; };
  if (key.starts_with("encoder_"))
    return [](const Adapter& adapter) { return adapter.type == AdapterType::p_tuning; };
  return [](const Adapter& adapter) { return adapter.has_prompt(); };
}

void finish_adapter(Adapter& adapter, const Given& given, const Value& section) {
  if (!given.contains("type"))
    section.error(R"(needs a "type": "lora", "ia3", "prompt_tuning", "p_tuning" or "bottleneck")");
  note_idle(adapter_table(), adapter, given, section,
            cat("no effect with type \"", name_of(adapter.type), "\""));
  if (!has_targets(adapter))
    adapter.targets.clear(), adapter.exclude.clear(), adapter.modules_to_save.clear();
  // Without a format here the one of `training` may stand in its place, which check_training() looks at.
  if (given.contains("base_format"))
    drop_idle_double(adapter, section, join(section.path, "base_double_quant"));
  if (!is_lora(adapter)) adapter.lora = {};
  if (is_bottleneck(adapter))
    finish_bottleneck(adapter.bottleneck, given, section);
  else
    adapter.bottleneck = {};
  if (adapter.has_prompt())
    finish_prompt(adapter, given, section);
  else
    adapter.prompt = {};
}

Table<Adapter> make_adapter_table() {
  using A = Adapter;
  Table<A> table{Auto::is_a_value, {adapter_type_key()}, finish_adapter};
  for (const Key<LoraKeys>& key : lora_keys()) table.keys.push_back(inside(&A::lora, key).where(is_lora));
  for (const Key<PromptKeys>& key : prompt_keys())
    table.keys.push_back(inside(&A::prompt, key).where(has_prompt_key(key.name)));
  for (Key<A>& key : foreign_keys<A>("training.adapter", "p_tuning"))
    table.keys.push_back(std::move(key).where(has_prompt_key(key.name)));
  for (const Key<BottleneckKeys>& key : bottleneck_keys())
    table.keys.push_back(inside(&A::bottleneck, key).where(is_bottleneck));
  append(table.keys, targets_keys());
  append(table.keys, base_keys());
  table.keys.push_back(
      boolean("save_base", &A::save_base)
          .means("checkpoints hold the model's own weights, too; `false`: they name the files "
                 "of `training.init_from` that these came from, with checksums, and need them "
                 "([more](adapters.md#checkpoints-and-files))",
                 unless_default));
  append(table.keys, foreign_keys<A>("training.adapter"));
  table.keys.push_back(text("init_from", &A::init_from, "\"adapters/a\"")
                           .means("folder of an adapter to go on from: PEFT's (adapter_config.json and "
                                  "adapter_model.safetensors), AdapterHub's (with adapter.safetensors), or "
                                  "checkpoints of a run with an adapter. It brings this section, over which "
                                  "the file's own keys are laid; empty: the adapter begins as new"));
  return table;
}

}  // namespace

void drop_idle_double(Adapter& adapter, const Value& value, const std::string& key) {
  if (!adapter.base_double_quant || in_four_bits(adapter)) return;
  value.context.note(key, not_in_four_bits);
  adapter.base_double_quant = false;
}

std::vector<Key<Adapter>> base_keys() {
  std::vector<std::string> names;
  for (const auto& [name, format] : base_formats) names.push_back(name);
  return {
      word<Adapter>(
          "base_format", names, "\"nf4\"",
          [](const Adapter& a) {
            const auto at = std::find_if(base_formats.begin(), base_formats.end(),
                                         [&](const auto& of) { return of.second == a.base_format; });
            return static_cast<int>(at - base_formats.begin());
          },
          [](Adapter& a, int index) { a.base_format = base_formats[static_cast<std::size_t>(index)].second; })
          .means("what the model's own weights are kept in, in the linear layers of its blocks, wherever "
                 "they lie: `compute`, the type that the run computes in; or codes of 4 or 8 bits with a "
                 "scale for every 32 to 128 of them ([which one](adapters.md#a-base-in-few-bits)). A "
                 "checkpoint goes on with the value that it was saved with",
                 also("base_dtype")),
      boolean("base_double_quant", &Adapter::base_double_quant)
          .means("the scales of `base_format` nf4 and fp4 are kept in 8 bits, too: 4.13 bits a weight in "
                 "place of 4.5",
                 also("bnb_4bit_use_double_quant"), unless_default)};
}

void read_lora_key(LoraKeys& lora, const std::string& name, const Value& value) {
  for (const Key<LoraKeys>& key : lora_keys())
    if (key.name == name || std::find(key.aliases.begin(), key.aliases.end(), name) != key.aliases.end())
      return key.read(lora, value);
  require(false, "LoRA has no key '", name, "'");
}

const Table<Adapter>& adapter_table() {
  static const Table<Adapter> table = make_adapter_table();
  return table;
}

Key<Training> adapter_key() {
  Key<Training> key = section("adapter", &Training::adapter, adapter_table());
  key.example = "{\"type\": \"lora\"}";
  key.idle = [](const Config& config) {
    return config.model ? "" : "no effect: a program's own model declares what it trains beside it";
  };
  key.write = [write = key.write](const Training& training, Selection selection) {
    return training.adapter.type == AdapterType::none ? Node() : write(training, selection);
  };
  return key;
}

bool is_off(const Node& node) {
  using Kind = Node::Kind;
  return node.is(Kind::null) || (node.is(Kind::boolean) && !node.boolean) ||
         (node.is(Kind::array) && node.items.empty()) || (node.is(Kind::object) && node.members.empty()) ||
         (node.is(Kind::string) && (node.text.empty() || node.text == "none")) ||
         (node.is(Kind::integer) && node.integer == 0) || (node.is(Kind::number) && node.number == 0);
}

bool Adapter::can_be_switched_off() const {
  const bool begins_as_nothing =
      init_from.empty() && !(type == AdapterType::lora && takes_from_base(lora.init));
  return type != AdapterType::none && !has_prompt() && begins_as_nothing && modules_to_save.empty() &&
         lora.token_indices.empty();
}

StoredFormat Adapter::stored_base() const {
  if (base_double_quant && base_format == StoredFormat::nf4) return StoredFormat::nf4_double;
  if (base_double_quant && base_format == StoredFormat::fp4) return StoredFormat::fp4_double;
  return base_format;
}

void Adapter::keep_base_as(StoredFormat stored) {
  base_double_quant = stored == StoredFormat::nf4_double || stored == StoredFormat::fp4_double;
  base_format = stored == StoredFormat::nf4_double   ? StoredFormat::nf4
                : stored == StoredFormat::fp4_double ? StoredFormat::fp4
                                                     : stored;
}

double LoraKeys::scale(std::int64_t of_rank, double of_alpha) const {
  const auto r = static_cast<double>(of_rank);
  return of_alpha / (rslora ? std::sqrt(r) : r);
}

std::string_view name_of(AdapterType type) {
  return type == AdapterType::none ? std::string_view() : adapter_types[static_cast<std::size_t>(type) - 1];
}

}  // namespace sherd::config
