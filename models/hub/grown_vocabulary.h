#pragma once

#include <map>
#include <string>
#include <vector>

#include "models/gpt_config.h"
#include "nn/weight_source.h"

namespace sherd::models {

/// The weights of a model with more ids than their source has: the vectors of the new ones, in the table of
/// tokens and in the head, begin as the mean of all others', as transformers' resize_token_embeddings() has
/// it, which adds a noise of 1e-9 times their covariance.
class GrownVocabulary : public nn::ForwardedWeights {
 public:
  /// `from`: the model of `source`, which is `to` with fewer ids. `source` must outlive it. `device`: whose
  /// memory it reads through.
  GrownVocabulary(nn::WeightSource& source, const GptConfig& from, const GptConfig& to,
                  device::Device& device);
  void check(const std::vector<nn::ParameterPtr>& parameters) const override;
  void read(const std::string& name, const tensor::Slice& slice, std::int64_t begin,
            const tensor::Tensor& to) override;

 private:
  bool grows(const std::string& name) const;
  tensor::Shape shape_there(const std::string& name) const;
  const std::vector<float>& mean(const std::string& name);

  GptConfig from_, to_;
  device::Device& device_;
  std::map<std::string, std::vector<float>> means_;  ///< of the rows of each table
};

}  // namespace sherd::models
