#pragma once

#include <memory>
#include <vector>

#include "device/device.h"
#include "models/gpt_config.h"
#include "nn/weight_source.h"

namespace sherd::models {

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
  std::vector<float> whole(const std::string& name, const tensor::Shape& shape);

  nn::WeightSource& source_;
  GptConfig config_;
  device::Device& device_;
  std::unique_ptr<Layer> layer_;  ///< whose parameter was asked for last
};

}  // namespace sherd::models
