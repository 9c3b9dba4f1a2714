#pragma once

#include <memory>
#include <string>
#include <vector>

#include "models/gpt_config.h"
#include "nn/weight_source.h"
#include "sharding/parallel/adapters/adapters.h"
#include "sharding/parallel/adapters/bottleneck.h"
#include "sharding/parallel/adapters/prompts.h"
#include "sharding/parallel/adapters/token_rows.h"

// Adapters of Gpt's layers, as its modules; models/hub/adapter_names.h says where they are in published
// files.
namespace sherd::models {

/// Whether a parameter of Gpt is an adapter's: "blocks.0.attention.qkv.adapter.lora_A".
bool is_adapter(const std::string& parameter);

/// The parameters of a model's adapter, and those called `saved`.
std::vector<nn::ParameterPtr> adapter_parameters(const std::vector<nn::ParameterPtr>& all,
                                                 const std::vector<std::string>& saved = {});

/// The adapter of the layer with that path ("blocks.0.attention.qkv"), which `layer` describes but for its
/// targets; null where it has none.
std::shared_ptr<parallel::LinearAdapter> make_adapter(const GptConfig& config, const std::string& path,
                                                      parallel::AdaptedLayer layer,
                                                      const parallel::Layout& layout);

/// The networks in a block; null where it has none.
std::shared_ptr<parallel::Bottlenecks> make_bottlenecks(const GptConfig& config,
                                                        const parallel::Layout& layout);

/// The prompts of the model's embeddings; null where it has none.
std::shared_ptr<parallel::Prompts> make_prompts(const GptConfig& config, const parallel::Layout& layout);

/// The rows of tokens that are trained: of the table, and of the head where that has some; null: none.
struct TrainedTokens {
  std::shared_ptr<parallel::TokenRows> of_table, of_head;
};
/// Makes the rows of both; where table and head are tied, they are one parameter.
TrainedTokens make_token_rows(const GptConfig& config, const parallel::Layout& layout);

/// Width of p-tuning's network.
std::int64_t encoder_width(const GptConfig& config);

/// A model's weights: those of adapters come from `adapter`, all others from `base`. With `adapter` null,
/// adapters keep the values that they were drawn with. Both must outlive it.
class WithAdapter : public nn::ForwardedWeights {
 public:
  /// `saved`: parameters of the model itself that the adapter's files have, too (saved_parameters()).
  WithAdapter(nn::WeightSource& base, nn::WeightSource* adapter, std::vector<std::string> saved = {})
      : ForwardedWeights(base), adapter_(adapter), saved_(std::move(saved)) {}
  void check(const std::vector<nn::ParameterPtr>& parameters) const override;
  bool has(const std::string& name) const override;
  void read(const std::string& name, const tensor::Slice& slice, std::int64_t begin,
            const tensor::Tensor& to) override;

 private:
  bool of_adapter(const std::string& name) const;

  nn::WeightSource* adapter_;
  std::vector<std::string> saved_;
};

/// The weights of a model without adapters that computes what `source`'s computes with them: W + scale·B·A of
/// LoRA, and rows or columns times IA³'s factors, in fp32. `source` must outlive it.
class MergedWeights : public nn::WeightSource {
 public:
  /// `config`: the model with its adapters.
  MergedWeights(nn::WeightSource& source, const GptConfig& config, device::Device& device);
  ~MergedWeights() override;
  void check(const std::vector<nn::ParameterPtr>& parameters) const override;
  void read(const std::string& name, const tensor::Slice& slice, std::int64_t begin,
            const tensor::Tensor& to) override;
  std::map<std::string, std::vector<float>> step_states() const override { return source_.step_states(); }

 private:
  struct Layer;
  const Layer* layer_of(const std::string& name);
  void find_norms(Layer& layer, std::int64_t rows);
  std::vector<float> whole(const std::string& name, const tensor::Shape& shape);
  void put_rows(const std::string& name, std::int64_t begin, const tensor::Tensor& to);

  nn::WeightSource& source_;
  GptConfig config_;
  device::Device& device_;
  std::unique_ptr<Layer> layer_;                     ///< the layer whose parameter was asked for last
  std::pair<std::string, std::vector<float>> rows_;  ///< trained rows of the table that was asked for last
};

}  // namespace sherd::models
