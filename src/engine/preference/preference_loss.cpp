#include "engine/preference/preference_loss.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/error.h"

namespace sherd::engine {

using config::Objective;
using config::PreferenceTerm;

std::vector<double> numbers_of(const tensor::Batch& batch, const char* name, std::size_t count) {
  const auto found = batch.find(name);
  if (found == batch.end()) return std::vector<double>(count, 0.0);
  require(std::cmp_equal(found->second.numel(), count), "'", name, "' has ", found->second.numel(),
          " numbers for ", count, " texts");
  const auto* values = found->second.data<double>();
  return {values, values + found->second.numel()};
}

std::vector<std::int32_t> sides_of(const tensor::Batch& batch) {
  const tensor::Tensor& sides = batch.at("sides");
  return {sides.data<std::int32_t>(), sides.data<std::int32_t>() + sides.numel()};
}

std::vector<std::size_t> pairs_of(const std::vector<std::int32_t>& sides) {
  std::vector<std::size_t> out;
  for (std::size_t i = 0; i + 1 < sides.size(); ++i)
    if (sides[i] > 0 && sides[i + 1] < 0) out.push_back(i);
  return out;
}

std::vector<double> of_same_rank(const std::vector<double>& own, const std::vector<double>& values) {
  std::vector<double> sorted = values;
  std::sort(sorted.begin(), sorted.end());
  std::vector<std::size_t> order(own.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return own[a] < own[b]; });
  std::vector<double> out(own.size());
  for (std::size_t rank = 0; rank < order.size(); ++rank) out[order[rank]] = sorted[rank];
  return out;
}

PreferenceTextLoss::PreferenceTextLoss(const config::Config& config, device::Device& device)
    : keys_(config.training.preference),
      terms_(config.preference_terms()),
      objective_(config.objective()),
      has_reference_(config.reference() != config::Reference::none),
      device_(device),
      sums_(device) {}

bool PreferenceTextLoss::looks_at_partners() const {
  return engine::looks_at_partners(terms_);
}

bool PreferenceTextLoss::learns_chosen() const {
  return std::any_of(terms_.begin(), terms_.end(),
                     [](const PreferenceTerm& term) { return term.loss == config::PreferenceLoss::sft; });
}

double PreferenceTextLoss::operator()(const tensor::Batch& batch, const nn::TextScores& scores,
                                      nn::TextGradients& gradients) {
  if (device_.kind() == device::Kind::meta) return 0;
  if (has_reference_ && !batch.contains("reference"))
    fail(ErrorKind::usage,
         "a batch without the reference's log-probabilities: where preferences are learned, batches go "
         "through "
         "engine::PreferenceRun, as those of `sherd train` and Trainer do");
  const std::vector<double> reference = numbers_of(batch, "reference", scores.log_prob.size());
  sums_.next_batch();
  add_metrics(batch, scores, reference);
  return objective_ == Objective::kto ? singles(batch, scores, reference, gradients)
                                      : pairs(batch, scores, reference, gradients);
}

double PreferenceTextLoss::pairs(const tensor::Batch& batch, const nn::TextScores& scores,
                                 const std::vector<double>& reference, nn::TextGradients& gradients) const {
  const std::vector<std::size_t> all = pairs_of(sides_of(batch));
  if (all.empty()) return 0;
  const std::vector<double> partners = numbers_of(batch, "partners", scores.log_prob.size());
  const auto count = static_cast<double>(all.size());
  double own_targets = 0, sum = 0;
  for (const std::size_t i : all) own_targets += static_cast<double>(scores.targets[i]);
  const double sft_scale = step_.sft_scale > 0 ? step_.sft_scale : count / std::max(own_targets, 1.0);
  for (const std::size_t i : all) {
    const PairScores pair{.chosen = {scores.weighted[i], 1, 0},
                          .rejected = {scores.weighted[i + 1], 0, 1},
                          .chosen_reference = reference[i],
                          .rejected_reference = reference[i + 1],
                          .chosen_targets = std::max<double>(1, static_cast<double>(scores.targets[i])),
                          .rejected_targets = std::max<double>(1, static_cast<double>(scores.targets[i + 1])),
                          .partner_of_chosen = partners[i],
                          .partner_of_rejected = partners[i + 1]};
    for (const auto& [loss, weight] : terms_) {
      if (loss == config::PreferenceLoss::sft) {
        sum -= weight * sft_scale * scores.log_prob[i];
        gradients.log_prob[i] -= weight * sft_scale / count;
        continue;
      }
      const Derived found = pair_loss(loss, pair, keys_);
      sum += weight * found.value;
      gradients.weighted[i] += weight * found.by_chosen / count;
      gradients.weighted[i + 1] += weight * found.by_rejected / count;
    }
  }
  return sum / count;
}

double PreferenceTextLoss::singles(const tensor::Batch& batch, const nn::TextScores& scores,
                                   const std::vector<double>& reference, nn::TextGradients& gradients) const {
  const std::vector<std::int32_t> sides = sides_of(batch);
  const auto count = static_cast<double>(
      std::count_if(sides.begin(), sides.end(), [](std::int32_t side) { return side != 0; }));
  double sum = 0;
  for (std::size_t i = 0; i < sides.size(); ++i) {
    if (sides[i] == 0) continue;
    for (const auto& [loss, weight] : terms_) {
      const Derived found =
          single_loss(loss, sides[i] > 0, scores.weighted[i] - reference[i], step_.baseline, keys_);
      sum += weight * found.value;
      gradients.weighted[i] += weight * found.by_chosen / count;
    }
  }
  return count > 0 ? sum / count : 0;
}

void PreferenceTextLoss::add_metrics(const tensor::Batch& batch, const nn::TextScores& scores,
                                     const std::vector<double>& reference) {
  const std::vector<std::int32_t> sides = sides_of(batch);
  const bool rewards = objective_ == Objective::reward;  // scores are these themselves
  // The losses orpo and simpo take means over tokens for log-probabilities.
  const bool means = objective_ == Objective::orpo || objective_ == Objective::simpo;
  const auto found = [&](std::size_t i) {
    return means ? scores.weighted[i] / std::max<double>(1, static_cast<double>(scores.targets[i]))
                 : scores.weighted[i];
  };
  const auto reward = [&](std::size_t i) {
    return rewards ? scores.log_prob[i] : keys_.beta * (found(i) - reference[i]);
  };
  for (std::size_t i = 0; i < sides.size(); ++i) {
    if (sides[i] == 0) continue;
    const std::string side = sides[i] > 0 ? "chosen" : "rejected";
    sums_.add("rewards/" + side, reward(i));
    if (!rewards) sums_.add("logps/" + side, found(i));
  }
  if (objective_ == Objective::kto) return sums_.add("kl", step_.baseline);
  for (const std::size_t i : pairs_of(sides)) {
    const double margin = reward(i) - reward(i + 1);
    sums_.add("rewards/margins", margin);
    sums_.add("rewards/accuracies", margin > 0 ? 1 : 0);
    if (learns_chosen()) sums_.add("nll_loss", -scores.log_prob[i], static_cast<double>(scores.targets[i]));
  }
}

}  // namespace sherd::engine
