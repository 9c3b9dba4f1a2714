#include <algorithm>
#include <cmath>

#include "config/sections/tables.h"

// The optimizers that a configuration can name, each an entry of optimizers() below.

namespace sherd::config {
namespace {

using Rule = OptimizerRule;
using RuleKey = Key<Rule>;

struct Entry {
  const char* name;  ///< `type`
  Rule defaults;
  std::vector<RuleKey> own;  ///< its keys of `params` beside those that all types have
  /// Keys whose default is not DeepSpeed's, with what the log says where they are not given.
  std::vector<std::pair<const char*, const char*>> unlike_deepspeed = {};
  Table<Rule> params = {};  ///< all of them; entries() fills it
};

/// A row of the options O of a type, or of what these descend from.
template <class O, class U>
RuleKey of(Key<U> key) {
  return lifted<Rule>(
      key, [](auto& rule) -> auto& { return rule.template as<O>(); });
}

// ---- rows that several types have ----

RuleKey lr() {
  return real("lr", &Rule::lr, "0.0003", 0).means("learning rate of a step, where no scheduler sets it");
}

RuleKey weight_decay() {
  return real("weight_decay", &Rule::weight_decay, "0.2", 0)
      .means("decay of the weights, but of biases and of the gains and offsets of norms",
             "decays every parameter of a group; Adagrad's on CPUs acts in the sum of squares alone");
}

template <class O>
RuleKey betas() {
  const auto read = [](Betas& betas, const Value& value) {
    const auto both = read_numbers(value, 2, "two numbers such as [0.9, 0.999]", 0, 1);
    for (std::size_t i = 0; i < 2; ++i)
      if (both[i] == 1) value.item(i).error("must be below 1");
    betas.beta1 = both[0], betas.beta2 = both[1];
  };
  return of<O>(
      custom<Betas>("betas", "[0.9, 0.95]", read,
                    [](const Betas& betas) {
                      return list_of(std::array{betas.beta1, betas.beta2});
                    })
          .takes({"two numbers from 0 to below 1",
                  R"({"type": "array", "items": {"type": "number", "minimum": 0, "exclusiveMaximum": 1}, )"
                  R"("minItems": 2, "maxItems": 2})"})
          .means("shares of the means of gradients and of their squares that stay with a step; Lion: of the "
                 "momentum in the step, and of that which stays; Muon: of the AdamW beside it"));
}

template <class O>
RuleKey eps() {
  return of<O>(real("eps", &O::eps, "1e-6", 0)
                   .means("added to the root of the second moment; LARS: to its denominator; Muon: of the "
                          "AdamW beside it"));
}

template <class O>
RuleKey bias_correction() {
  return of<O>(boolean("bias_correction", &O::bias_correction)
                   .means("moments are divided by 1 − βᵗ", "Lamb corrects the rate instead"));
}

template <class O>
RuleKey momentum() {
  return of<O>(real("momentum", &O::momentum, "0.8", 0)
                   .means("share of the momentum that stays with a step; Muon: below 1"));
}

template <class O>
RuleKey nesterov() {
  return of<O>(
      boolean("nesterov", &O::nesterov).means("look ahead along the momentum; needs a momentum above 0"));
}

template <class O>
std::vector<RuleKey> trust_bounds() {
  return {of<O>(real("max_coeff", &O::max_coeff, "5.0", 0).means("largest trust ratio")),
          of<O>(real("min_coeff", &O::min_coeff, "0.1", 0).means("smallest trust ratio"))};
}

template <class O>
RuleKey freeze_step() {
  return of<O>(integer("freeze_step", &O::freeze_step, "23000", 1)
                   .means("steps after which replicas exchange compressed momentum in place of gradients",
                          "counts one more than it updates"));
}

/// Nothing but a default depends on it; dump() tells the decay.
RuleKey torch_adam() {
  return custom<Rule>(
             "torch_adam", "true",
             [](Rule&, const Value& value) {
               // DeepSpeed takes any word for true: "torch_impl".
               if (!value.node.is(Node::Kind::string) || value.node.text.empty()) value.boolean();
               value.note("Sherd has one Adam; only PyTorch's default weight decay of 0.01 is taken over");
             })
      .takes({"true or false", R"({"type": ["boolean", "string"]})"})
      .means("takes over the default `weight_decay` of PyTorch's Adam, 0.01, and nothing else",
             "takes PyTorch's Adam", by("`false`"));
}

// ---- rows of one type ----

RuleKey adam_w_mode() {
  return of<AdamOptions>(boolean("adam_w_mode", &AdamOptions::adam_w_mode)
                             .means("decoupled decay, as AdamW's; false: L2, in the gradient"));
}

std::vector<RuleKey> adagrad_rows() {
  using O = AdagradOptions;
  return {of<O>(real("lr_decay", &O::lr_decay, "0.01", 0)
                    .means("the rate is divided by 1 + this for each step done")),
          of<O>(real("initial_accumulator_value", &O::initial_accumulator_value, "0.1", 0)
                    .means("the sum of squares begins at this")),
          eps<O>()};
}

std::vector<RuleKey> lars_rows() {
  using O = LarsOptions;
  return {
      momentum<O>(), eps<O>(),
      of<O>(real("trust_coefficient", &O::trust_coefficient, "0.02", 0).means("factor of the trust ratio")),
      of<O>(boolean("clip", &O::clip).means("the rate is at most `lr` (LARC)"))};
}

std::vector<RuleKey> lamb_rows() {
  using O = LambOptions;
  std::vector<RuleKey> out = {betas<O>(), eps<O>(), bias_correction<O>()};
  append(out, trust_bounds<O>());
  return out;
}

std::vector<RuleKey> nvlamb_rows() {
  using O = NvLambOptions;
  return {
      betas<O>(), eps<O>(), bias_correction<O>(),
      of<O>(
          real("normalize_above", &O::normalize_above, "1.0", 0)
              .means("gradients are divided by their global norm where that is larger; 1: apex's version"))};
}

std::vector<RuleKey> one_bit_lamb_rows() {
  using O = OneBitLambOptions;
  std::vector<RuleKey> out = {betas<O>(), eps<O>(), freeze_step<O>()};
  append(out, trust_bounds<O>());
  append(out, {of<O>(real("coeff_beta", &O::coeff_beta, "0.8", 0)
                         .means("share of the mean of trust ratios that stays with a step; below 1")),
               of<O>(real("factor_max", &O::factor_max, "3.0", 0)
                         .means("after `freeze_step`: largest factor on that mean")),
               of<O>(real("factor_min", &O::factor_min, "0.6", 0)
                         .means("after `freeze_step`: smallest factor on that mean")),
               of<O>(real("factor_threshold", &O::factor_threshold, "0.05", 0)
                         .means("after `freeze_step`: largest relative change of that factor in a step"))});
  return out;
}

Key<MuonOptions> ns_coefficients() {
  const auto read = [](MuonOptions& muon, const Value& value) {
    const auto all = read_numbers(value, 3, "three numbers such as [3.4445, -4.775, 2.0315]");
    muon.ns_coefficients = {all[0], all[1], all[2]};
    if (all[2] < 0) value.error("needs a last coefficient of 0 or more");
  };
  return custom<MuonOptions>("ns_coefficients", "[2.0, -1.5, 0.5]", read,
                             [](const MuonOptions& muon) { return list_of(muon.ns_coefficients); })
      .takes(numbers("three numbers, the last >= 0", 3))
      .means("a, b, c of X ← a·X + b·(X·Xᵀ)·X + c·(X·Xᵀ)²·X", "these, always");
}

std::vector<RuleKey> muon_rows() {
  using O = MuonOptions;
  return {
      momentum<O>(), nesterov<O>(),
      of<O>(integer("ns_steps", &O::ns_steps, "6", 1, 99).means("Newton–Schulz iterations", "5, always")),
      of<O>(ns_coefficients()),
      of<O>(real("ns_eps", &O::ns_eps, "1e-6", 0)
                .means("what a matrix's norm is at least taken for; above 0", "1e-7, always")),
      of<O>(
          choice("adjust_lr_fn", &O::adjust_lr_fn, {"original", "match_rms_adamw", "spectral_unclamped"},
                 "\"match_rms_adamw\"")
              .means(
                  "the step is multiplied by: original √max(1, rows/columns); match_rms_adamw 0.2·√max(rows, "
                  "columns), which makes AdamW's rates fit; spectral_unclamped √(rows/columns)",
                  "original, always")),
      // finish_rule() sorts the rates out, whatever the order in which they stand.
      custom<Rule>("muon_lr", "0.02", [](Rule&, const Value& value) { value.real(0); })
          .takes(reals(0))
          .means("rate of the matrices; then `lr` is that of the rest", by("`lr`")),
      of<O>(real("adam_lr", &O::adam_lr, "0.0005", 0)
                .means("rate of what Muon leaves to AdamW: embeddings, the head, norms, biases", by("`lr`"))),
      betas<O>(), eps<O>()};
}

// ---- the types ----

std::vector<RuleKey> adam_rows(bool decouples_always) {
  using O = AdamOptions;
  std::vector<RuleKey> out = {betas<O>(), eps<O>(), bias_correction<O>()};
  if (!decouples_always) out.push_back(adam_w_mode());
  out.push_back(torch_adam());
  return out;
}

/// In the order of OptimizerType.
std::vector<Entry> optimizers() {
  using enum OptimizerType;
  using OneBit = OneBitAdamOptions;
  return {{"Adam", {.type = adam, .options = AdamOptions()}, adam_rows(false)},
          {"AdamW", {.type = adamw, .options = AdamOptions()}, adam_rows(true)},
          {"SGD", {.type = sgd, .options = SgdOptions()}, {momentum<SgdOptions>(), nesterov<SgdOptions>()}},
          {"Lion",
           {.type = lion, .lr = 1e-4, .options = LionOptions()},
           {betas<LionOptions>()},
           {{"lr", "not given: 1e-4, as published; DeepSpeed takes 1e-3"},
            {"betas", "not given: [0.9, 0.99], as published; DeepSpeed takes [0.9, 0.999]"}}},
          {"Adagrad", {.type = adagrad, .lr = 1e-2, .options = AdagradOptions()}, adagrad_rows()},
          {"Lamb", {.type = lamb, .options = LambOptions()}, lamb_rows()},
          {"NVLamb", {.type = nvlamb, .options = NvLambOptions()}, nvlamb_rows()},
          {"LARS", {.type = lars, .options = LarsOptions()}, lars_rows()},
          {"OneBitAdam",
           {.type = onebitadam, .options = OneBit()},
           {betas<OneBit>(), eps<OneBit>(), freeze_step<OneBit>()}},
          {"OneBitLamb", {.type = onebitlamb, .options = OneBitLambOptions()}, one_bit_lamb_rows()},
          {"Muon",
           {.type = muon, .weight_decay = 0.1, .options = MuonOptions()},
           muon_rows(),
           {{"lr", "not given: 1e-3, as torch.optim.Muon has it; DeepSpeed takes 0.02 for the matrices"},
            {"weight_decay", "not given: 0.1, as torch.optim.Muon has it; DeepSpeed takes 0"}}},
          {"AdamW8bit", {.type = adamw8bit, .options = AdamOptions()}, adam_rows(true)}};
}

const std::vector<Entry>& entries() {
  static const std::vector<Entry> all = [] {
    std::vector<Entry> out = optimizers();
    for (Entry& entry : out) {
      std::vector<RuleKey> params = {lr(), weight_decay()};
      append(params, foreign_keys<Rule>("optimizer.params"));
      append(params, std::move(entry.own));
      append(params, foreign_keys<Rule>("optimizer.params", entry.name));
      for (RuleKey& row : params)
        for (const auto& [key, note] : entry.unlike_deepspeed)
          if (row.name == key) row.difference = note;
      entry.params = {Auto::needs_caller, std::move(params)};
    }
    return out;
  }();
  return all;
}

const Entry& entry_of(OptimizerType type) {
  return entries().at(static_cast<std::size_t>(type));
}

// Optimizers that DeepSpeed or PyTorch would accept by name.
const std::vector<std::string> foreign_optimizers = {"MuAdam", "MuAdamW",    "MuSGD",    "RMSprop", "NAdam",
                                                     "RAdam",  "Adamax",     "Adadelta", "ASGD",    "Rprop",
                                                     "LBFGS",  "SparseAdam", "Adafactor"};

}  // namespace

std::vector<std::string> optimizer_names() {
  std::vector<std::string> out;
  for (const Entry& entry : entries()) out.push_back(entry.name);
  return out;
}

std::string known_optimizers() {
  const std::vector<std::string> all = optimizer_names();
  std::string out = all[0];
  for (std::size_t i = 1; i < all.size(); ++i) out += (i + 1 < all.size() ? ", " : " and ") + all[i];
  return out;
}

const char* name_of(OptimizerType type) {
  return entry_of(type).name;
}

OptimizerRule default_rule(OptimizerType type) {
  return entry_of(type).defaults;
}

std::vector<OptimizerType> optimizer_types() {
  std::vector<OptimizerType> out;
  for (const Entry& entry : entries()) out.push_back(entry.defaults.type);
  return out;
}

Betas* OptimizerRule::betas() {
  return const_cast<Betas*>(static_cast<const OptimizerRule*>(this)->betas());
}

const Betas* OptimizerRule::betas() const {
  return std::visit(
      [](const auto& own) -> const Betas* {
        if constexpr (std::is_base_of_v<Betas, std::decay_t<decltype(own)>>)
          return &own;
        else
          return nullptr;
      },
      options);
}

void OptimizerRule::other_options() const {
  fail(ErrorKind::config, "a rule of the type ", name_of(type), " was asked for options of another: ",
       "config::default_rule() gives a type and its options (parameter_groups have `type`)");
}

bool is_finite(const OptimizerRule& rule) {
  const Node params = written(optimizer_params(rule.type), rule);
  const auto good = [](const Node& node) { return std::isfinite(node.number); };
  return std::all_of(params.members.begin(), params.members.end(), [&](const auto& member) {
    const std::vector<Node>& items = member.second.items;
    return good(member.second) && std::all_of(items.begin(), items.end(), good);
  });
}

OptimizerType read_optimizer_type(const Value& type) {
  if (edit_distance(type.text(), "ZeroOneAdam") == 0)
    type.error("0/1 Adam takes steps that only some replicas know of, so that their weights differ between ",
               "exchanges: use OneBitAdam, whose replicas always agree");
  for (const std::string& name : foreign_optimizers)
    if (edit_distance(type.text(), name) == 0)
      type.error(type.node.brief(), " is not in this build; use one of ", known_optimizers());
  return static_cast<OptimizerType>(type.choice(optimizer_names()));
}

const Table<OptimizerRule>& optimizer_params(OptimizerType type) {
  return entry_of(type).params;
}

void note_other_defaults(OptimizerType type, const std::string& params, const Given& given,
                         Context& context) {
  for (const auto& [key, note] : entry_of(type).unlike_deepspeed)
    if (!given.contains(key)) context.note(join(params, key), note);
}

}  // namespace sherd::config
