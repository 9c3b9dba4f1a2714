#include "sharding/parallel/experts/router_losses.h"

#include "base/error.h"

namespace sherd::parallel {

std::vector<double> balance_weights(BalanceLoss kind, std::span<const double> n, double tokens, int top_k,
                                    int layers) {
  double shared = 1;  // by whom a choice's weight is
  if (kind == BalanceLoss::all_choices) shared = top_k;
  if (kind == BalanceLoss::pooled) shared = layers;
  std::vector<double> out;
  for (const double choices : n)
    out.push_back(static_cast<double>(n.size()) * choices / (shared * tokens * tokens));
  return out;
}

void PooledChoices::put(const RandomKey& micro_batch, int layer, std::vector<double> n) {
  chosen_[{micro_batch.seed, micro_batch.stream}][layer] = std::move(n);
}

std::vector<double> PooledChoices::mean(const RandomKey& micro_batch) const {
  const auto found = chosen_.find({micro_batch.seed, micro_batch.stream});
  const std::size_t known = found == chosen_.end() ? 0 : found->second.size();
  require(known == static_cast<std::size_t>(layers_), "the balance loss of all ", layers_,
          " layers of experts together needs what each has chosen, and ", known,
          " have run: run the whole model on a micro-batch before its backward");
  std::vector<double> out;
  for (const auto& [layer, n] : found->second) {
    out.resize(n.size());
    for (std::size_t i = 0; i < n.size(); ++i) out[i] += n[i] / layers_;
  }
  return out;
}

void PooledChoices::forget(const RandomKey& micro_batch) {
  chosen_.erase({micro_batch.seed, micro_batch.stream});
}

}  // namespace sherd::parallel
