// Section training.preference.
#include <algorithm>

#include "base/text/excerpt.h"
#include "config/sections/tables.h"

namespace sherd::config {
namespace {

using P = Preference;

// In the order of the enum.
const std::vector<std::string> loss_names{
    "sigmoid",   "hinge", "ipo",          "exo_pair", "nca_pair",          "robust",       "bco_pair",
    "sppo_hard", "aot",   "aot_unpaired", "apo_zero", "apo_down",          "discopop",     "sigmoid_norm",
    "sft",       "orpo",  "simpo",        "kto",      "apo_zero_unpaired", "bradley_terry"};

/// No effect where none of these losses is learned.
auto only_with(std::initializer_list<PreferenceLoss> any, const char* names) {
  return idle([any = std::vector(any), names](const Config& config) {
    const std::vector<PreferenceTerm> terms = config.preference_terms();
    const bool used = std::any_of(terms.begin(), terms.end(), [&](const PreferenceTerm& term) {
      return std::find(any.begin(), any.end(), term.loss) != any.end();
    });
    return used ? std::string() : cat("no effect: only ", names, " read it");
  });
}

Key<P> losses_key() {
  const auto read = [](P& preference, const Value& value) {
    const auto loss = [](const Value& one) {
      return static_cast<PreferenceLoss>(one.choice(loss_names, {}));
    };
    preference.losses.clear();
    if (value.node.is(Node::Kind::string)) return void(preference.losses.push_back(loss(value)));
    value.expect(Node::Kind::array);
    for (std::size_t i = 0; i < value.node.items.size(); ++i)
      preference.losses.push_back(loss(value.item(i)));
  };
  std::string words;
  for (const std::string& name : loss_names) words += cat(words.empty() ? "\"" : ", \"", name, "\"");
  return custom<P>("loss_type", "[\"sigmoid\", \"sft\"]", read,
                   [](const P& preference) {
                     std::vector<std::string> names;
                     for (const PreferenceLoss loss : preference.losses) names.emplace_back(name_of(loss));
                     return list_of(names);
                   })
      .takes({"string, or list of strings",
              cat(R"({"type": ["string", "array"], "items": {"enum": [)", words, "]}}")})
      .means(
          "the loss of a pair, or several that are added by `loss_weights`, of `sigmoid`, `hinge`, `ipo`, "
          "`exo_pair`, `nca_pair`, `robust`, `bco_pair`, `sppo_hard`, `aot`, `aot_unpaired`, `apo_zero`, "
          "`apo_down`, `discopop`, `sigmoid_norm`, `sft`, `orpo`, `simpo`; of `kto`: `kto`, "
          "`apo_zero_unpaired`; empty: the objective's, `sigmoid` of `dpo` ([more](preferences.md#losses))",
          Concerns::training);
}

Key<P> weights_key() {
  return custom<P>(
             "loss_weights", "[0.5]",
             [](P& preference, const Value& value) {
               preference.weights.clear();
               for (std::size_t i = 0; i < length_of(value, is_number, "numbers"); ++i)
                 preference.weights.push_back(value.item(i).real(0));
             },
             [](const P& preference) { return list_of(preference.weights); })
      .takes({"list of numbers", R"({"type": "array", "items": {"type": "number"}})"})
      .means("one for each of `loss_type`; empty: 1 each", Concerns::training);
}

void check_preference(const P& preference, const Value& section) {
  const std::size_t losses = std::max<std::size_t>(1, preference.losses.size());
  if (!preference.weights.empty() && preference.weights.size() != losses)
    section.error("loss_weights has ", counted(std::ssize(preference.weights), "number"), " for ", losses,
                  " of loss_type: give one for each");
}

}  // namespace

std::string_view name_of(PreferenceLoss loss) {
  return loss_names.at(static_cast<std::size_t>(loss));
}

Key<Training> preference_key() {
  using L = PreferenceLoss;
  static const std::initializer_list<L> smoothed = {L::sigmoid, L::exo_pair, L::robust,
                                                    L::aot,     L::simpo,    L::aot_unpaired};
  const Table<P> table{
      Auto::is_a_value,
      {losses_key(), weights_key(),
       real("beta", &P::beta, "0.2", 0, infinity, true)
           .means("how strongly a pair counts, or how near the reference is kept; of `ipo` its τ",
                  Concerns::training),
       real("label_smoothing", &P::label_smoothing, "0.1", 0, 0.499)
           .means(
               "the share of pairs that are taken to be the wrong way round: of `sigmoid` (cDPO), `robust`, "
               "`exo_pair`, which needs it above 0, `aot` and `simpo`",
               only_with(smoothed, "sigmoid, robust, exo_pair, aot and simpo"), Concerns::training),
       real("rpo_alpha", &P::rpo_alpha, "1", 0)
           .means(
               "weight of the mean loss of the chosen answers' tokens, beside the others; the same as `sft` "
               "among `loss_type`",
               Concerns::training),
       real("ld_alpha", &P::ld_alpha, "0.5", 0, 1)
           .means("how much tokens of an answer count beyond as many as the shorter of its pair has (LD-DPO)",
                  Concerns::training),
       choice("f_divergence_type", &P::divergence,
              {"reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"}, "\"js_divergence\"")
           .means("what keeps the policy near the reference: of `sigmoid`, `sigmoid_norm`, `hinge`, `ipo`, "
                  "`exo_pair`, `robust`, `discopop` and `sft`",
                  Concerns::training),
       real("f_alpha_divergence_coef", &P::divergence_alpha, "0.3", 0)
           .means("of `alpha_divergence`",
                  idle(
                      [](const Config& c) {
                        return c.training.preference.divergence != Divergence::alpha_divergence;
                      },
                      "no effect: f_divergence_type is not alpha_divergence"),
                  Concerns::training),
       real("discopop_tau", &P::discopop_tau, "0.1", 0, infinity, true)
           .means("of `discopop`", only_with({L::discopop}, "discopop does"), Concerns::training),
       real("simpo_gamma", &P::simpo_gamma, "1")
           .means("the margin of `simpo`", only_with({L::simpo}, "simpo does"), Concerns::training),
       real("cpo_alpha", &P::cpo_alpha, "0.5", 0)
           .means("of objective `cpo`: weight of the mean loss of the chosen answers' tokens",
                  idle([](const Config& c) { return c.objective() != Objective::cpo; },
                       "no effect: the objective is not cpo"),
                  Concerns::training),
       real("desirable_weight", &P::desirable_weight, "1.33", 0)
           .means("of objective `kto`: weight of texts with the label true",
                  only_with({L::kto, L::apo_zero_unpaired}, "kto's losses"), Concerns::training),
       real("undesirable_weight", &P::undesirable_weight, "1.33", 0)
           .means("the same of those with false", only_with({L::kto, L::apo_zero_unpaired}, "kto's losses"),
                  Concerns::training),
       real("center_rewards_coefficient", &P::center_rewards, "0.01", 0)
           .means("of objective `reward`: weight of the square of the sum of a pair's rewards",
                  only_with({L::bradley_terry}, "objective reward does"), Concerns::training),
       choice("reference", &P::reference, {"auto", "adapter", "precomputed", "copy", "none"}, "\"copy\"")
           .means(
               "where the reference's log-probabilities come from: `adapter`, from the model without its "
               "adapter, in each step; `precomputed`, from a pass over the data before the first step, kept "
               "in "
               "`reference_file`; `copy`, from a second, frozen model, as `init_from` has it, in each step; "
               "`none`: there is no reference ([more](preferences.md#the-reference)). auto: `adapter` where "
               "one trains that can be switched off, else `precomputed`"),
       text("reference_file", &P::reference_file, "\"runs/a.reference\"")
           .means("where precomputed log-probabilities are kept", Concerns::machine,
                  by("`reference` in `training.save_dir`, or `data.path` with `.reference`"))},
      [](P& preference, const Given&, const Value& section) { check_preference(preference, section); }};
  Key<Training> key = section("preference", &Training::preference, table);
  key.example = "{\"beta\": 0.2}";
  key.idle = [](const Config& config) {
    return config.learns_preferences() ? "" : "no effect: the objective is none of preferences";
  };
  key.write = [write = key.write](const Training& training, Selection selection) {
    const bool unused = training.objective < Objective::dpo && training.preference == Preference();
    return selection == Selection::told && unused ? Node() : write(training, selection);
  };
  return key;
}

std::vector<PreferenceTerm> Config::preference_terms() const {
  using L = PreferenceLoss;
  const Preference& keys = training.preference;
  std::vector<PreferenceTerm> out;
  switch (objective()) {
    case Objective::orpo:
      out = {{L::orpo, 1}, {L::sft, 1}};
      break;
    case Objective::simpo:
      out = {{L::simpo, 1}};
      break;
    case Objective::cpo:
      out = {{L::sigmoid, 1}};
      if (keys.cpo_alpha > 0) out.push_back({L::sft, keys.cpo_alpha});
      break;
    case Objective::kto:
      out = {{L::kto, 1}};
      break;
    case Objective::reward:
      return {{L::bradley_terry, 1}};
    case Objective::dpo:
      out = {{L::sigmoid, 1}};
      break;
    default:
      return {};
  }
  if (!keys.losses.empty()) out.clear();
  if (keys.losses.empty() && !keys.weights.empty()) out.front().weight = keys.weights.front();
  for (std::size_t i = 0; i < keys.losses.size(); ++i)
    out.push_back({keys.losses[i], keys.weights.empty() ? 1 : keys.weights[i]});
  if (keys.rpo_alpha > 0) out.push_back({L::sft, keys.rpo_alpha});
  return out;
}

bool Config::has_baseline() const {
  const std::vector<PreferenceTerm> terms = preference_terms();
  return reference() != Reference::none &&
         std::any_of(terms.begin(), terms.end(),
                     [](const PreferenceTerm& term) { return term.loss == PreferenceLoss::kto; });
}

Reference Config::reference() const {
  const Reference asked = training.preference.reference;
  switch (objective()) {
    case Objective::dpo:
    case Objective::kto:
      break;
    default:
      return Reference::none;
  }
  if (asked != Reference::automatic) return asked;
  return training.adapter.can_be_switched_off() ? Reference::adapter : Reference::precomputed;
}

void check_preferences(const Config& config, const Value& file) {
  if (!config.learns_preferences() || !config.model) return;
  const Node* training = file.node.find("training");
  const Node* section = training->find("preference");
  const Value at{section ? *section : *training, section ? "training.preference" : "training", file.context};
  const Preference& keys = config.training.preference;
  const std::string_view objective = name_of(config.objective());
  const bool pairs = config.objective() != Objective::kto;
  using L = PreferenceLoss;
  for (const PreferenceTerm& term : config.preference_terms()) {
    const bool of_kto = term.loss == L::kto || term.loss == L::apo_zero_unpaired;
    if (of_kto == pairs || (term.loss == L::bradley_terry) != (config.objective() == Objective::reward))
      at.error("loss_type \"", name_of(term.loss), "\" is not learned with the objective \"", objective,
               of_kto                          ? "\": take \"kto\""
               : term.loss == L::bradley_terry ? "\": take \"reward\""
                                               : "\", whose answers are judged by themselves: take \"dpo\"");
    if (!keys.losses.empty() && config.objective() != Objective::dpo && config.objective() != Objective::kto)
      at.error("loss_type is of the objectives \"dpo\" and \"kto\"; \"", objective,
               "\" is a loss of its own");
    const bool divergent = term.loss == L::sigmoid || term.loss == L::sigmoid_norm || term.loss == L::hinge ||
                           term.loss == L::ipo || term.loss == L::exo_pair || term.loss == L::robust ||
                           term.loss == L::discopop || term.loss == L::sft;
    if (keys.divergence != Divergence::reverse_kl && !divergent)
      at.error("loss_type \"", name_of(term.loss), "\" is of f_divergence_type \"reverse_kl\" alone");
    if (keys.divergence != Divergence::reverse_kl && config.reference() == Reference::none)
      at.error(
          "f_divergence_type is of how far the policy is from a reference, and there is none: leave it out");
    if (term.loss == L::exo_pair && keys.label_smoothing == 0)
      at.error("loss_type \"exo_pair\" takes the logarithm of label_smoothing: give one above 0 (0.001)");
    if ((term.loss == L::orpo || term.loss == L::simpo) && config.reference() != Reference::none)
      at.error("loss_type \"", name_of(term.loss),
               "\" has no reference, and others here would: take the "
               "objective \"",
               name_of(term.loss), "\", or set reference to \"none\"");
  }
  const auto learns = [terms = config.preference_terms()](L loss) {
    return std::any_of(terms.begin(), terms.end(),
                       [loss](const PreferenceTerm& t) { return t.loss == loss; });
  };
  if (learns(L::aot) && learns(L::aot_unpaired))
    at.error("loss_type \"aot\" and \"aot_unpaired\" look for other partners of a pair: take one of them");
  if (config.reference() == Reference::adapter && !config.training.adapter.can_be_switched_off())
    at.error("reference \"adapter\" is the model without its adapter, and ",
             config.training.adapter.type == AdapterType::none
                 ? "there is none (training.adapter)"
                 : "this one changes weights that stay behind (modules_to_save, trainable_token_indices, "
                   "pissa, olora)",
             ": take \"precomputed\" or \"copy\"");
  if (config.training.adapter.has_prompt())
    at.error(
        "preferences are learned by adapters within the model, and training.adapter is a prompt: take "
        "another type");
  if (keys.ld_alpha < 1 && (config.parallel.context > 1 || !pairs))
    at.error(pairs ? "ld_alpha counts the tokens of whole answers, of which context ranks hold parts: set "
                     "parallel.context to 1, or ld_alpha to 1"
                   : "ld_alpha compares the answers of a pair, and \"kto\" has none");
}

}  // namespace sherd::config
