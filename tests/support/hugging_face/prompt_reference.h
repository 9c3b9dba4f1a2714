#pragma once

#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "support/hugging_face/peft_reference.h"

// Prompts that PEFT wrote, with the networks of which p-tuning's were made.
namespace sherd::test {

/// Whole fp32 values by the names of Gpt's parameters.
class Given : public nn::WeightSource {
 public:
  std::map<std::string, std::vector<float>> values;

  void check(const std::vector<nn::ParameterPtr>& parameters) const override {
    for (const auto& p : parameters)
      ASSERT_EQ(p->logical_slice().logical().numel(), std::ssize(values.at(p->name))) << p->name;
  }
  void read(const std::string& name, const tensor::Slice& slice, std::int64_t begin,
            const tensor::Tensor& to) override {
    slice.for_each_run(begin, begin + to.numel(),
                       [&](std::int64_t local, std::int64_t logical, std::int64_t count) {
                         std::memcpy(to.data<float>() + local - begin, values.at(name).data() + logical,
                                     static_cast<std::size_t>(count) * sizeof(float));
                       });
  }
};

struct PromptReference : PeftReference {
  explicit PromptReference(const std::string& name)
      : PeftReference(name), encoded(name.ends_with("ptuning")) {
    if (!encoded) return;
    config.training.adapter.type = config::AdapterType::p_tuning;
    config.training.adapter.prompt.encoder_hidden_size = expected_file.at("encoder.mlp_head.0.bias").shape[0];
  }

  /// Options of the model that is trained, p-tuning's with its network, with so many prompts. `options` are
  /// those of what PEFT saves.
  models::GptConfig trained(std::int64_t prompts = 1) const {
    models::GptConfig out = options;
    out.adapter = config.training.adapter;
    for (std::int64_t i = 0; prompts > 1 && i < prompts; ++i)
      out.adapter.prompt.tasks.emplace_back().name = cat("task", i);
    return out;
  }
  /// PEFT's name of a parameter of its encoder.
  static std::string in_encoder(const std::string& parameter) {
    const std::string name = parameter.substr(parameter.find(".adapter.") + std::strlen(".adapter."));
    return name == "embedding" || name == "prompt" ? "embedding.weight"
                                                   : cat("mlp_head.", name.substr(std::strlen("mlp_")));
  }
  /// Whether each prompt has its own of that parameter.
  static bool is_table(const std::string& parameter) { return in_encoder(parameter) == "embedding.weight"; }
  /// The trained model, the reference's prompt as number `prompt` of `prompts`.
  Given encoder(std::int64_t prompts = 1, std::int64_t prompt = 0) const {
    Given out;
    models::Gpt model(trained());
    model.assign_names();
    for (const auto& p : models::adapter_parameters(model.parameters())) {
      const std::vector<double> own = expected("encoder." + in_encoder(p->name));
      std::vector<float>& to = out.values[p->name];
      for (std::int64_t i = 0; i < (is_table(p->name) ? prompts : 1); ++i)
        for (const double v : own)
          to.push_back(static_cast<float>(
              i == prompt || !is_table(p->name) ? v : 0.1 * std::sin(static_cast<double>(to.size()))));
    }
    return out;
  }
  /// The reference's texts behind prompt `prompt`: the first token of each is the label of the last virtual
  /// one.
  tensor::Batch texts(device::Device& device, std::int64_t prompt = 0) const {
    const std::int64_t count = options.adapter.virtual_tokens();
    const std::vector<std::int32_t> tokens = id_values("tokens"), labels = id_values("labels");
    std::vector<std::int32_t> all, next;
    for (std::size_t row = 0; row < 24; row += 12) {
      for (std::int64_t i = 0; i < count; ++i)
        all.push_back(static_cast<std::int32_t>(options.padded_vocab() + prompt * count + i));
      next.insert(next.end(), static_cast<std::size_t>(count - 1), -100);
      next.push_back(tokens[row]);
      for (std::size_t i = row; i < row + 12; ++i) all.push_back(tokens[i]), next.push_back(labels[i]);
    }
    const tensor::Shape shape{2, count + 12};
    return {{"tokens", tensor::Tensor::of<std::int32_t>(device, shape, all)},
            {"labels", tensor::Tensor::of<std::int32_t>(device, shape, next)}};
  }

  bool encoded;

 private:
  std::vector<std::int32_t> id_values(const std::string& name) const {
    std::vector<std::int32_t> out(24);
    expected_file.read_bytes(expected_file.at(name), 0, std::as_writable_bytes(std::span(out)));
    return out;
  }
};

}  // namespace sherd::test
