#include "engine/setup/pruned_layers.h"

#include <algorithm>
#include <iterator>

#include "base/text/excerpt.h"
#include "engine/setup/fp8_layers.h"
#include "engine/update/parameter_groups.h"
#include "tensor/formats/pruned.h"

namespace sherd::engine {
namespace {

using NamedWeights = std::vector<std::pair<std::string, nn::ParameterPtr>>;

NamedWeights linear_weights(const nn::Module& model) {
  NamedWeights out = named_once(model);
  std::erase_if(out, [](const auto& named) { return !named.second->in_linear; });
  return out;
}

bool names(const std::string& pattern, const std::string& weight) {
  return matches(pattern, weight) || matches(pattern, layer_of(weight));
}

bool any_names(const std::vector<std::string>& patterns, const std::string& weight) {
  return std::any_of(patterns.begin(), patterns.end(),
                     [&](const std::string& pattern) { return names(pattern, weight); });
}

void require_matches(const char* key, const std::vector<std::string>& patterns, const NamedWeights& linear) {
  std::vector<std::string> layers;
  for (const auto& [name, weight] : linear) layers.push_back(layer_of(name));
  for (const std::string& pattern : patterns)
    if (std::none_of(layers.begin(), layers.end(), [&](const auto& layer) { return names(pattern, layer); }))
      fail(ErrorKind::config, "training.sparsity.", key, ": no linear layer of a block matches '",
           excerpt(pattern), "'", layers.empty() ? "" : cat("; is ", near_names(pattern, layers), " meant?"));
}

/// Whether each row, and what this rank has of it, consists of whole fours of the logical row.
bool has_whole_fours(const autograd::Parameter& weight) {
  const tensor::Slice slice = weight.logical_slice();
  if (slice.logical().rank() != 2 || slice.logical()[1] % tensor::pruned_group != 0) return false;
  const auto& blocks = slice.blocks().at(1);
  return std::all_of(blocks.begin(), blocks.end(), [](const tensor::Range& block) {
    return block.begin % tensor::pruned_group == 0 && block.end % tensor::pruned_group == 0;
  });
}

}  // namespace

NamedWeights weights_to_prune(const nn::Module& model, const config::Sparsity& sparsity) {
  if (!sparsity.prunes()) return {};
  NamedWeights out = linear_weights(model);
  require_matches("targets", sparsity.targets, out);
  require_matches("exclude", sparsity.exclude, out);
  std::erase_if(out, [&](const auto& named) {
    return !any_names(sparsity.targets, named.first) || any_names(sparsity.exclude, named.first);
  });
  return out;
}

PrunedLayers::PrunedLayers(const nn::Module& model, const config::Sparsity& sparsity)
    : weights_(weights_to_prune(model, sparsity)) {
  if (!sparsity.prunes()) return;
  if (weights_.empty())
    fail(ErrorKind::config,
         "training.sparsity prunes no weight of the model: targets and exclude leave none");
  std::vector<std::string> odd;
  for (const auto& [name, weight] : weights_)
    if (!has_whole_fours(*weight)) odd.push_back(cat(name, ", ", weight->logical_slice().str()));
  if (!odd.empty())
    fail(ErrorKind::config, "training.sparsity prunes two of each four inputs, and inputs of ",
         counted(std::ssize(odd), "weight"), " cannot be cut into fours on this rank (", odd.front(),
         odd.size() > 1 ? " the first" : "",
         "): name them in training.sparsity.exclude, or change the sizes of the model or parallel.tensor");
  for (const auto& [name, weight] : linear_weights(model))
    if (std::none_of(weights_.begin(), weights_.end(), [&](const auto& own) { return own.second == weight; }))
      dense_.push_back(layer_of(name));
}

void PrunedLayers::adopt() {
  for (const auto& [name, weight] : weights_) weight->pruned = true;
  adopted_ = true;
}

PrunedLayers::~PrunedLayers() {
  for (const auto& [name, weight] : weights_)
    if (adopted_) weight->pruned = false;
}

std::string PrunedLayers::describe() const {
  if (weights_.empty()) return "";
  std::int64_t elements = 0;
  for (const auto& [name, weight] : weights_) elements += weight->logical_slice().logical().numel();
  std::string out = cat("sparsity 2:4: of the ", elements, " weights of ",
                        counted(std::ssize(weights_), "linear layer"), " half are pruned");
  if (!dense_.empty())
    out += cat("; ", counted(std::ssize(dense_), "layer"), " of blocks stay dense, ", dense_.front(),
               dense_.size() > 1 ? " the first" : "");
  return out;
}

}  // namespace sherd::engine
