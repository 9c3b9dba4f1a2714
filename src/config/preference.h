#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace sherd::config {

/// Losses of preferences (engine/preference/losses.h), in the order of their names, which are TRL's.
enum class PreferenceLoss : std::uint8_t {
  sigmoid,
  hinge,
  ipo,
  exo_pair,
  nca_pair,
  robust,
  bco_pair,
  sppo_hard,
  aot,
  aot_unpaired,
  apo_zero,
  apo_down,
  discopop,
  sigmoid_norm,
  sft,
  orpo,
  simpo,
  kto,
  apo_zero_unpaired,
  bradley_terry
};
/// "sigmoid", "apo_zero", …
std::string_view name_of(PreferenceLoss loss);

/// How far the policy is from the reference, as DPO's losses take it (Wang et al. 2024, "Beyond reverse KL").
enum class Divergence : std::uint8_t { reverse_kl, forward_kl, js_divergence, alpha_divergence };

/// Where the reference's log-probabilities come from.
enum class Reference : std::uint8_t {
  automatic,    ///< adapter where one trains and can be switched off, else precomputed
  adapter,      ///< the model with its adapter switched off, in each step
  precomputed,  ///< computed once, as the run begins, and kept in a file beside the dataset
  copy,         ///< a second, frozen model, which is computed in each step
  none          ///< there is no reference: its log-probabilities are 0
};

/// Section `training.preference`.
struct Preference {
  std::vector<PreferenceLoss> losses;  ///< at least one; empty: the objective's
  std::vector<double> weights;         ///< one for each of these; empty: all 1
  double beta = 0.1;                   ///< > 0
  double label_smoothing = 0;          ///< [0, 0.5): share of pairs that are taken to be the wrong way round
  double rpo_alpha = 0;                ///< weight of the chosen answers' own loss beside the others, ≥ 0
  double ld_alpha = 1;                 ///< [0, 1]: weight of targets beyond as many as the shorter answer has
  Divergence divergence = Divergence::reverse_kl;
  double divergence_alpha = 0.5;  ///< of alpha_divergence
  double discopop_tau = 0.05;     ///< > 0
  double simpo_gamma = 0.5;
  double cpo_alpha = 1;  ///< weight of the chosen answers' own loss in cpo, ≥ 0
  double desirable_weight = 1, undesirable_weight = 1;  ///< of kto's texts, ≥ 0
  double center_rewards = 0;  ///< weight of the square of a pair's sum of rewards, ≥ 0
  Reference reference = Reference::automatic;
  std::string reference_file;  ///< of precomputed ones; empty: beside the dataset
  bool operator==(const Preference&) const = default;
};

/// A loss and its weight.
struct PreferenceTerm {
  PreferenceLoss loss = PreferenceLoss::sigmoid;
  double weight = 1;
};

}  // namespace sherd::config
