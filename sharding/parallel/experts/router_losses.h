#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "base/choices.h"
#include "base/random.h"

namespace sherd::parallel {

/// The losses that routers add to that of a micro-batch.
struct RouterLosses {
  double balance = 0;  ///< factor of the balance loss
  double z = 0;  ///< factor of the mean over tokens of (log Σ exp logits)² (Zoph et al. 2022, "ST-MoE")
  BalanceLoss kind = BalanceLoss::all_choices;
};

/// The factors with which the balance loss, without its own, multiplies a layer's Σ_t P(t, i). Pure. `n`: the
/// choices that it counts; of the pooled loss their mean over `layers` layers.
std::vector<double> balance_weights(BalanceLoss kind, std::span<const double> n, double tokens, int top_k,
                                    int layers);

/// The choices of all layers of one model, for a loss over all of them. A micro-batch is known by the key
/// of its random stream: several may be under way, and one on several tapes. A layer that runs again replaces
/// what it chose. Used from the rank's thread.
class PooledChoices {
 public:
  /// The number of the next layer, in the order of running.
  int add_layer() { return layers_++; }
  int layers() const { return layers_; }
  /// `n`: choices of each expert.
  void put(const RandomKey& micro_batch, int layer, std::vector<double> n);
  /// Over layers. Throws Error{usage} where one of them has not run.
  std::vector<double> mean(const RandomKey& micro_batch) const;
  /// The micro-batch is done with.
  void forget(const RandomKey& micro_batch);
  /// So are all.
  void clear() { chosen_.clear(); }
  /// Micro-batches under way.
  std::size_t size() const { return chosen_.size(); }

 private:
  using Key = std::pair<std::uint64_t, std::uint64_t>;
  int layers_ = 0;
  std::map<Key, std::map<int, std::vector<double>>> chosen_;
};

}  // namespace sherd::parallel
