#include "models/adapters/prompt_weights.h"

#include <algorithm>
#include <numeric>

#include "models/adapters/adapters.h"
#include "models/adapters/read_values.h"
#include "models/gpt.h"

namespace sherd::models {

using tensor::Shape;
using tensor::Tensor;

void PromptSource::read(const std::string& name, const tensor::Slice& slice, std::int64_t begin,
                        const Tensor& to) {
  if (name != prompt_parameter) return source_.read(name, slice, begin, to);
  if (vectors_.empty()) vectors_ = make();
  require(slice.logical().numel() == std::ssize(vectors_), "a prompt of ", vectors_.size(), " elements, not ",
          slice.logical().str());
  write_slice(vectors_, slice, begin, to);
}

std::vector<float> PromptSource::read_source(const std::string& name, const Shape& shape, std::int64_t begin,
                                             std::int64_t count) const {
  return read_values(source_, name, shape, begin, count, device_);
}

TaskPrompt::TaskPrompt(nn::WeightSource& source, const GptConfig& of_source, std::int64_t prompt,
                       device::Device& device)
    : PromptSource(source, device), config_(of_source.resolved()), prompt_(prompt) {
  require(prompt >= 0 && prompt < config_.adapter.prompt.prompts() && config_.adapter.has_prompt(), "prompt ",
          prompt, " of ", config_.adapter.prompt.prompts());
}

GptConfig TaskPrompt::config(const GptConfig& of_source) {
  GptConfig out = of_source;
  out.adapter.type = config::AdapterType::prompt_tuning;
  out.adapter.prompt.tasks.clear();
  return out;
}

void TaskPrompt::check(const std::vector<nn::ParameterPtr>& parameters) const {
  Gpt model(config_);
  model.assign_names();
  const bool whole = std::any_of(parameters.begin(), parameters.end(),
                                 [](const nn::ParameterPtr& p) { return !is_adapter(p->name); });
  source_.check(whole ? model.parameters() : adapter_parameters(model.parameters()));
  const Shape has{config_.adapter.virtual_tokens(), config_.hidden_size};
  for (const nn::ParameterPtr& p : parameters)
    if (p->name == prompt_parameter && p->logical_slice().logical() != has)
      fail(ErrorKind::config, "training.adapter.virtual_tokens and the hidden size make a prompt ",
           p->logical_slice().logical().str(), ", and the one to begin with is ", has.str());
}

std::vector<float> TaskPrompt::layer(const std::vector<float>& x, const char* name, std::int64_t in,
                                     std::int64_t out, bool relu) const {
  const std::string at = cat("tokens.adapter.", name);
  const std::vector<float> w = read_source(at + ".weight", {out, in}, 0, out * in),
                           b = read_source(at + ".bias", {out}, 0, out);
  std::vector<float> y;
  for (auto row = x.begin(); row != x.end(); row += in)
    for (std::int64_t o = 0; o < out; ++o) {
      const double sum =
          std::inner_product(row, row + in, w.begin() + o * in, 0.0) + double{b[static_cast<std::size_t>(o)]};
      y.push_back(static_cast<float>(relu ? std::max(sum, 0.0) : sum));
    }
  return y;
}

std::vector<float> TaskPrompt::make() {
  const config::Adapter& adapter = config_.adapter;
  const std::int64_t width = config_.hidden_size, hidden = encoder_width(config_),
                     elements = adapter.virtual_tokens() * width;
  const bool encoded = adapter.type == config::AdapterType::p_tuning;
  const std::vector<float> own =
      read_source(encoded ? "tokens.adapter.embedding" : prompt_parameter,
                  {adapter.prompt.prompts() * adapter.virtual_tokens(), width}, prompt_ * elements, elements);
  if (!encoded) return own;
  return layer(layer(layer(own, "mlp_0", width, hidden, true), "mlp_2", hidden, hidden, true), "mlp_4",
               hidden, width, false);
}

VocabularyPrompt::VocabularyPrompt(nn::WeightSource& base, const GptConfig& config,
                                   std::vector<std::int32_t> ids, device::Device& device)
    : PromptSource(base, device), config_(config.resolved()), ids_(std::move(ids)) {
  for (const std::int32_t id : ids_)
    require(id >= 0 && id < config_.vocab_size, "a prompt begins as the vector of id ", id, " of ",
            config_.vocab_size);
}

void VocabularyPrompt::check(const std::vector<nn::ParameterPtr>& parameters) const {
  const auto rows = std::ssize(ids_);
  for (const nn::ParameterPtr& p : parameters)
    require(p->name == prompt_parameter && p->logical_slice().logical() == Shape{rows, config_.hidden_size},
            "ids of ", rows, " vectors for ", p->name, " ", p->logical_slice().logical().str());
}

std::vector<float> VocabularyPrompt::make() {
  std::vector<float> out =
      read_rows(source_, "tokens.weight", config_.padded_vocab(), config_.hidden_size, ids_, device());
  const auto factor = static_cast<float>(config_.embedding_root(DType::f32));  // as tokens enter the model
  for (float& value : out) value *= factor;
  return out;
}

std::vector<std::int32_t> repeated(const std::vector<std::int32_t>& ids, std::int64_t count) {
  require(!ids.empty(), "a prompt cannot begin as a text without tokens");
  std::vector<std::int32_t> out(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = ids[i % ids.size()];
  return out;
}

}  // namespace sherd::models
