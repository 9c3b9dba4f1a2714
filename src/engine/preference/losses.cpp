#include "engine/preference/losses.h"

#include <algorithm>
#include <array>

#include "base/error.h"

namespace sherd::engine {
namespace {

using config::Preference;
using config::PreferenceLoss;

/// The term in the place of a log-ratio where another divergence than the reverse KL keeps the policy near
/// the reference: f'(t) of t = π/π_ref (Wang et al. 2024, "Beyond reverse KL", table 1).
Derived divergent(const Derived& ratio, const Preference& keys) {
  switch (keys.divergence) {
    case config::Divergence::reverse_kl:
      return ratio;
    case config::Divergence::forward_kl:
      return 1 - exp(-ratio);
    case config::Divergence::js_divergence:
      return 0.6931471805599453 + log_sigmoid(ratio);
    case config::Divergence::alpha_divergence: {
      const double power = keys.divergence_alpha - 1;
      if (std::abs(power) < 1e-6) return ratio;
      const Derived t = power * ratio;
      return (exp(t.value > 80 ? Derived(80) : t) - 1) / power;
    }
  }
  return ratio;
}

/// A pair as losses see it.
struct Pair {
  const PairScores& of;
  const Preference& keys;
  Derived chosen, rejected;              ///< log-ratios
  Derived chosen_score, rejected_score;  ///< the same as the divergence has them

