#pragma once

#include <string>
#include <utility>
#include <vector>

#include "config/config.h"
#include "nn/module.h"

namespace sherd::engine {

/// The weights of linear layers (Parameter::in_linear) that `sparsity` prunes, by full names, in the order of
/// the model. Throws Error{config} for a pattern that matches none of them.
std::vector<std::pair<std::string, nn::ParameterPtr>> weights_to_prune(const nn::Module& model,
                                                                       const config::Sparsity& sparsity);

/// The weights of a model of which training.sparsity prunes two in four. They are pruned where they come
/// from: as initial values are drawn (sharding::Segment) and as weights are loaded (engine::read_weights()).
class PrunedLayers {
 public:
  /// Throws Error{config} where there are none, and for weights whose rows cannot be cut into fours, on this
  /// rank, naming them.
  PrunedLayers(const nn::Module& model, const config::Sparsity& sparsity);
  /// Sets their Parameter::pruned, once the model is this engine's, until this goes.
  void adopt();
  ~PrunedLayers();
  PrunedLayers(const PrunedLayers&) = delete;
  PrunedLayers& operator=(const PrunedLayers&) = delete;

  /// How many are pruned; empty: none.
  std::string describe() const;

 private:
  std::vector<std::pair<std::string, nn::ParameterPtr>> weights_;
  std::vector<std::string> dense_;  ///< linear layers that are not
  bool adopted_ = false;
};

}  // namespace sherd::engine
