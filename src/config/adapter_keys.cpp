#include <algorithm>
#include <array>
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
          "products, IA³'s factors, a prompt's vectors, plain or made by a network, or networks of few "
          "features in its blocks "
          "([more](adapters.md))"),
      {"rank", "of LoRA's products"},
      {"alpha", "LoRA's products are multiplied by `alpha` / `rank`"},
      {"use_rslora", "LoRA's products are multiplied by `alpha` / √`rank` instead"},
      {"dropout", "of what goes into LoRA's products"},
      {"virtual_tokens",
       "of each prompt, which stands in front of every text: `model.seq_length` counts them"},
      {"init",
       "of the prompt's vectors: `random`, normal(0, 1); `sample_vocab`, those of ids that `seed` draws; "
       "`text`, those of `init_text`"},
      {"init_text", "its tokens' vectors, repeated or cut to `virtual_tokens`, are the prompt's at first"},
      {"tasks",
       "prompts of their own for several tasks, over one frozen model: `{\"name\": NAME, \"init_text\": "
       "TEXT}`; "
       "each of `data.sources` names its `task`"},
      derived("encoder_hidden_size", "`model.hidden_size`", "width within the network of `p_tuning`"),
      {"encoder_reparameterization_type", "of that network"},
      {"mh_adapter", "`bottleneck` adapters behind attention"},
      {"output_adapter", "`bottleneck` adapters behind the feed-forward part"},
      {"reduction_factor", "the model's width divided by it is that of a `bottleneck`'s network"},
      derived("bottleneck_size", "`model.hidden_size` / `reduction_factor`", "features in a `bottleneck`"),
      {"non_linearity", "within; `gelu_new` is the tanh approximation of `gelu`"},
      {"scaling", "what a `bottleneck` gives is multiplied by it"},
      {"original_ln_before",
       "a `bottleneck` reads the stream that its part of the block was added to, not what the part gave"},
      {"original_ln_after", "the block's own norm runs behind a `bottleneck`"},
      {"residual_before_ln", "a `bottleneck` adds the stream from in front of that norm"},
      {"is_parallel", "a `bottleneck` reads what its part of the block reads"},
      {"use_gating", "a learned factor for what a `bottleneck` gives"},
      {"ln_before", "a norm of its own in front of a `bottleneck`"},
      {"ln_after", "a norm of its own behind it"},
      {"name", "what AdapterHub's files call the adapter"},
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
      {"load_in_8bit", "bitsandbytes' name of a base in 8 bits"},
      {"load_in_4bit", "its base in 4 bits"},
      {"use_dora", "PEFT's DoRA"},
      {"bias", "PEFT's training of biases"},
      {"modules_to_save", "PEFT's training of whole modules"},
      {"init_from",
       "folder of an adapter to go on from: PEFT's (adapter_config.json and adapter_model.safetensors), "
       "AdapterHub's (with adapter.safetensors), or checkpoints of a run with an adapter. It brings this "
       "section, over which the file's own keys are laid; empty: the adapter begins as new"},
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

Table<LoraKeys> lora_table() {
  using L = LoraKeys;
  Table<L> table;
  table.keys.push_back(integer("rank", &L::rank, "16", 1, most_adapter_rank).alias("r"));
  table.keys.push_back(real("alpha", &L::alpha, "32", 0, infinity, true).alias("lora_alpha"));
  table.keys.push_back(boolean("use_rslora", &L::rslora));
  table.keys.push_back(custom<L>("dropout", "0.05",
                                 [](L& lora, const Value& value) {
                                   lora.dropout = value.real(0);
                                   if (lora.dropout >= 1) value.error("must be below 1, not ", lora.dropout);
                                 })
                           .alias("lora_dropout")
                           .takes("number >= 0, below 1"));
  return table;
}

const std::vector<std::string> types{"lora", "ia3", "prompt_tuning", "p_tuning", "bottleneck"};