  Derived margin() const { return keys.beta * (chosen_score - rejected_score); }
  /// −(1 − ε)·log σ(x) − ε·log σ(−x)
  Derived smoothed(const Derived& x) const {
    const double e = keys.label_smoothing;
    return e == 0 ? -log_sigmoid(x) : -(1 - e) * log_sigmoid(x) - e * log_sigmoid(-x);
  }
  Derived mean_difference(const Derived& a, const Derived& b) const {
    return a / of.chosen_targets - b / of.rejected_targets;
  }
};

Derived dpo(const Pair& p) {
  return p.smoothed(p.margin());
}
Derived hinge(const Pair& p) {
  return relu(1 - p.margin());
}
Derived ipo(const Pair& p) {
  return square(p.mean_difference(p.chosen_score, p.rejected_score) - 1 / (2 * p.keys.beta));
}
Derived exo_pair(const Pair& p) {
  const double e = p.keys.label_smoothing;
  const Derived x = p.margin();
  return sigmoid(x) * (log_sigmoid(x) - std::log1p(-e)) + sigmoid(-x) * (log_sigmoid(-x) - std::log(e));
}
Derived nca_pair(const Pair& p) {
  const Derived a = p.keys.beta * p.chosen, b = p.keys.beta * p.rejected;
  return -log_sigmoid(a) - 0.5 * log_sigmoid(-a) - 0.5 * log_sigmoid(-b);
}
Derived robust(const Pair& p) {
  const double e = p.keys.label_smoothing;
  const Derived x = p.margin();
  return (-(1 - e) * log_sigmoid(x) + e * log_sigmoid(-x)) / (1 - 2 * e);
}
Derived bco_pair(const Pair& p) {
  return -log_sigmoid(p.keys.beta * p.chosen) - log_sigmoid(-(p.keys.beta * p.rejected));
}
Derived sppo_hard(const Pair& p) {
  const double half = 0.5 / p.keys.beta;
  return square(p.chosen - half) + square(p.rejected + half);
}
Derived aot(const Pair& p) {
  return p.smoothed(p.keys.beta * (p.of.chosen - p.of.rejected - p.of.partner_of_chosen));
}
/// Each text lies beside one of another pair, in whose loss it is, too: half of its value counts in each, and
/// its derivative where the text is its own.
Derived aot_unpaired(const Pair& p) {
  const Derived a = p.smoothed(p.keys.beta * (p.chosen - p.of.partner_of_chosen)),
                b = p.smoothed(p.keys.beta * (p.of.partner_of_rejected - p.rejected));
  return {(a.value + b.value) / 2, a.by_chosen, b.by_rejected};
}
Derived apo_zero(const Pair& p) {
  return 1 - sigmoid(p.keys.beta * p.chosen) + sigmoid(p.keys.beta * p.rejected);
}
Derived apo_down(const Pair& p) {
  return sigmoid(p.keys.beta * p.chosen) + 1 - sigmoid(p.keys.beta * (p.chosen - p.rejected));
}
Derived discopop(const Pair& p) {
  const Derived x = p.margin(), mix = sigmoid(x / p.keys.discopop_tau);
  return -log_sigmoid(x) * (1 - mix) + exp(-x) * mix;
}
Derived sigmoid_norm(const Pair& p) {
  return -log_sigmoid(p.keys.beta * p.mean_difference(p.chosen_score, p.rejected_score));
}
Derived orpo(const Pair& p) {
  const Derived a = p.of.chosen / p.of.chosen_targets, b = p.of.rejected / p.of.rejected_targets;
  return -p.keys.beta * log_sigmoid(a - b - (log_one_minus_exp(a) - log_one_minus_exp(b)));
}
Derived simpo(const Pair& p) {
  return p.smoothed(p.keys.beta * p.mean_difference(p.of.chosen, p.of.rejected) - p.keys.simpo_gamma);
}
Derived bradley_terry(const Pair& p) {
  return -log_sigmoid(p.of.chosen - p.of.rejected) +
         p.keys.center_rewards * square(p.of.chosen + p.of.rejected);
}

struct NamedLoss {
  PreferenceLoss loss;
  Derived (*of)(const Pair&);
};
/// Every loss of pairs: a function, and a line.
constexpr std::array<NamedLoss, 17> losses{{{PreferenceLoss::sigmoid, dpo},
                                            {PreferenceLoss::hinge, hinge},
                                            {PreferenceLoss::ipo, ipo},
                                            {PreferenceLoss::exo_pair, exo_pair},
                                            {PreferenceLoss::nca_pair, nca_pair},
                                            {PreferenceLoss::robust, robust},
                                            {PreferenceLoss::bco_pair, bco_pair},
                                            {PreferenceLoss::sppo_hard, sppo_hard},
                                            {PreferenceLoss::aot, aot},
                                            {PreferenceLoss::aot_unpaired, aot_unpaired},
                                            {PreferenceLoss::apo_zero, apo_zero},
                                            {PreferenceLoss::apo_down, apo_down},
                                            {PreferenceLoss::discopop, discopop},
                                            {PreferenceLoss::sigmoid_norm, sigmoid_norm},
                                            {PreferenceLoss::orpo, orpo},
                                            {PreferenceLoss::simpo, simpo},
                                            {PreferenceLoss::bradley_terry, bradley_terry}}};

}  // namespace

Derived pair_loss(PreferenceLoss loss, const PairScores& pair, const Preference& keys) {
  const Derived chosen = pair.chosen_ratio(), rejected = pair.rejected_ratio();
  const Pair p{pair, keys, chosen, rejected, divergent(chosen, keys), divergent(rejected, keys)};
  for (const NamedLoss& each : losses)
    if (each.loss == loss) return each.of(p);
  fail(ErrorKind::usage, "'", config::name_of(loss), "' is no loss of pairs");
}

Derived single_loss(PreferenceLoss loss, bool desirable, double ratio, double baseline,
                    const Preference& keys) {
  const Derived r(ratio, 1, 0);
  const double zero = loss == PreferenceLoss::kto ? baseline : 0;
  return desirable ? keys.desirable_weight * (1 - sigmoid(keys.beta * (r - zero)))
                   : keys.undesirable_weight * (1 - sigmoid(keys.beta * (zero - r)));
}

bool looks_at_partners(const std::vector<config::PreferenceTerm>& terms) {
  return std::any_of(terms.begin(), terms.end(), [](const config::PreferenceTerm& term) {
    return term.loss == PreferenceLoss::aot || term.loss == PreferenceLoss::aot_unpaired;
  });
}

}  // namespace sherd::engine
