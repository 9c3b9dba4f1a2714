#include "models/adapters/adapters.h"

#include <algorithm>

#include "autograd/ops.h"
#include "models/hub/adapter_tables.h"
#include "models/hub/adapter_targets.h"

namespace sherd::models {

using config::AdapterType;
using tensor::Range;

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

/// Rows that follow each other become one range.
void append(std::vector<Range>& rows, const PublishedParameter::RowRun& run) {
  if (!rows.empty() && rows.back().end == run.row)
    rows.back().end += run.rows;
  else
    rows.push_back({run.row, run.row + run.rows});
}

}  // namespace

bool is_adapter(const std::string& parameter) {
  return parameter.find(".adapter.") != std::string::npos;
}

std::vector<nn::ParameterPtr> adapter_parameters(const std::vector<nn::ParameterPtr>& all,
                                                 const std::vector<std::string>& saved) {
  std::vector<nn::ParameterPtr> out = all;
  std::erase_if(out, [&](const auto& p) {
    return !is_adapter(p->name) && std::find(saved.begin(), saved.end(), p->name) == saved.end();
  });
  return out;
}

std::shared_ptr<parallel::LinearAdapter> make_adapter(const GptConfig& config, const std::string& path,
                                                      parallel::AdaptedLayer layer,
                                                      const parallel::Layout& layout) {
  const config::Adapter& adapter = config.adapter;
  if (adapter.type != AdapterType::lora && adapter.type != AdapterType::ia3) return nullptr;
  const AdaptedWeight adapted = adapted_weight(config, path);
  for (const int tensor : adapted.tensors) {
    std::vector<Range> rows;
    for (const PublishedParameter::RowRun& run : adapted.weight.rows)
      if (run.tensor == tensor) append(rows, run);
    layer.targets.push_back(std::move(rows));
  }
  if (layer.targets.empty()) return nullptr;
  if (adapter.type == AdapterType::ia3)
    return std::make_shared<parallel::Ia3>(std::move(layer), adapted.of_inputs, layout);
  const double dropout = layer.in_expert ? 0 : adapter.lora.dropout;
  return std::make_shared<parallel::Lora>(
      std::move(layer),
      parallel::LoraOptions{adapted.rank, adapted.scale, static_cast<float>(dropout), adapter.lora.dora,
                            adapter.lora.init == config::LoraInit::gaussian},
      layout);
}

std::shared_ptr<parallel::Bottlenecks> make_bottlenecks(const GptConfig& config,
                                                        const parallel::Layout& layout) {
  if (config.adapter.type != AdapterType::bottleneck) return nullptr;
  if (config.norm_placement == config::NormPlacement::post_residual)
    fail(ErrorKind::config,
         "bottleneck adapters go into blocks whose norms do not follow their sums (model.norm_placement): "
         "take "
         "training.adapter.type \"lora\"");
  const config::BottleneckKeys& keys = config.adapter.bottleneck;
  const parallel::BottleneckOptions options{.width = config.hidden_size,
                                            .size = keys.width(config.hidden_size),
                                            .non_linearity = function_of(keys.non_linearity),
                                            .scale = keys.scale,
                                            .attention = keys.attention,
                                            .mlp = keys.mlp,
                                            .of_sum = keys.of_sum};
  return std::make_shared<parallel::Bottlenecks>(options, layout);
}

std::int64_t encoder_width(const GptConfig& config) {
  const std::int64_t own = config.adapter.prompt.encoder_hidden_size;
  return own > 0 ? own : config.hidden_size;
}

std::shared_ptr<parallel::Prompts> make_prompts(const GptConfig& config, const parallel::Layout& layout) {
  const config::Adapter& adapter = config.adapter;
  if (!adapter.has_prompt()) return nullptr;
  if (!config.causal)
    fail(ErrorKind::config, "virtual tokens are for models that write behind their text (model.causal)");
  const parallel::PromptOptions prompts{
      config.padded_vocab(), adapter.prompt.prompts() * adapter.virtual_tokens(), config.hidden_size};
  if (adapter.type == AdapterType::p_tuning)
    return std::make_shared<parallel::PromptEncoder>(prompts, encoder_width(config), layout);
  return std::make_shared<parallel::Prompts>(prompts, layout);
}

TrainedTokens make_token_rows(const GptConfig& config, const parallel::Layout& layout) {
  TrainedTokens out;
  const auto& [of_table, of_head] = trained_tokens(config);
  const parallel::TokenRows::Table table{config.padded_vocab(), config.vocab_size, config.hidden_size};
  if (!of_table.empty()) out.of_table = std::make_shared<parallel::TokenRows>(of_table, table, layout);
  if (config.tied() && out.of_table)
    out.of_head = std::make_shared<parallel::TokenRows>(of_table, table, layout, out.of_table->parameter());
  else if (!of_head.empty())
    out.of_head = std::make_shared<parallel::TokenRows>(of_head, table, layout);
  return out;
}

void WithAdapter::check(const std::vector<nn::ParameterPtr>& parameters) const {
  std::vector<nn::ParameterPtr> base = parameters;
  std::erase_if(base, [](const auto& p) { return is_adapter(p->name); });
  source_.check(base);
  if (adapter_) adapter_->check(adapter_parameters(parameters, saved_));
}

bool WithAdapter::of_adapter(const std::string& name) const {
  return is_adapter(name) ||
         (adapter_ && adapter_->has(name) && std::find(saved_.begin(), saved_.end(), name) != saved_.end());
}

bool WithAdapter::has(const std::string& name) const {
  return is_adapter(name) ? adapter_ && adapter_->has(name) : of_adapter(name) || source_.has(name);
}

void WithAdapter::read(const std::string& name, const tensor::Slice& slice, std::int64_t begin,
                       const tensor::Tensor& to) {
  (of_adapter(name) ? *adapter_ : source_).read(name, slice, begin, to);
}

}  // namespace sherd::models
