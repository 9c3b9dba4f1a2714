#include "engine/setup/fp8_layers.h"

#include <algorithm>
#include <utility>

#include "base/text/excerpt.h"
#include "engine/update/parameter_groups.h"

namespace sherd::engine {

std::string layer_of(const std::string& weight) {
  constexpr std::string_view end = ".weight";
  return weight.ends_with(end) ? weight.substr(0, weight.size() - end.size()) : weight;
}

namespace {

std::string some_of(const std::vector<std::string>& names) {
  constexpr std::size_t most = 12;
  const std::string out = joined_text(std::span(names).first(std::min(most, names.size())));
  return names.size() > most ? cat(out, " and ", names.size() - most, " more") : out;
}

}  // namespace

Fp8Layers::Fp8Layers(const nn::Module& model, const config::Fp8& fp8, tensor::Kernels& kernels)
    : kernels_(kernels) {
  if (!fp8.enabled) return;
  std::vector<std::pair<std::string, nn::ParameterPtr>> linear;
  for (const auto& [name, parameter] : named_once(model))
    if (parameter->in_linear) linear.emplace_back(layer_of(name), parameter);
  const auto matched = [](const std::string& pattern, const std::string& layer) {
    return matches(pattern, layer) || matches(pattern, layer + ".weight");
  };
  std::vector<std::string> names;
  for (const auto& [layer, parameter] : linear) names.push_back(layer);
  for (const std::string& pattern : fp8.exclude)
    if (std::none_of(names.begin(), names.end(), [&](const auto& layer) { return matched(pattern, layer); }))
      fail(ErrorKind::config, "fp8.exclude: no linear layer that could run in FP8 matches '",
           excerpt(pattern), "'", names.empty() ? "" : cat("; is ", near_names(pattern, names), " meant?"));
  const tensor::Fp8Recipe& recipe = tensor::fp8_recipes()[static_cast<std::size_t>(fp8.recipe)];
  kernels.require_fp8(recipe);
  recipe_ = recipe.name;
  layer_ = std::make_shared<autograd::Fp8Layer>();
  layer_->recipe = recipe;
  layer_->lost = tensor::Tensor::zeros(kernels.device(), {2}, DType::i64, tensor::Category::workspace);
  for (const auto& [layer, parameter] : linear) {
    const bool excluded =
        std::any_of(fp8.exclude.begin(), fp8.exclude.end(),
                    [&, &name = layer](const auto& pattern) { return matched(pattern, name); });
    const tensor::Shape& shape = parameter->shape;
    const bool even = shape[0] % tensor::fp8_alignment == 0 && shape[1] % tensor::fp8_alignment == 0;
    if (excluded) {
      excluded_.push_back(layer);
    } else if (!even) {
      odd_.push_back(layer);
    } else {
      weights_.push_back(parameter);
    }
  }
}

void Fp8Layers::adopt() {
  if (enabled() && weights_.empty())
    fail(ErrorKind::config, "fp8.enabled, but no linear layer of the model can run in FP8",
         excluded_.empty() ? "" : ": fp8.exclude names them",
         odd_.empty() ? ""
                      : cat("; on this rank features are no multiples of ", tensor::fp8_alignment, " (",
                            some_of(odd_), ")"),
         "; set fp8.enabled to false");
  for (const nn::ParameterPtr& weight : weights_) weight->fp8 = layer_;
  adopted_ = true;
}

Fp8Layers::~Fp8Layers() {
  for (const nn::ParameterPtr& weight : weights_)
    if (adopted_) weight->fp8 = nullptr;
}

std::string Fp8Layers::describe() const {
  if (!enabled()) return "";
  std::string out = cat("fp8: the products of ", counted(std::ssize(weights_), "linear layer"),
                        " run in FP8, recipe ", recipe_);
  if (!excluded_.empty()) out += cat("; in bf16 as fp8.exclude says: ", some_of(excluded_));
  if (!odd_.empty())
    out += cat("; in bf16 as features, on this rank, are no multiples of ", tensor::fp8_alignment, ": ",
               some_of(odd_));
  return out;
}

Fp8Layers::Lost Fp8Layers::take_lost() {
  if (!enabled()) return {};
  const tensor::Tensor here = tensor::to_host(kernels_.device(), layer_->lost);
  if (!here.raw()) return {};
  const auto* counts = here.data<std::int64_t>();
  const Lost out{std::exchange(layer_->elements, 0), counts[0], counts[1]};
  kernels_.fill(layer_->lost, 0);
  return out;
}

void Fp8Layers::set_compare(Compare compare) {
  if (layer_) layer_->compare = std::move(compare);
}

}  // namespace sherd::engine
