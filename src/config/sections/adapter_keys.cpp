#include <cmath>

#include "config/adapter.h"
#include "config/sections/tables.h"

namespace sherd::config {
namespace {

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

std::vector<Key<LoraKeys>> lora_keys() {
  using L = LoraKeys;
  return {integer("rank", &L::rank, "16", 1, most_adapter_rank).means("of LoRA's products", also("r")),
          real("alpha", &L::alpha, "32", 0, infinity, true)
              .means("LoRA's products are multiplied by `alpha` / `rank`", also("lora_alpha"),
                     Concerns::training),
          boolean("use_rslora", &L::rslora)
              .means("LoRA's products are multiplied by `alpha` / √`rank` instead", Concerns::training),
          real("dropout", &L::dropout, "0.05", 0)
              .then([](L& lora, const Value& value) {
                if (lora.dropout >= 1) value.error("must be below 1, not ", lora.dropout);
              })
              .takes({"number >= 0, below 1", R"({"type": "number", "minimum": 0, "exclusiveMaximum": 1})"})
              .means("of what goes into LoRA's products", also("lora_dropout"), Concerns::training)};
}

Key<Adapter> targets_key() {
  const auto read = [](Adapter& adapter, const Value& value) {
    adapter.targets.clear();
    if (value.node.is(Node::Kind::string)) {
      if (!value.text().empty()) adapter.targets.push_back(value.text());
      return;
    }
    value.expect(Node::Kind::array);
    for (std::size_t i = 0; i < value.node.items.size(); ++i) {
      const Value item = value.item(i);
      if (item.text().empty()) item.error("must be the name of a module, such as \"q_proj\", not \"\"");
      adapter.targets.push_back(item.text());
    }
  };
  return custom<Adapter>("targets", "[\"q_proj\", \"v_proj\"]", read,
                         [](const Adapter& adapter) { return list_of(adapter.targets); })
      .where(has_targets)
      .takes({"string, or list of strings",
              R"({"type": ["string", "array"], "items": {"type": "string", "minLength": 1}})"})
      .means(
          "modules that get an adapter: names as they are published, or ends of them (`\"q_proj\"`, "
          "`\"attn.c_proj\"`), or `\"all-linear\"`. Empty: PEFT's choice, `c_attn` of GPT-2 and `q_proj`, "
          "`v_proj` of the others; for IA³ `c_attn`, `mlp.c_proj`, and `k_proj`, `v_proj`, `down_proj`",
          also("target_modules"));
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

Key<Adapter> base_key() {
  return word<Adapter>(
             "base_dtype", {"compute", "int8"}, "\"int8\"",
             [](const Adapter& a) { return a.int8_base ? 1 : 0; },
             [](Adapter& a, int index) { a.int8_base = index == 1; })
      .means(
          "what the model's own weights are kept in: `\"compute\"`, the type that the run computes in; or "
          "`\"int8\"`, codes with a scale for every 64 of them, in the linear layers of blocks, a little "
          "more than half of bf16's bytes wherever they lie ([more](adapters.md#an-int8-base)). A checkpoint "
          "goes on with the value that it was saved with");
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
  if (!has_targets(adapter)) adapter.targets.clear();
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
  append(table.keys, {targets_key(), base_key()});
  append(table.keys, foreign_keys<A>("training.adapter"));
  table.keys.push_back(text("init_from", &A::init_from, "\"adapters/a\"")
                           .means("folder of an adapter to go on from: PEFT's (adapter_config.json and "
                                  "adapter_model.safetensors), AdapterHub's (with adapter.safetensors), or "
                                  "checkpoints of a run with an adapter. It brings this section, over which "
                                  "the file's own keys are laid; empty: the adapter begins as new"));
  return table;
}

}  // namespace

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

double LoraKeys::scale() const {
  const auto r = static_cast<double>(rank);
  return alpha / (rslora ? std::sqrt(r) : r);
}

std::string_view name_of(AdapterType type) {
  return type == AdapterType::none ? std::string_view() : adapter_types[static_cast<std::size_t>(type) - 1];
}

}  // namespace sherd::config
