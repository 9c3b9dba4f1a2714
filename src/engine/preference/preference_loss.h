#pragma once

#include <cstdint>
#include <vector>

#include "config/config.h"
#include "engine/preference/losses.h"
#include "engine/step/metric_sums.h"
#include "nn/text_loss.h"

namespace sherd::engine {

/// The facts on all micro-batches of a step that its loss needs.
struct PreferenceStep {
  double baseline = 0;   ///< kto's z0, nats
  double sft_scale = 0;  ///< pairs over the targets of their chosen texts; 0: the micro-batch's own
};

/// The numbers of a batch under a name, which the processor reads; as many zeros where it has none.
std::vector<double> numbers_of(const tensor::Batch& batch, const char* name, std::size_t count);

/// The loss of preferences as a model's TextLoss: the mean over the pairs of a micro-batch, or over its texts
/// that are judged by themselves, of the weighted sum of the objective's losses. Beside "sides" it reads of
/// the batch {"reference": fp64 [texts]}, the reference's log-probabilities, as the objective has one, and
/// {"partners": fp64 [texts]}. Adds what people watch to sums, micro-batch by micro-batch. Used from the
/// rank's thread.
class PreferenceTextLoss final : public nn::TextLoss {
 public:
  PreferenceTextLoss(const config::Config& config, device::Device& device);

  double tail_weight() const override { return keys_.ld_alpha; }
  double operator()(const tensor::Batch& batch, const nn::TextScores& scores,
                    nn::TextGradients& gradients) override;

  /// Sets what the micro-batches to come need to know of their step.
  void set_step(const PreferenceStep& step) { step_ = step; }
  /// Sums of the metrics of texts, until they are cleared: rewards of chosen and rejected texts, their
  /// margins, the share of pairs of which the chosen one's is higher, log-probabilities, the baseline. Names
  /// are TRL's.
  MetricSums& sums() { return sums_; }

  bool looks_at_partners() const;
  bool learns_chosen() const;  ///< sft is among the losses

 private:
  void add_metrics(const tensor::Batch& batch, const nn::TextScores& scores,
                   const std::vector<double>& reference);
  double pairs(const tensor::Batch& batch, const nn::TextScores& scores, const std::vector<double>& reference,
               nn::TextGradients& gradients) const;
  double singles(const tensor::Batch& batch, const nn::TextScores& scores,
                 const std::vector<double>& reference, nn::TextGradients& gradients) const;

  config::Preference keys_;
  std::vector<config::PreferenceTerm> terms_;
  config::Objective objective_;
  bool has_reference_;
  device::Device& device_;
  PreferenceStep step_;
  MetricSums sums_;
};

/// The sides of a batch's texts.
std::vector<std::int32_t> sides_of(const tensor::Batch& batch);
/// Texts of pairs: each chosen one that a rejected one follows.
std::vector<std::size_t> pairs_of(const std::vector<std::int32_t>& sides);
/// Which of `values` lies as high in them as each of `own` does in these; as many.
std::vector<double> of_same_rank(const std::vector<double>& own, const std::vector<double>& values);

}  // namespace sherd::engine
