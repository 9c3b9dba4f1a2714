#include "models/adapters/adapters.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>

#include "autograd/ops.h"

namespace sherd::models {

using config::AdapterType;
using tensor::Range;
using tensor::Shape;

namespace {

using Function = autograd::Var (*)(const autograd::Var&);

Function function_of(config::NonLinearity kind) {
  using autograd::Var;
  switch (kind) {
    case config::NonLinearity::swish:
      return [](const Var& x) { return autograd::multiply(x, autograd::sigmoid(x)); };
    case config::NonLinearity::relu:
      return [](const Var& x) { return autograd::relu(x); };
    case config::NonLinearity::gelu:
      return [](const Var& x) { return autograd::activation(x, tensor::Activation::gelu_erf); };
    case config::NonLinearity::gelu_new:
      return [](const Var& x) { return autograd::gelu(x); };
    case config::NonLinearity::tanh:
      return [](const Var& x) { return autograd::tanh(x); };
  }
  fail(ErrorKind::usage, "an unknown non-linearity");
}

constexpr const char* marker = ".adapter.";
constexpr const char* down = "mlp.down";

/// "model.layers.0.self_attn.q_proj" of the published weight.
std::string module_of(const PublishedTensor& tensor) {
  return tensor.name.substr(0, tensor.name.rfind('.'));
}

bool matches(const std::string& module, const std::string& target) {
  return target == "all-linear" || module == target || module.ends_with("." + target);
}

bool is_chosen(const AdapterOptions& options, const PublishedTensor& tensor) {
  return std::any_of(options.targets.begin(), options.targets.end(),
                     [&](const std::string& target) { return matches(module_of(tensor), target); });
}

/// Of a published weight the tensors that have an adapter.
std::vector<int> chosen(const AdapterOptions& options, const PublishedParameter& weight) {
  std::vector<int> out;
  for (std::size_t i = 0; i < weight.tensors.size(); ++i)
    if (is_chosen(options, weight.tensors[i])) out.push_back(static_cast<int>(i));
  return out;
}

/// The parts of a block that can have an adapter.
std::vector<std::string> parts_of(const GptOptions& options) {
  std::vector<std::string> out{"attention.qkv", "attention.projection"};
  if (options.experts.count == 0) out.insert(out.end(), {"mlp.up", down});
  return out;
}

PublishedParameter weight_of(const HuggingFaceLayout& layout, const std::string& part,
                             const std::string& block = "0") {
  return layout.published(cat("blocks.", block, ".", part, ".weight"));
}

/// What is behind the block's number: "self_attn.q_proj".
std::string short_name(const std::string& module) {
  const std::size_t block = module.find(".0.");
  return module.substr(block + 3);
}

/// The number of the block that a target's name has, and what is behind it; -1: none has one.
std::pair<std::int64_t, std::string> numbered(const std::string& target) {
  for (std::size_t begin = 0; begin < target.size();) {
    const std::size_t end = std::min(target.find('.', begin), target.size());
    const std::string word = target.substr(begin, end - begin);
    const bool number = !word.empty() && word.size() < 9 &&
                        std::all_of(word.begin(), word.end(), [](char c) { return c >= '0' && c <= '9'; });
    if (number && end < target.size()) return {std::stoll(word), target.substr(end + 1)};
    begin = end + 1;
  }
  return {-1, target};
}

/// Targets without the numbers of blocks, by which PEFT writes out what "all-linear" meant. Throws where
/// these are not all blocks.
std::vector<std::string> of_all_blocks(const std::vector<std::string>& targets, std::int64_t blocks) {
  std::vector<std::string> out;
  std::map<std::string, std::set<std::int64_t>> seen;
  for (const std::string& target : targets) {
    const auto [block, name] = numbered(target);
    if (block < 0)
      out.push_back(name);
    else
      seen[name].insert(block);
  }
  for (const auto& [name, at] : seen) {
    if (std::ssize(at) != blocks || *at.rbegin() != blocks - 1)
      fail(ErrorKind::config, "training.adapter.targets: ", name, " has an adapter in ", at.size(),
           " of the ", blocks,
           " blocks, and adapters are in all of them here: name it without a block's number");
    out.push_back(name);
  }
  return out;
}

std::vector<std::string> defaults(AdapterType type, config::ModelType family, bool experts) {
  const bool gpt2 = family == config::ModelType::gpt2;
  if (type == AdapterType::lora)
    return gpt2 ? std::vector<std::string>{"c_attn"} : std::vector<std::string>{"q_proj", "v_proj"};
  if (gpt2) return {"c_attn", "mlp.c_proj"};
  if (experts) return {"k_proj", "v_proj"};
  return {"k_proj", "v_proj", "down_proj"};
}

void check_targets(const AdapterOptions& options, const GptOptions& model, const HuggingFaceLayout& layout) {
  std::vector<std::string> modules;
  for (const std::string& part : parts_of(model))
    for (const PublishedTensor& tensor : weight_of(layout, part).tensors)
      modules.push_back(module_of(tensor));
  std::string there;
  for (const std::string& module : modules) there += cat(there.empty() ? "" : ", ", short_name(module));
  const bool experts = model.experts.count > 0;
  for (const std::string& target : options.targets) {
    const bool found = std::any_of(modules.begin(), modules.end(),
                                   [&](const std::string& module) { return matches(module, target); });
    if (found && !(experts && target == "all-linear")) continue;
    std::vector<std::string> names{"all-linear"};
    for (const std::string& module : modules) names.push_back(short_name(module));
    const std::string close = target == "all-linear" ? "" : nearest(target, names);
    fail(ErrorKind::config,
         "training.adapter.targets: ", target == "all-linear" ? "" : "no module is called ", "'", target, "'",
         close.empty() ? "" : cat(" (did you mean '", close, "'?)"),
         target == "all-linear" ? " would be experts' weights too, which have no adapters yet: " : "; ",
         "there are ", there,
         experts && target != "all-linear" ? " (experts' weights have no adapters yet)" : "");
  }
}

}  // namespace

bool is_adapter(const std::string& parameter) {
  return parameter.find(marker) != std::string::npos;
}

std::string adapter_stem(AdapterType type) {
  return type == AdapterType::bottleneck ? "adapter" : "adapter_model";
}

std::vector<nn::ParameterPtr> adapter_parameters(const std::vector<nn::ParameterPtr>& all) {
  std::vector<nn::ParameterPtr> out;
  std::copy_if(all.begin(), all.end(), std::back_inserter(out),
               [](const auto& p) { return is_adapter(p->name); });
  return out;
}

std::vector<nn::ParameterPtr> base_parameters(const std::vector<nn::ParameterPtr>& all) {
  std::vector<nn::ParameterPtr> out;
  std::copy_if(all.begin(), all.end(), std::back_inserter(out),
               [](const auto& p) { return !is_adapter(p->name); });
  return out;
}

AdapterOptions adapter_options(const config::Adapter& adapter, const GptOptions& options,
                               config::ModelType family) {
  AdapterOptions out;
  out.type = adapter.type;
  if (adapter.type == AdapterType::none) return out;
  out.family = family;
  out.int8_base = adapter.int8_base;
  if (adapter.has_prompt()) {
    const config::PromptKeys& prompt = adapter.prompt;
    out.virtual_tokens = prompt.virtual_tokens, out.prompts = prompt.prompts();
    if (adapter.type == AdapterType::p_tuning)
      out.encoder_hidden = prompt.encoder_hidden_size > 0 ? prompt.encoder_hidden_size : options.hidden;
    return out;
  }
  if (adapter.type == AdapterType::bottleneck) {
    const config::BottleneckKeys& keys = adapter.bottleneck;
    out.bottleneck = {.width = options.hidden,
                      .size = keys.width(options.hidden),
                      .non_linearity = function_of(keys.non_linearity),
                      .scale = keys.scale,
                      .attention = keys.attention,
                      .mlp = keys.mlp,
                      .of_sum = keys.of_sum};
    out.name = keys.name;
    return out;
  }
  out.rank = adapter.lora.rank, out.scale = adapter.lora.scale();
  out.dropout = static_cast<float>(adapter.lora.dropout);
  out.targets = of_all_blocks(adapter.targets, options.layers);
  if (out.targets.empty()) out.targets = defaults(adapter.type, family, options.experts.count > 0);
  check_targets(out, options, HuggingFaceLayout(options, family));
  return out;
}

std::shared_ptr<parallel::LinearAdapter> make_adapter(const GptOptions& options, const std::string& part,
                                                      const Shape& weight, parallel::AdaptedLayer::Cut cut,
                                                      const parallel::Layout& layout,
                                                      std::vector<std::int64_t> blocks) {
  const AdapterOptions& adapter = options.adapter;
  if (adapter.targets.empty()) return nullptr;
  const PublishedParameter published = weight_of(HuggingFaceLayout(options, adapter.family), part);
  parallel::AdaptedLayer layer{cut, weight[1], weight[0], {}, std::move(blocks)};
  for (const int tensor : chosen(adapter, published)) {
    std::vector<Range> rows;
    for (const PublishedParameter::Rows& run : published.rows)
      if (run.tensor == tensor) rows.push_back({run.row, run.row + run.rows});
    layer.targets.push_back(std::move(rows));
  }
  if (layer.targets.empty()) return nullptr;
  if (adapter.type == AdapterType::ia3)
    return std::make_shared<parallel::Ia3>(std::move(layer), part == down, layout);
  return std::make_shared<parallel::Lora>(
      std::move(layer), parallel::LoraOptions{adapter.rank, adapter.scale, adapter.dropout}, layout);
}

std::shared_ptr<parallel::Bottlenecks> make_bottlenecks(const GptOptions& options,
                                                        const parallel::Layout& layout) {
  if (options.adapter.type != AdapterType::bottleneck) return nullptr;
  return std::make_shared<parallel::Bottlenecks>(options.adapter.bottleneck, layout);
}

std::shared_ptr<parallel::Prompts> make_prompts(const GptOptions& options, const parallel::Layout& layout) {
  const AdapterOptions& adapter = options.adapter;
  if (adapter.virtual_tokens == 0) return nullptr;
  const parallel::PromptOptions prompts{options.padded_vocab(), adapter.prompts * adapter.virtual_tokens,
                                        options.hidden};
  if (adapter.type == AdapterType::p_tuning)
    return std::make_shared<parallel::PromptEncoder>(prompts, adapter.encoder_hidden, layout);
  return std::make_shared<parallel::Prompts>(prompts, layout);
}

PublishedParameter published_prompt(const GptOptions& options, const std::string& kind) {
  require(kind == "prompt", "PEFT's files of prompts hold no '", kind, "'");
  const std::int64_t rows = options.adapter.prompts * options.adapter.virtual_tokens;
  return {.tensors = {{"prompt_embeddings", {rows, options.hidden}}},
          .rows = {{0, rows, 0, 0}},
          .columns = options.hidden};
}

PublishedParameter published_bottleneck(const GptOptions& options, const std::string& block,
                                        const std::string& parameter) {
  const std::size_t end = parameter.find('_'), dot = parameter.find('.');
  require(end < dot && dot != std::string::npos, "no parameter of an adapter is called '", parameter, "'");
  const std::string part = parameter.substr(0, end), way = parameter.substr(end + 1, dot - end - 1),
                    kind = parameter.substr(dot + 1);
  const bool goes_down = way == "down";
  const parallel::BottleneckOptions& o = options.adapter.bottleneck;
  const std::int64_t rows = goes_down ? o.size : o.width, columns = goes_down ? o.width : o.size;
  const std::string name = cat(block, part == "mlp" ? "output" : part, "_adapters.adapters.",
                               options.adapter.name, goes_down ? ".adapter_down.0." : ".adapter_up.", kind);
  if (kind == "bias") return {.tensors = {{name, {rows}}}, .rows = {{0, rows, 0, 0}}};
  return {.tensors = {{name, {rows, columns}}}, .rows = {{0, rows, 0, 0}}, .columns = columns};
}

namespace {

/// PEFT's name of a tensor of a module's adapter.
PublishedTensor of_peft(const PublishedTensor& weight, const char* kind, Shape shape) {
  return {cat("base_model.model.", module_of(weight), ".", kind), shape, false};
}

/// The outputs of a published weight.
std::int64_t outputs(const PublishedTensor& weight) {
  return weight.shape[weight.transposed ? 1 : 0];
}

}  // namespace

PublishedParameter published_adapter(const AdapterOptions& options, const PublishedParameter& weight,
                                     const std::string& kind, bool of_inputs) {
  const std::vector<int> tensors = chosen(options, weight);
  const std::int64_t r = options.rank;
  PublishedParameter out;
  if (kind == "lora_A" || (kind == "ia3" && of_inputs)) {
    const bool lora = kind == "lora_A";
    out.columns = lora ? weight.columns : 1;
    for (const int i : tensors) {
      const PublishedTensor& tensor = weight.tensors[static_cast<std::size_t>(i)];
      const std::int64_t rows = lora ? r : weight.columns;
      out.rows.push_back({rows * std::ssize(out.tensors), rows, static_cast<int>(out.tensors.size()), 0});
      out.tensors.push_back(lora ? of_peft(tensor, "lora_A.weight", {r, weight.columns})
                                 : of_peft(tensor, "ia3_l", {1, weight.columns}));
    }
    return out;
  }
  require(kind == "lora_B" || kind == "ia3", "no parameter of an adapter is called '", kind, "'");
  out.columns = kind == "lora_B" ? r : 1;
  std::vector<int> place(weight.tensors.size(), -1);
  for (const int i : tensors) {
    const PublishedTensor& tensor = weight.tensors[static_cast<std::size_t>(i)];
    place[static_cast<std::size_t>(i)] = static_cast<int>(out.tensors.size());
    out.tensors.push_back(kind == "lora_B" ? of_peft(tensor, "lora_B.weight", {outputs(tensor), r})
                                           : of_peft(tensor, "ia3_l", {outputs(tensor), 1}));
  }
  std::int64_t row = 0;
  for (const PublishedParameter::Rows& run : weight.rows) {
    if (run.tensor < 0 || place[static_cast<std::size_t>(run.tensor)] < 0) continue;
    out.rows.push_back({row, run.rows, place[static_cast<std::size_t>(run.tensor)], run.tensor_row});
    row += run.rows;
  }
  return out;
}

std::string peft_config(const config::Adapter& adapter, const GptOptions& options, const std::string& base) {
  if (adapter.type == AdapterType::bottleneck)
    return config::to_adapter_hub(adapter, options.hidden,
                                  std::string(config::name_of(options.adapter.family)), base);
  if (adapter.has_prompt())
    return config::to_peft(adapter, {options.hidden, options.layers, options.heads, base});
  const HuggingFaceLayout layout(options, options.adapter.family);
  std::vector<std::string> targets, feedforward;
  bool transposed = false;
  for (const std::string& part : parts_of(options))
    for (const PublishedTensor& tensor : weight_of(layout, part).tensors) {
      if (!is_chosen(options.adapter, tensor)) continue;
      targets.push_back(short_name(module_of(tensor)));
      if (part == down) feedforward.push_back(targets.back());
      transposed = transposed || tensor.transposed;
    }
  return config::to_peft(adapter, targets, feedforward, transposed, base);
}

void WithAdapter::check(const std::vector<nn::ParameterPtr>& parameters) const {
  base_.check(base_parameters(parameters));
  if (adapter_) adapter_->check(adapter_parameters(parameters));
}

bool WithAdapter::has(const std::string& name) const {
  return !is_adapter(name) || adapter_;
}

void WithAdapter::read(const std::string& name, const tensor::Slice& slice, std::int64_t begin,
                       const tensor::Tensor& to) {
  (is_adapter(name) ? *adapter_ : base_).read(name, slice, begin, to);
}

AdaptedWeight adapted_weight(const GptOptions& options, const std::string& layer) {
  AdaptedWeight out;
  const std::size_t block = std::strlen("blocks.");
  const std::size_t dot = layer.starts_with("blocks.") ? layer.find('.', block) : std::string::npos;
  if (dot == std::string::npos) return out;
  const std::string part = layer.substr(dot + 1);
  const std::vector<std::string> parts = parts_of(options);
  if (std::find(parts.begin(), parts.end(), part) == parts.end()) return out;
  out.weight =
      weight_of(HuggingFaceLayout(options, options.adapter.family), part, layer.substr(block, dot - block));
  out.tensors = chosen(options.adapter, out.weight);
  out.of_inputs = part == down;
  return out;
}

}  // namespace sherd::models
