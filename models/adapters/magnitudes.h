#pragma once

#include <string>
#include <vector>

#include "models/gpt_config.h"
#include "nn/weight_source.h"

// Norms of weights' rows, with which DoRA begins and by which it is merged.
namespace sherd::models {

/// Gives DoRA's magnitudes as they begin: the norms of the rows of the base's weights, as the run keeps
/// these. Has nothing else. `base` must outlive it.
class InitialMagnitudes : public nn::WeightSource {
 public:
  /// `config`: the model with its adapter. `device`: whose memory it reads through.
  InitialMagnitudes(nn::WeightSource& base, const GptConfig& config, device::Device& device)
      : base_(base), config_(config.resolved()), device_(device) {}
  void check(const std::vector<nn::ParameterPtr>&) const override {}
  bool has(const std::string& name) const override { return name.ends_with(".adapter.magnitude"); }
  void read(const std::string& name, const tensor::Slice& slice, std::int64_t begin,
            const tensor::Tensor& to) override;

 private:
  nn::WeightSource& base_;
  GptConfig config_;
  device::Device& device_;
  std::string layer_;            ///< whose norms were asked for last
  std::vector<float> of_layer_;  ///< of the rows of its targets
};

}  // namespace sherd::models
