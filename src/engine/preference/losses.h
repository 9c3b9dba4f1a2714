#pragma once

#include <optional>
#include <vector>

#include "config/config.h"
#include "engine/preference/derivative.h"

namespace sherd::engine {

/// The scores of a pair from which its loss is computed. Log-probabilities are sums over targets, in nats.
struct PairScores {
  /// The policy's, or rewards of a model that gives these; TextScores::weighted.
  Derived chosen, rejected;
  double chosen_reference = 0, rejected_reference = 0;
  double chosen_targets = 1, rejected_targets = 1;  ///< tokens
  /// Partners by rank among all pairs of the step. For `aot`: the reference's difference that has the rank
  /// which this pair's has among the policy's. For `aot_unpaired`: the rejected text's log-ratio with the
  /// rank of this chosen one's, and the chosen text's with the rank of this rejected one's.
  double partner_of_chosen = 0, partner_of_rejected = 0;

  /// log π − log π_ref, r⁺ and r⁻.
  Derived chosen_ratio() const { return chosen - chosen_reference; }
  Derived rejected_ratio() const { return rejected - rejected_reference; }
};

/// The loss of one pair (of texts by themselves: single_loss()), with its derivatives by both scores. `sft`
/// is none of these: it is the mean over tokens. Formulas are TRL 1.16's, with `label_smoothing` of sigmoid
/// as in cDPO (Mitchell 2023).
Derived pair_loss(config::PreferenceLoss loss, const PairScores& pair, const config::Preference& keys);

/// The loss of a text that is judged by itself, of log-ratio r to the reference, and its derivative by r in
/// `by_chosen` (Ethayarajh et al. 2024, "KTO", eq. 8). baseline: z0, nats.
Derived single_loss(config::PreferenceLoss loss, bool desirable, double ratio, double baseline,
                    const config::Preference& keys);

/// Whether one of these losses looks at partners, by rank among all pairs of a step.
bool looks_at_partners(const std::vector<config::PreferenceTerm>& terms);

}  // namespace sherd::engine
