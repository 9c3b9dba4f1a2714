#pragma once

#include <memory>
#include <string>
#include <vector>

#include "models/hub/hugging_face.h"
#include "nn/weight_source.h"
#include "sharding/parallel/adapters/adapters.h"
#include "sharding/parallel/adapters/bottleneck.h"
#include "sharding/parallel/adapters/prompts.h"

// Adapters of Gpt's layers, by the modules as which these are published: a weight that packs several gets
// what PEFT gives each of them.
namespace sherd::models {

/// Whether a parameter of Gpt is an adapter's: "blocks.0.attention.qkv.adapter.lora_A".
bool is_adapter(const std::string& parameter);

/// The stem of the files' names in which adapters of a type are published: PEFT's, or AdapterHub's.
std::string adapter_stem(config::AdapterType type);

/// What the adapter trains, and what stays as it is, of a model's parameters.
std::vector<nn::ParameterPtr> adapter_parameters(const std::vector<nn::ParameterPtr>& all);
std::vector<nn::ParameterPtr> base_parameters(const std::vector<nn::ParameterPtr>& all);

/// The options that `adapter` asks of the resolved model `options`, published as `family`. Throws
/// Error{config} for targets that there are not, with a list of those that there are.
AdapterOptions adapter_options(const config::Adapter& adapter, const GptOptions& options,
                               config::ModelType family);

/// The adapter of part `part` of a block ("attention.qkv"), whose weight is [out, in]; null where it has
/// none.
std::shared_ptr<parallel::LinearAdapter> make_adapter(const GptOptions& options, const std::string& part,
                                                      const tensor::Shape& weight,
                                                      parallel::AdaptedLayer::Cut cut,
                                                      const parallel::Layout& layout,
                                                      std::vector<std::int64_t> blocks = {});

/// The networks in a block; null where it has none.
std::shared_ptr<parallel::Bottlenecks> make_bottlenecks(const GptOptions& options,
                                                        const parallel::Layout& layout);

/// The prompts of the model's embeddings; null where it has none.
std::shared_ptr<parallel::Prompts> make_prompts(const GptOptions& options, const parallel::Layout& layout);

/// Where PEFT has a parameter of prompts, "prompt". Throws Error{usage} for another kind: of p-tuning's
/// network PEFT keeps nothing.
PublishedParameter published_prompt(const GptOptions& options, const std::string& kind);

/// Where AdapterHub has a parameter of the networks in a block, "mlp_down.weight"; `block`: the block's own
/// prefix, "model.layers.0.".
PublishedParameter published_bottleneck(const GptOptions& options, const std::string& block,
                                        const std::string& parameter);

/// Where PEFT has an adapter's parameter `kind` ("lora_A", "lora_B", "ia3") of a layer with the published
/// weight `weight`; `of_inputs`: IA³ multiplies what goes in. Throws Error{usage} for another kind.
PublishedParameter published_adapter(const AdapterOptions& options, const PublishedParameter& weight,
                                     const std::string& kind, bool of_inputs);

/// The text of PEFT's adapter_config.json for the model; `base`: what it is an adapter of, or empty.
std::string peft_config(const config::Adapter& adapter, const GptOptions& options, const std::string& base);

/// A model's weights, of which some come from `base` and those of adapters from `adapter`; null: it has none,
/// and they keep the values that they were drawn with. Both must outlive it.
class WithAdapter : public nn::WeightSource {
 public:
  WithAdapter(nn::WeightSource& base, nn::WeightSource* adapter) : base_(base), adapter_(adapter) {}
  void check(const std::vector<nn::ParameterPtr>& parameters) const override;
  bool has(const std::string& name) const override;
  void read(const std::string& name, const tensor::Slice& slice, std::int64_t begin,
            const tensor::Tensor& to) override;
  std::map<std::string, std::vector<float>> step_states() const override { return base_.step_states(); }

 private:
  nn::WeightSource& base_;
  nn::WeightSource* adapter_;
};

/// A layer's published weight and which of its tensors have an adapter.
struct AdaptedWeight {
  PublishedParameter weight;
  std::vector<int> tensors;  ///< none: the layer has no adapter
  bool of_inputs = false;    ///< IA³ multiplies what goes in
};
/// Of the layer with that path, "blocks.0.attention.qkv"; no tensors for what is no linear layer of a block.
AdaptedWeight adapted_weight(const GptOptions& options, const std::string& layer);

}  // namespace sherd::models
