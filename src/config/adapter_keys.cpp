#include <cmath>

#include "config/adapter.h"
#include "config/tables.h"

namespace sherd::config {
namespace {

std::vector<Text> adapter_texts() {
  return {
      required(
          "type",
          "what is trained beside the model, whose own weights stay as they are, to the bit: LoRA's low-rank "
          "products, or IA³'s factors ([more](adapters.md))"),
      {"rank", "of LoRA's products"},
      {"alpha", "LoRA's products are multiplied by `alpha` / `rank`"},
      {"use_rslora", "LoRA's products are multiplied by `alpha` / √`rank` instead"},
      {"dropout", "of what goes into LoRA's products"},
      {"targets",
       "modules that get an adapter: names as they are published, or ends of them (`\"q_proj\"`, "
       "`\"attn.c_proj\"`), or `\"all-linear\"`. Empty: PEFT's choice, `c_attn` of GPT-2 and `q_proj`, "
       "`v_proj` "
       "of the others; for IA³ `c_attn`, `mlp.c_proj`, and `k_proj`, `v_proj`, `down_proj`"},
      {"base_dtype",
       "what the model's own weights are kept in: `\"compute\"`, the type that the run computes in; or "
       "`\"int8\"`, codes with a scale for every 64 of them, in the linear layers of blocks, a little more "
       "than "
       "half of bf16's bytes wherever they lie ([more](adapters.md#an-int8-base)). A checkpoint goes on with "
       "the value that it was saved with"},
      {"init_from",
       "folder of an adapter to go on from: PEFT's (adapter_config.json and adapter_model.safetensors), or "
       "checkpoints of a run with an adapter. It brings this section, over which the file's own keys are "
       "laid; "
       "empty: LoRA's first product is drawn by `seed`, and the second is zero"},
  };
}

void read_targets(Adapter& adapter, const Value& value) {
  adapter.targets.clear();
  if (value.node.is(Node::Kind::string)) {
    if (!value.text().empty()) adapter.targets.push_back(value.text());
    return;
  }
  value.expect(Node::Kind::array);
  for (std::size_t i = 0; i < value.node.items.size(); ++i) {
    const Value item{value.node.items[i], cat(value.path, "[", i, "]"), value.context};
    if (item.text().empty()) item.error("must be the name of a module, such as \"q_proj\", not \"\"");
    adapter.targets.push_back(item.text());
  }
}

Table<Adapter> adapter_table() {
  using A = Adapter;
  Table<A> table;
  table.keys.push_back(custom<A>("type", "\"lora\"", [](A& adapter, const Value& value) {
                         adapter.type = static_cast<AdapterType>(1 + value.choice({"lora", "ia3"}));
                       }).one_of({"lora", "ia3"}));
  table.keys.push_back(integer("rank", &A::rank, "16", 1, most_adapter_rank).alias("r"));
  table.keys.push_back(real("alpha", &A::alpha, "32", 0, infinity, true).alias("lora_alpha"));
  table.keys.push_back(boolean("use_rslora", &A::rslora));
  table.keys.push_back(custom<A>("dropout", "0.05",
                                 [](A& adapter, const Value& value) {
                                   adapter.dropout = value.real(0);
                                   if (adapter.dropout >= 1)
                                     value.error("must be below 1, not ", adapter.dropout);
                                 })
                           .alias("lora_dropout")
                           .takes("number >= 0, below 1"));
  table.keys.push_back(custom<A>("targets", "[\"q_proj\", \"v_proj\"]", read_targets)
                           .alias("target_modules")
                           .takes("string, or list of strings"));
  table.keys.push_back(custom<A>("base_dtype", "\"int8\"", [](A& adapter, const Value& value) {
                         adapter.int8_base = value.choice({"compute", "int8"}) == 1;
                       }).one_of({"compute", "int8"}));
  table.keys.push_back(
      refused<A>("load_in_8bit", "true", "write \"base_dtype\": \"int8\" for a base in 8 bits", is_false));
  table.keys.push_back(text("init_from", &A::init_from, "\"adapters/a\""));
  describe(table.keys, adapter_texts());
  return table;
}

void read_adapter(Training& training, const Value& section) {
  const Given given = read_section(adapter_table(), training.adapter, section);
  if (!given.contains("type")) section.error("needs a \"type\": \"lora\" or \"ia3\"");
  if (training.adapter.type == AdapterType::lora) return;
  const Adapter read = training.adapter;
  training.adapter = {
      .type = read.type, .targets = read.targets, .int8_base = read.int8_base, .init_from = read.init_from};
  for (const char* key : {"rank", "alpha", "use_rslora", "dropout"})
    if (given.contains(key))
      section.context.note(join(section.path, key), "no effect: IA³ has factors alone");
}

}  // namespace

Key<Training> adapter_key() {
  Key<Training> key = custom<Training>("adapter", "{\"type\": \"lora\"}", read_adapter);
  key.list = [](const std::string& prefix, std::vector<KeyInfo>& out) {
    list_keys(adapter_table(), prefix, out);
  };
  return key;
}

double Adapter::scale() const {
  const auto r = static_cast<double>(rank);
  return alpha / (rslora ? std::sqrt(r) : r);
}

std::string_view name_of(AdapterType type) {
  switch (type) {
    case AdapterType::lora:
      return "lora";
    case AdapterType::ia3:
      return "ia3";
    case AdapterType::none:
      break;
  }
  return "";
}

}  // namespace sherd::config
