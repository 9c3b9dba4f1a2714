#include "config/tables.h"

// The optimizers that a configuration can name, each an entry of optimizers() below.

namespace sherd::config {
namespace {

using Rule = OptimizerRule;

/// A key of `params`, and what dump() says of it.
struct Param {
  Key<Rule> key;
  /// Null where the key has no effect; nothing where it is not set.
  std::function<std::optional<ParamValue>(const Rule&)> value;
};

struct Entry {
  const char* name;  ///< `type`
  Rule defaults;
  std::vector<Param> params;
  /// Keys whose default is not DeepSpeed's, with what the log says where they are not given.
  std::vector<std::pair<const char*, const char*>> unlike_deepspeed = {};
};

Param number(const char* name, double Rule::*field, const char* example) {
  return {real(name, field, example, 0), [field](const Rule& rule) { return rule.*field; }};
}
Param flag(const char* name, bool Rule::*field) {
  return {boolean(name, field), [field](const Rule& rule) { return rule.*field; }};
}
Param steps(const char* name, std::int64_t Rule::*field, const char* example) {
  return {integer(name, field, example, 1), [field](const Rule& rule) { return rule.*field; }};
}
Param without_effect(Key<Rule> key) {
  return {std::move(key), nullptr};
}

/// Of every type that has the key.
std::vector<Text> common_texts() {
  return {
      {"lr", "learning rate of a step, where no scheduler sets it"},
      {"weight_decay", "decay of the weights, but of biases and of the gains and offsets of norms",
       "decays every parameter of a group; Adagrad's on CPUs acts in the sum of squares alone"},
      {"max_grad_norm", "largest norm of the gradients"},
      {"maximize", "climb instead of descend"},
      {"foreach", "PyTorch: one call for all parameters"},
      {"fused", "PyTorch: one kernel per step"},
      {"capturable", "PyTorch: a step that CUDA graphs can hold"},
      {"differentiable", "PyTorch: a step with a gradient"},
      {"betas",
       "shares of the means of gradients and of their squares that stay with a step; Lion: of the momentum "
       "in the "
       "step, and of that which stays; Muon: of the AdamW beside it"},
      {"eps",
       "added to the root of the second moment; LARS: to its denominator; Muon: of the AdamW beside it"},
      {"bias_correction", "moments are divided by 1 − βᵗ", "Lamb corrects the rate instead"},
      {"adam_w_mode", "decoupled decay, as AdamW's; false: L2, in the gradient"},
      {"torch_adam", "takes over the default `weight_decay` of PyTorch's Adam, 0.01, and nothing else",
       "takes PyTorch's Adam"},
      {"amsgrad", "divide by the largest second moment so far"},
      {"fp32_optimizer_states", "moments in fp32"},
      {"momentum", "share of the momentum that stays with a step; Muon: below 1"},
      {"nesterov", "look ahead along the momentum; needs a momentum above 0"},
      {"dampening", "how little of the gradient enters the momentum"},
      {"set_grad_none", "drop gradients rather than zero them"},
      {"lr_decay", "the rate is divided by 1 + this for each step done"},
      {"initial_accumulator_value", "the sum of squares begins at this"},
  };
}

/// Of few types.
std::vector<Text> special_texts() {
  return {
      {"max_coeff", "largest trust ratio"},
      {"min_coeff", "smallest trust ratio"},
      {"eps_inside_sqrt", "add `eps` before the root is taken"},
      {"normalize_above",
       "gradients are divided by their global norm where that is larger; 1: apex's version"},
      {"trust_coefficient", "factor of the trust ratio"},
      {"clip", "the rate is at most `lr` (LARC)"},
      {"freeze_step", "steps after which replicas exchange compressed momentum in place of gradients",
       "counts one more than it updates"},
      {"cuda_aware", "MPI that reads GPU memory"},
      {"comm_backend_name", "library by which momentum travels"},
      {"coeff_beta", "share of the mean of trust ratios that stays with a step; below 1"},
      {"factor_max", "after `freeze_step`: largest factor on that mean"},
      {"factor_min", "after `freeze_step`: smallest factor on that mean"},
      {"factor_threshold", "after `freeze_step`: largest relative change of that factor in a step"},
      {"ns_steps", "Newton–Schulz iterations", "5, always"},
      {"ns_coefficients", "a, b, c of X ← a·X + b·(X·Xᵀ)·X + c·(X·Xᵀ)²·X", "these, always"},
      {"ns_eps", "what a matrix's norm is at least taken for; above 0", "1e-7, always"},
      {"adjust_lr_fn",
       "the step is multiplied by: original √max(1, rows/columns); match_rms_adamw 0.2·√max(rows, columns), "
       "which "
       "makes AdamW's rates fit; spectral_unclamped √(rows/columns)",
       "original, always"},
      derived("muon_lr", "`lr`", "rate of the matrices; then `lr` is that of the rest"),
      derived("adam_lr", "`lr`", "rate of what Muon leaves to AdamW: embeddings, the head, norms, biases"),
      {"ns_method", "how products are ordered: gram or standard"},
  };
}

std::vector<Param> common_params() {
  std::vector<Param> out = {number("lr", &Rule::lr, "0.0003"),
                            number("weight_decay", &Rule::weight_decay, "0.2")};
  out.push_back(without_effect(
      refused<Rule>("max_grad_norm", "1.0", "clip with the top-level key \"gradient_clipping\"", never)));
  out.push_back(without_effect(refused<Rule>("maximize", "true", "training minimises the loss", is_false)));
  for (const char* name : {"foreach", "fused", "capturable", "differentiable"})
    out.push_back(without_effect(
        noted<Rule>(name, Holds::boolean, "chooses among PyTorch's kernels; Sherd has one, fused")));
  return out;
}

void read_betas(Rule& rule, const Value& value) {
  const std::vector<Node>& items = value.node.items;
  if (!value.node.is(Node::Kind::array) || items.size() != 2)
    value.error("must be a list of two numbers such as [0.9, 0.999], not ", value.node.brief());
  const auto beta = [&](std::size_t i) {
    const Value item{items[i], cat(value.path, "[", i, "]"), value.context};
    const double number = item.real(0, 1);
    if (number == 1) item.error("must be below 1");
    return number;
  };
  rule.beta1 = beta(0), rule.beta2 = beta(1);
}

Param betas() {
  return {custom<Rule>("betas", "[0.9, 0.95]", read_betas).takes("two numbers from 0 to below 1"),
          [](const Rule& rule) { return std::pair(rule.beta1, rule.beta2); }};
}

Param no_amsgrad() {
  return without_effect(
      refused<Rule>("amsgrad", "true", "the AMSGrad variant is not in this build", is_false));
}

Param fp32_states() {
  return without_effect(refused<Rule>("fp32_optimizer_states", "false",
                                      "give training.moments_dtype \"bf16\" instead",
                                      [](const Value& value) { return value.boolean(); }));
}

Key<Rule> torch_adam_key() {
  Key<Rule> key =
      custom<Rule>("torch_adam", "true", [](Rule&, const Value& value) {
        // DeepSpeed takes any word for true: "torch_impl".
        if (!value.node.is(Node::Kind::string) || value.node.text.empty()) value.boolean();
        value.note("Sherd has one Adam; only PyTorch's default weight decay of 0.01 is taken over");
      }).takes("true or false");
  key.derived = "`false`";  // dump() tells the decay alone
  return key;
}

std::vector<Param> adam_params(bool decouples_always) {
  return {betas(),
          number("eps", &Rule::eps, "1e-6"),
          flag("bias_correction", &Rule::bias_correction),
          decouples_always ? without_effect(noted<Rule>("adam_w_mode", Holds::boolean,
                                                        "type AdamW decouples the decay whatever it says"))
                           : flag("adam_w_mode", &Rule::adam_w_mode),
          without_effect(torch_adam_key()),
          no_amsgrad(),
          fp32_states()};
}

std::vector<Param> one_bit_params(std::vector<Param> own = {}) {
  std::vector<Param> out = {
      betas(), number("eps", &Rule::eps, "1e-6"), steps("freeze_step", &Rule::freeze_step, "23000"),
      without_effect(refused<Rule>("eps_inside_sqrt", "true", "eps stands outside of the root", is_false)),
      no_amsgrad()};
  for (const auto& [name, holds] :
       {std::pair{"bias_correction", Holds::boolean}, std::pair{"cuda_aware", Holds::boolean},
        std::pair{"comm_backend_name", Holds::text}})
    out.push_back(without_effect(noted<Rule>(
        name, holds,
        holds == Holds::text || name[0] == 'c' ? "momentum travels by the communicator that gradients do"
                                               : "1-bit optimizers correct no bias, here as in DeepSpeed")));
  std::move(own.begin(), own.end(), std::back_inserter(out));
  return out;
}

void read_coefficients(Rule& rule, const Value& value) {
  const std::vector<Node>& items = value.node.items;
  if (!value.node.is(Node::Kind::array) || items.size() != 3)
    value.error("must be a list of three numbers such as [3.4445, -4.775, 2.0315], not ", value.node.brief());
  for (std::size_t i = 0; i < 3; ++i)
    rule.ns_coefficients[i] = Value{items[i], cat(value.path, "[", i, "]"), value.context}.real();
  if (rule.ns_coefficients[2] < 0) value.error("needs a last coefficient of 0 or more");
}

const std::vector<std::string> muon_scales = {"original", "match_rms_adamw", "spectral_unclamped"};

std::vector<Param> muon_params() {
  const auto read_scale = [](Rule& rule, const Value& value) {
    rule.adjust_lr_fn = static_cast<MuonScale>(value.choice(muon_scales));
  };
  const auto read_nesterov = [](Rule& rule, const Value& value) { rule.nesterov = value.boolean(); };
  // Sorted out by finish_rule(), whatever the order in which they stand.
  const auto read_adam_lr = [](Rule& rule, const Value& value) { rule.adam_lr = value.real(0); };
  return {
      number("momentum", &Rule::momentum, "0.9"),
      {custom<Rule>("nesterov", "false", read_nesterov).takes("true or false"),  // true by default
       [](const Rule& rule) { return rule.nesterov; }},
      {integer("ns_steps", &Rule::ns_steps, "6", 1, 99), [](const Rule& rule) { return rule.ns_steps; }},
      {custom<Rule>("ns_coefficients", "[2.0, -1.5, 0.5]", read_coefficients)
           .takes("three numbers, the last >= 0"),
       [](const Rule& rule) { return rule.ns_coefficients; }},
      number("ns_eps", &Rule::ns_eps, "1e-6"),
      {custom<Rule>("adjust_lr_fn", "\"match_rms_adamw\"", read_scale).one_of(muon_scales),
       [](const Rule& rule) { return muon_scales[static_cast<std::size_t>(rule.adjust_lr_fn)]; }},
      without_effect(
          custom<Rule>("muon_lr", "0.02", [](Rule&, const Value& value) { value.real(0); }).takes(reals(0))),
      {custom<Rule>("adam_lr", "0.0005", read_adam_lr).takes(reals(0)),
       [](const Rule& rule) { return rule.adam_lr; }},
      betas(),
      number("eps", &Rule::eps, "1e-6"),
      without_effect(refused<Rule>("adam_w_mode", "false",
                                   "what Muon leaves goes to AdamW, whose decay is decoupled",
                                   [](const Value& value) { return value.boolean(); })),
      without_effect(
          noted<Rule>("ns_method", Holds::text, "Sherd has one way to iterate, the published one"))};
}

/// In the order of OptimizerType.
std::vector<Entry> optimizers() {
  using enum OptimizerType;
  return {
      {"Adam", {.type = adam}, adam_params(false)},
      {"AdamW", {.type = adamw}, adam_params(true)},
      {"SGD",
       {.type = sgd},
       {number("momentum", &Rule::momentum, "0.9"), flag("nesterov", &Rule::nesterov),
        without_effect(refused<Rule>("dampening", "0.1", "dampening is 0 in this build", equals_number(0)))}},
      {"Lion",
       {.type = lion, .lr = 1e-4, .beta2 = 0.99},
       {betas(), fp32_states(),
        without_effect(
            noted<Rule>("set_grad_none", Holds::boolean, "concerns PyTorch's buffers of gradients"))},
       {{"lr", "not given: 1e-4, as published; DeepSpeed takes 1e-3"},
        {"betas", "not given: [0.9, 0.99], as published; DeepSpeed takes [0.9, 0.999]"}}},
      {"Adagrad",
       {.type = adagrad, .lr = 1e-2, .eps = 1e-10},
       {number("lr_decay", &Rule::lr_decay, "0.01"),
        number("initial_accumulator_value", &Rule::initial_accumulator_value, "0.1"),
        number("eps", &Rule::eps, "1e-6"), no_amsgrad(), fp32_states()}},
      {"Lamb",
       {.type = lamb},
       {betas(), number("eps", &Rule::eps, "1e-6"), flag("bias_correction", &Rule::bias_correction),
        number("max_coeff", &Rule::max_coeff, "5.0"), number("min_coeff", &Rule::min_coeff, "0.1"),
        without_effect(refused<Rule>("eps_inside_sqrt", "true", "eps stands outside of the root", is_false)),
        no_amsgrad()}},
      {"NVLamb",
       {.type = nvlamb},
       {betas(), number("eps", &Rule::eps, "1e-6"), flag("bias_correction", &Rule::bias_correction),
        number("normalize_above", &Rule::normalize_above, "1.0"), no_amsgrad()}},
      {"LARS",
       {.type = lars, .momentum = 0.9},
       {number("momentum", &Rule::momentum, "0.8"), number("eps", &Rule::eps, "1e-6"),
        number("trust_coefficient", &Rule::trust_coefficient, "0.02"), flag("clip", &Rule::clip),
        without_effect(refused<Rule>("nesterov", "true", "LARS has plain momentum", is_false)),
        without_effect(refused<Rule>("dampening", "0.1", "dampening is 0 in this build", equals_number(0)))}},
      {"OneBitAdam", {.type = onebitadam}, one_bit_params()},
      {"OneBitLamb",
       {.type = onebitlamb},
       one_bit_params(
           {number("max_coeff", &Rule::max_coeff, "5.0"), number("min_coeff", &Rule::min_coeff, "0.1"),
            number("coeff_beta", &Rule::coeff_beta, "0.8"), number("factor_max", &Rule::factor_max, "3.0"),
            number("factor_min", &Rule::factor_min, "0.6"),
            number("factor_threshold", &Rule::factor_threshold, "0.05")})},
      {"Muon",
       {.type = muon, .weight_decay = 0.1, .momentum = 0.95, .nesterov = true},
       muon_params(),
       {{"lr", "not given: 1e-3, as torch.optim.Muon has it; DeepSpeed takes 0.02 for the matrices"},
        {"weight_decay", "not given: 0.1, as torch.optim.Muon has it; DeepSpeed takes 0"}}},
      {"AdamW8bit", {.type = adamw8bit}, adam_params(true)}};
}

void describe(Entry& entry) {
  for (const std::vector<Text>& texts : {common_texts(), special_texts()})
    for (const Text& text : texts)
      for (Param& param : entry.params)
        if (param.key.name == text.name) config::describe(param.key, text);
  for (Param& param : entry.params)
    for (const auto& [key, note] : entry.unlike_deepspeed)
      if (param.key.name == key) param.key.difference = note;
}

const std::vector<Entry>& entries() {
  static const std::vector<Entry> all = [] {
    std::vector<Entry> out = optimizers();
    for (Entry& entry : out) {
      std::vector<Param> params = common_params();
      for (Param& param : entry.params) params.push_back(std::move(param));
      entry.params = std::move(params);
      describe(entry);
    }
    return out;
  }();
  return all;
}

const Entry& entry_of(OptimizerType type) {
  return entries().at(static_cast<std::size_t>(type));
}

// Optimizers that DeepSpeed or PyTorch would accept by name.
const std::vector<std::string> foreign_types = {"MuAdam", "MuAdamW",    "MuSGD",    "RMSprop", "NAdam",
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

bool has_betas(OptimizerType type) {
  const std::vector<Param>& params = entry_of(type).params;
  return std::any_of(params.begin(), params.end(), [](const Param& p) { return p.key.name == "betas"; });
}

OptimizerType read_optimizer_type(const Value& type) {
  if (edit_distance(type.text(), "ZeroOneAdam") == 0)
    type.error("0/1 Adam takes steps that only some replicas know of, so that their weights differ between ",
               "exchanges: use OneBitAdam, whose replicas always agree");
  for (const std::string& name : foreign_types)
    if (edit_distance(type.text(), name) == 0)
      type.error(type.node.brief(), " is not in this build; use one of ", known_optimizers());
  return static_cast<OptimizerType>(type.choice(optimizer_names()));
}

Table<OptimizerRule> optimizer_params(OptimizerType type) {
  Table<OptimizerRule> out{Auto::needs_caller, {}};
  for (const Param& param : entry_of(type).params) out.keys.push_back(param.key);
  return out;
}

std::vector<std::pair<std::string, ParamValue>> param_values(const OptimizerRule& rule) {
  std::vector<std::pair<std::string, ParamValue>> out;
  for (const Param& param : entry_of(rule.type).params)
    if (param.value)
      if (const auto value = param.value(rule)) out.emplace_back(param.key.name, *value);
  return out;
}

void note_other_defaults(OptimizerType type, const std::string& params, const Given& given,
                         Context& context) {
  for (const auto& [key, note] : entry_of(type).unlike_deepspeed)
    if (!given.contains(key)) context.note(join(params, key), note);
}

}  // namespace sherd::config
