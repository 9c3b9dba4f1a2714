#include "models/hub/adapter_names.h"

#include <algorithm>

#include "models/hub/adapter_config.h"
#include "models/hub/adapter_tables.h"
#include "models/hub/adapter_targets.h"

namespace sherd::models {

using config::AdapterType;
using tensor::Shape;

namespace {

constexpr const char* in_front = "base_model.model.";

/// PEFT's name of a tensor of a module's adapter.
PublishedTensor of_peft(const PublishedTensor& weight, const char* kind, Shape shape) {
  return {cat(in_front, module_of(weight), ".", kind), shape, false};
}

/// The outputs of a published weight.
std::int64_t outputs(const PublishedTensor& weight) {
  return weight.shape[weight.transposed ? 1 : 0];
}

/// The module in whose place PEFT has the adapter of a weight of all experts. Where both weights of a module
/// have one, the first one's lies within the other's.
std::string of_experts(const GptConfig& model, const std::string& layer, const PublishedTensor& weight) {
  const std::string module = weight.name.substr(0, weight.name.rfind('.'));
  const bool up = layer.ends_with(".up");
  const std::string down = cat(layer.substr(0, layer.rfind('.')), ".down");
  const AdaptedWeight other = up ? adapted_weight(model, down) : AdaptedWeight();
  const bool both = !other.tensors.empty() && other.weight.tensors[0].stacked > 0;
  return cat(in_front, module, both ? ".base_layer" : "");
}

}  // namespace

std::string adapter_stem(AdapterType type) {
  return type == AdapterType::bottleneck ? "adapter" : "adapter_model";
}

PublishedParameter published_prompt(const GptConfig& model, const std::string& kind) {
  require(kind == "prompt", "PEFT's files of prompts hold no '", kind, "'");
  const std::int64_t rows = model.adapter.prompt.prompts() * model.adapter.virtual_tokens();
  return {.tensors = {{"prompt_embeddings", {rows, model.hidden_size}}},
          .rows = {{0, rows, 0, 0}},
          .columns = model.hidden_size};
}

PublishedParameter published_rows(const GptConfig& model, const std::string& layer) {
  const std::vector<std::int64_t> ids = trained_tokens(model).of(layer);
  require(!ids.empty() && (layer == "tokens" || layer == "head"), "'", layer, "' has no rows of tokens");
  const std::int64_t rows = std::ssize(ids);
  const PublishedTensor table = HuggingFaceLayout(model).published(layer + ".weight").tensors[0];
  return {.tensors = {{cat(in_front, module_of(table), ".token_adapter.trainable_tokens_delta"),
                       {rows, model.hidden_size}}},
          .rows = {{0, rows, 0, 0}},
          .columns = model.hidden_size};
}

PublishedParameter published_bottleneck(const GptConfig& model, const std::string& block,
                                        const std::string& parameter) {
  const std::size_t end = parameter.find('_'), dot = parameter.find('.');
  require(end < dot && dot != std::string::npos, "no parameter of an adapter is called '", parameter, "'");
  const std::string part = parameter.substr(0, end), direction = parameter.substr(end + 1, dot - end - 1),
                    kind = parameter.substr(dot + 1);
  const bool goes_down = direction == "down";
  const config::BottleneckKeys& keys = model.adapter.bottleneck;
  const std::int64_t width = model.hidden_size, size = keys.width(width);
  const std::int64_t rows = goes_down ? size : width, columns = goes_down ? width : size;
  const std::string name = cat(block, part == "mlp" ? "output" : part, "_adapters.adapters.", keys.name,
                               goes_down ? ".adapter_down.0." : ".adapter_up.", kind);
  if (kind == "bias") return {.tensors = {{name, {rows}}}, .rows = {{0, rows, 0, 0}}};
  return {.tensors = {{name, {rows, columns}}}, .rows = {{0, rows, 0, 0}}, .columns = columns};
}

PublishedParameter published_adapter(const GptConfig& model, const std::string& layer,
                                     const std::string& kind) {
  const auto [weight, tensors, of_inputs, r, scale] = adapted_weight(model, layer);
  require(!tensors.empty(), "'", layer, "' has no adapter");
  PublishedParameter out;
  const PublishedTensor& first = weight.tensors[static_cast<std::size_t>(tensors[0])];
  const bool among_experts = first.stacked > 0;
  // PEFT's A's of all experts lie behind each other, and in each row of B their columns take turns.
  const auto lora = [&](const PublishedTensor& tensor, const char* which, Shape shape) {
    if (!among_experts) return of_peft(tensor, which, std::move(shape));
    PublishedTensor made{cat(of_experts(model, layer, tensor), ".", which), std::move(shape)};
    made.place = tensor.place, made.stacked = tensor.stacked;
    made.stack = kind == "lora_A" ? PublishedTensor::Stack::rows : PublishedTensor::Stack::columns;
    return made;
  };
  if (kind == "lora_A" || (kind == "ia3" && of_inputs)) {
    const bool is_lora = kind == "lora_A";
    out.columns = is_lora ? weight.columns : 1;
    for (const int i : tensors) {
      const PublishedTensor& tensor = weight.tensors[static_cast<std::size_t>(i)];
      const std::int64_t rows = is_lora ? r : weight.columns;
      out.rows.push_back({rows * std::ssize(out.tensors), rows, static_cast<int>(out.tensors.size()), 0});
      out.tensors.push_back(is_lora ? lora(tensor, "lora_A.weight", {r, weight.columns})
                                    : of_peft(tensor, "ia3_l", {1, weight.columns}));
    }
    return out;
  }
  require(kind == "lora_B" || kind == "ia3" || kind == "magnitude", "no parameter of an adapter is called '",
          kind, "'");
  out.columns = kind == "lora_B" ? r : 1;
  std::vector<int> place(weight.tensors.size(), -1);
  for (const int i : tensors) {
    const PublishedTensor& tensor = weight.tensors[static_cast<std::size_t>(i)];
    place[static_cast<std::size_t>(i)] = static_cast<int>(out.tensors.size());
    out.tensors.push_back(kind == "lora_B" ? lora(tensor, "lora_B.weight", {outputs(tensor), r})
                          : kind == "ia3"  ? of_peft(tensor, "ia3_l", {outputs(tensor), 1})
                                           : of_peft(tensor, "lora_magnitude_vector", {outputs(tensor)}));
  }
  std::int64_t row = 0;
  for (const PublishedParameter::RowRun& run : weight.rows) {
    if (run.tensor < 0 || place[static_cast<std::size_t>(run.tensor)] < 0) continue;
    out.rows.push_back({row, run.rows, place[static_cast<std::size_t>(run.tensor)], run.tensor_row});
    row += run.rows;
  }
  return out;
}

namespace {

/// A module that can have an adapter.
struct Adaptable {
  std::string name;
  bool chosen, of_inputs, of_expert;
};

/// The shortest name of a module in all blocks, and of all experts.
std::string shortest_name(const Adaptable& module) {
  return module.of_expert ? module.name.substr(module.name.rfind('.') + 1) : short_name(module.name);
}

/// The modules with an adapter by names that PEFT takes for these alone; whole ones where short ones name
/// others, too. `feedforward`: those of them that IA³ takes at their input.
std::vector<std::string> target_names(const GptConfig& model, const std::vector<Adaptable>& modules,
                                      std::vector<std::string>& feedforward) {
  const auto others_are_called = [&](const std::string& name) {
    return std::any_of(modules.begin(), modules.end(), [&](const Adaptable& module) {
      return !module.chosen && is_target_of(module.name, name);
    });
  };
  std::vector<std::string> out;
  const auto append = [&](const Adaptable& module, std::string name) {
    if (std::find(out.begin(), out.end(), name) != out.end()) return;
    if (module.of_inputs) feedforward.push_back(name);
    out.push_back(std::move(name));
  };
  for (const Adaptable& module : modules) {
    if (!module.chosen) continue;
    std::string name = shortest_name(module);
    if (others_are_called(name)) name = numbered(module.name).second;
    if (!model.has_encoder() && others_are_called(name)) {
      out.clear(), feedforward.clear();
      for (const Adaptable& each : modules)
        if (each.chosen) append(each, each.name);
      return out;
    }
    append(module, std::move(name));
  }
  return out;
}

}  // namespace

std::string adapter_config(const config::Adapter& adapter, const GptConfig& model, const std::string& base) {
  if (adapter.type == AdapterType::bottleneck)
    return to_adapter_hub(adapter, model.hidden_size, family_of(model.type).name, base);
  if (adapter.has_prompt())
    return to_peft(adapter, {model.hidden_size, model.num_layers, model.num_heads, base});
  std::vector<Adaptable> modules;  // in the blocks that may have one
  const std::vector<std::int64_t>& layers = model.adapter.lora.layers;
  bool transposed = false;
  bool of_experts = false;
  for_each_adaptable(model, Layers::all, [&](const std::string& layer, const AdaptedWeight& of) {
    const bool of_expert = is_of_expert(layer);
    of_experts = of_experts || (of_expert && !of.tensors.empty());
    for (std::size_t i = 0; i < of.weight.tensors.size(); ++i) {
      const PublishedTensor& tensor = of.weight.tensors[i];
      if (tensor.stacked > 0) continue;
      transposed = transposed || tensor.transposed;
      const std::string name = module_of(tensor);
      if (!layers.empty() && !std::binary_search(layers.begin(), layers.end(), numbered(name).first))
        continue;
      const bool chosen =
          std::find(of.tensors.begin(), of.tensors.end(), static_cast<int>(i)) != of.tensors.end();
      modules.push_back({name, chosen, of.of_inputs, of_expert});
    }
  });
  config::Adapter written = adapter;
  written.exclude.clear();                   // names say it
  if (of_experts) written.lora.dropout = 0;  // PEFT takes no other beside adapters of experts
  std::vector<std::string> feedforward;
  const std::vector<std::string> targets = target_names(model, modules, feedforward);
  if (model.tied() && !saved_parameters(model).empty()) {  // by this name PEFT keeps both as one
    const std::string head = HuggingFaceLayout(model).head();
    written.modules_to_save = {head.substr(0, head.rfind('.'))};
  }
  return to_peft(written, targets, feedforward, transposed, base, model.tied(),
                 !model.causal           ? ""
                 : model.has_encoder()   ? "SEQ_2_SEQ_LM"
                 : model.gives_rewards() ? "SEQ_CLS"
                                         : "CAUSAL_LM");
}

}  // namespace sherd::models