Table<Adapter> adapter_table() {
  using A = Adapter;
  Table<A> table;
  table.keys.push_back(custom<A>("type", "\"lora\"", [](A& adapter, const Value& value) {
                         adapter.type = static_cast<AdapterType>(1 + value.choice(types));
                       }).one_of(types));
  for (Key<LoraKeys>& key : lora_table().keys) table.keys.push_back(inside(&A::lora, std::move(key)));
  for (Key<PromptKeys>& key : prompt_keys()) table.keys.push_back(inside(&A::prompt, std::move(key)));
  for (Key<BottleneckKeys>& key : bottleneck_keys())
    table.keys.push_back(inside(&A::bottleneck, std::move(key)));
  table.keys.push_back(custom<A>("targets", "[\"q_proj\", \"v_proj\"]", read_targets)
                           .alias("target_modules")
                           .takes("string, or list of strings"));
  table.keys.push_back(custom<A>("base_dtype", "\"int8\"", [](A& adapter, const Value& value) {
                         adapter.int8_base = value.choice({"compute", "int8"}) == 1;
                       }).one_of({"compute", "int8"}));
  table.keys.push_back(
      refused<A>("load_in_8bit", "true", "write \"base_dtype\": \"int8\" for a base in 8 bits", is_false));
  // Of files that were written for PEFT, whose own switches are off.
  const auto off = [](const Value& value) { return is_off(value.node); };
  for (const auto& [name, example, why] :
       {std::array{"load_in_4bit", "true",
                   "a base is kept in 8 bits (\"base_dtype\": \"int8\") or as it computes"},
        std::array{"use_dora", "true", "adapters scale no norms of weights"},
        std::array{"bias", "\"all\"", "biases are the base's, which stays as it is"},
        std::array{"modules_to_save", "[\"lm_head\"]", "no module of the base is trained beside an adapter"}})
    table.keys.push_back(refused<A>(name, example, why, off));
  table.keys.push_back(text("init_from", &A::init_from, "\"adapters/a\""));
  describe(table.keys, adapter_texts());
  return table;
}

/// Whether adapters of that type have the key.
bool belongs(const std::string& key, AdapterType type) {
  const auto is_in = [&](const auto& keys) {
    return std::any_of(keys.begin(), keys.end(), [&](const auto& other) { return other.name == key; });
  };
  const bool prompt = type == AdapterType::prompt_tuning || type == AdapterType::p_tuning;
  if (key == "targets") return type == AdapterType::lora || type == AdapterType::ia3;
  if (is_in(lora_table().keys)) return type == AdapterType::lora;
  if (is_in(bottleneck_keys())) return type == AdapterType::bottleneck;
  return !is_in(prompt_keys()) || (prompt && has_prompt_key(type, key));
}

void read_adapter(Training& training, const Value& section) {
  const Given given = read_section(adapter_table(), training.adapter, section);
  if (!given.contains("type"))
    section.error(R"(needs a "type": "lora", "ia3", "prompt_tuning", "p_tuning" or "bottleneck")");
  Adapter& adapter = training.adapter;
  const Adapter read = adapter;
  for (const auto& [key, node] : given)
    if (!belongs(key, read.type))
      section.context.note(join(section.path, key), cat("no effect with type \"", name_of(read.type), "\""));
  if (!belongs("targets", read.type)) adapter.targets.clear();
  if (read.type != AdapterType::lora) adapter.lora = {};
  if (read.type == AdapterType::bottleneck)
    finish_bottleneck(adapter.bottleneck, given, section);
  else
    adapter.bottleneck = {};
  if (read.has_prompt())
    finish_prompt(adapter, given, section);
  else
    adapter.prompt = {};
}

}  // namespace

Key<Training> adapter_key() {
  Key<Training> key = custom<Training>("adapter", "{\"type\": \"lora\"}", read_adapter);
  key.list = [](const std::string& prefix, std::vector<KeyInfo>& out) {
    list_keys(adapter_table(), prefix, out);
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
  switch (type) {
    case AdapterType::lora:
      return "lora";
    case AdapterType::ia3:
      return "ia3";
    case AdapterType::prompt_tuning:
      return "prompt_tuning";
    case AdapterType::p_tuning:
      return "p_tuning";
    case AdapterType::bottleneck:
      return "bottleneck";
    case AdapterType::none:
      break;
  }
  return "";
}

}  // namespace sherd::config
