#pragma once

#include <string>
#include <vector>

#include "models/gpt_config.h"
#include "nn/weight_source.h"

// Where the vectors of a prompt come from, beside files and chance.
namespace sherd::models {

/// Gpt's parameter that holds them.
inline constexpr const char* prompt_parameter = "tokens.adapter.prompt";

/// Gives the vectors of a prompt, in fp32, as prompt_parameter; all else is another source's.
class PromptSource : public nn::ForwardedWeights {
 public:
  void read(const std::string& name, const tensor::Slice& slice, std::int64_t begin,
            const tensor::Tensor& to) override;

 protected:
  /// Both must outlive it. `device`: whose memory it reads through.
  PromptSource(nn::WeightSource& source, device::Device& device)
      : ForwardedWeights(source), device_(device) {}
  /// Makes the vectors, one behind the other.
  virtual std::vector<float> make() = 0;
  /// A parameter's elements from `begin` on, `count` of them.
  std::vector<float> read_source(const std::string& name, const tensor::Shape& shape, std::int64_t begin,
                                 std::int64_t count) const;
  device::Device& device() const { return device_; }

 private:
  device::Device& device_;
  std::vector<float> vectors_;  ///< once they were asked for
};

/// One of the prompts of `source`, for a model that has that one alone and no network: what p-tuning's
/// network computes, in fp32.
class TaskPrompt : public PromptSource {
 public:
  /// `of_source`: the model whose weights, or whose adapter, `source` has; `prompt`: which of its prompts.
  TaskPrompt(nn::WeightSource& source, const GptConfig& of_source, std::int64_t prompt,
             device::Device& device);
  /// The model that TaskPrompt's prompt is for: `of_source` with one prompt.
  static GptConfig config(const GptConfig& of_source);
  void check(const std::vector<nn::ParameterPtr>& parameters) const override;

 private:
  std::vector<float> make() override;
  /// relu(W·x + b) of each vector of x, or without relu.
  std::vector<float> layer(const std::vector<float>& x, const char* name, std::int64_t in, std::int64_t out,
                           bool relu) const;

  GptConfig config_;
  std::int64_t prompt_;
};

/// Prompts that begin as rows of the model's table of tokens.
class VocabularyPrompt : public PromptSource {
 public:
  /// `ids`: of all prompts' vectors, one behind the other. `base`: has the model's weights.
  VocabularyPrompt(nn::WeightSource& base, const GptConfig& config, std::vector<std::int32_t> ids,
                   device::Device& device);
  void check(const std::vector<nn::ParameterPtr>& parameters) const override;
  bool has(const std::string& name) const override { return name == prompt_parameter; }

 private:
  std::vector<float> make() override;

  GptConfig config_;
  std::vector<std::int32_t> ids_;
};

/// The ids of a text's tokens, repeated or cut to `count` (as PEFT does). Throws Error{usage} for no tokens.
std::vector<std::int32_t> repeated(const std::vector<std::int32_t>& ids, std::int64_t count);

}  // namespace sherd::models
