#include <algorithm>

#include "config/foreign_keys.h"
#include "config/tables.h"

// The optimizers that a configuration can name, each an entry of optimizers() below.

namespace sherd::config {
namespace {

using Rule = OptimizerRule;
using Row = Key<Rule>;

struct Entry {
  const char* name;  ///< `type`
  Rule defaults;
  std::vector<Row> own;  ///< its keys of `params` beside those that all types have
  /// Keys whose default is not DeepSpeed's, with what the log says where they are not given.
  std::vector<std::pair<const char*, const char*>> unlike_deepspeed = {};
  Table<Rule> params = {};  ///< all of them; entries() fills it
};

// ---- rows that several types have ----

Row lr() {
  return real("lr", &Rule::lr, "0.0003", 0).means("learning rate of a step, where no scheduler sets it");
}

Row weight_decay() {
  return real("weight_decay", &Rule::weight_decay, "0.2", 0)
      .means("decay of the weights, but of biases and of the gains and offsets of norms",
             "decays every parameter of a group; Adagrad's on CPUs acts in the sum of squares alone");
}

Row betas() {
  const auto read = [](Rule& rule, const Value& value) {
    const auto both = read_numbers(value, 2, "two numbers such as [0.9, 0.999]", 0, 1);
    for (std::size_t i = 0; i < 2; ++i)
      if (both[i] == 1)
        Value{value.node.items[i], cat(value.path, "[", i, "]"), value.context}.error("must be below 1");
    rule.beta1 = both[0], rule.beta2 = both[1];
  };
  return custom<Rule>("betas", "[0.9, 0.95]", read,
                      [](const Rule& rule) {
                        return list_of(std::array{rule.beta1, rule.beta2});
                      })
      .takes({"two numbers from 0 to below 1",
              R"({"type": "array", "items": {"type": "number", "minimum": 0, "exclusiveMaximum": 1}, )"
              R"("minItems": 2, "maxItems": 2})"})
      .means(
          "shares of the means of gradients and of their squares that stay with a step; Lion: of the "
          "momentum in the step, and of that which stays; Muon: of the AdamW beside it");
}

Row eps() {
  return real("eps", &Rule::eps, "1e-6", 0)
      .means(
          "added to the root of the second moment; LARS: to its denominator; Muon: of the AdamW beside it");
}

Row bias_correction() {
  return boolean("bias_correction", &Rule::bias_correction)
      .means("moments are divided by 1 − βᵗ", "Lamb corrects the rate instead");
}

Row momentum(const char* example = "0.9") {
  return real("momentum", &Rule::momentum, example, 0)
      .means("share of the momentum that stays with a step; Muon: below 1");
}

Row nesterov(const char* example = "true") {
  Row row =
      boolean("nesterov", &Rule::nesterov).means("look ahead along the momentum; needs a momentum above 0");
  row.example = example;
  return row;
}

Row max_coeff() {
  return real("max_coeff", &Rule::max_coeff, "5.0", 0).means("largest trust ratio");
}
Row min_coeff() {
  return real("min_coeff", &Rule::min_coeff, "0.1", 0).means("smallest trust ratio");
}

Row freeze_step() {
  return integer("freeze_step", &Rule::freeze_step, "23000", 1)
      .means("steps after which replicas exchange compressed momentum in place of gradients",
             "counts one more than it updates");
}

/// Nothing but a default depends on it; dump() tells the decay.
Row torch_adam() {
  return custom<Rule>("torch_adam", "true",
                      [](Rule&, const Value& value) {
                        // DeepSpeed takes any word for true: "torch_impl".
                        if (!value.node.is(Node::Kind::string) || value.node.text.empty()) value.boolean();
                        value.note(
                            "Sherd has one Adam; only PyTorch's default weight decay of 0.01 is taken "
                            "over");
                      })
      .takes({"true or false", R"({"type": ["boolean", "string"]})"})
      .by_default("`false`")
      .means("takes over the default `weight_decay` of PyTorch's Adam, 0.01, and nothing else",
             "takes PyTorch's Adam");
}

// ---- rows of one type ----

Row adam_w_mode() {
  return boolean("adam_w_mode", &Rule::adam_w_mode)
      .means("decoupled decay, as AdamW's; false: L2, in the gradient");
}

std::vector<Row> one_bit_lamb_params() {
  return {betas(),
          eps(),
          freeze_step(),
          max_coeff(),
          min_coeff(),
          real("coeff_beta", &Rule::coeff_beta, "0.8", 0)
              .means("share of the mean of trust ratios that stays with a step; below 1"),
          real("factor_max", &Rule::factor_max, "3.0", 0)
              .means("after `freeze_step`: largest factor on that mean"),
          real("factor_min", &Rule::factor_min, "0.6", 0)
              .means("after `freeze_step`: smallest factor on that mean"),
          real("factor_threshold", &Rule::factor_threshold, "0.05", 0)
              .means("after `freeze_step`: largest relative change of that factor in a step")};
}

Row ns_coefficients() {
  const auto read = [](Rule& rule, const Value& value) {
    const auto all = read_numbers(value, 3, "three numbers such as [3.4445, -4.775, 2.0315]");
    rule.ns_coefficients = {all[0], all[1], all[2]};
    if (all[2] < 0) value.error("needs a last coefficient of 0 or more");
  };
  return custom<Rule>("ns_coefficients", "[2.0, -1.5, 0.5]", read,
                      [](const Rule& rule) { return list_of(rule.ns_coefficients); })
      .takes(numbers("three numbers, the last >= 0", 3))
      .means("a, b, c of X ← a·X + b·(X·Xᵀ)·X + c·(X·Xᵀ)²·X", "these, always");
}

std::vector<Row> muon_params() {
  return {momentum(), nesterov("false"),
          integer("ns_steps", &Rule::ns_steps, "6", 1, 99).means("Newton–Schulz iterations", "5, always"),
          ns_coefficients(),
          real("ns_eps", &Rule::ns_eps, "1e-6", 0)
              .means("what a matrix's norm is at least taken for; above 0", "1e-7, always"),
          choice("adjust_lr_fn", &Rule::adjust_lr_fn, {"original", "match_rms_adamw", "spectral_unclamped"},
                 "\"match_rms_adamw\"")
              .means("the step is multiplied by: original √max(1, rows/columns); match_rms_adamw "
                     "0.2·√max(rows, columns), which makes AdamW's rates fit; spectral_unclamped "
                     "√(rows/columns)",
                     "original, always"),
          // finish_rule() sorts the rates out, whatever the order in which they stand.
          custom<Rule>("muon_lr", "0.02", [](Rule&, const Value& value) { value.real(0); })
              .takes(reals(0))
              .by_default("`lr`")
              .means("rate of the matrices; then `lr` is that of the rest"),
          real("adam_lr", &Rule::adam_lr, "0.0005", 0)
              .by_default("`lr`")
              .means("rate of what Muon leaves to AdamW: embeddings, the head, norms, biases"),
          betas(), eps()};
}

// ---- the types ----

/// In the order of OptimizerType.
std::vector<Entry> optimizers() {
  using enum OptimizerType;
  return {
      {"Adam", {.type = adam}, {betas(), eps(), bias_correction(), adam_w_mode(), torch_adam()}},
      {"AdamW", {.type = adamw}, {betas(), eps(), bias_correction(), torch_adam()}},
      {"SGD", {.type = sgd}, {momentum(), nesterov()}},
      {"Lion",
       {.type = lion, .lr = 1e-4, .beta2 = 0.99},
       {betas()},
       {{"lr", "not given: 1e-4, as published; DeepSpeed takes 1e-3"},
        {"betas", "not given: [0.9, 0.99], as published; DeepSpeed takes [0.9, 0.999]"}}},
      {"Adagrad",
       {.type = adagrad, .lr = 1e-2, .eps = 1e-10},
       {real("lr_decay", &Rule::lr_decay, "0.01", 0)
            .means("the rate is divided by 1 + this for each step done"),
        real("initial_accumulator_value", &Rule::initial_accumulator_value, "0.1", 0)
            .means("the sum of squares begins at this"),
        eps()}},
      {"Lamb", {.type = lamb}, {betas(), eps(), bias_correction(), max_coeff(), min_coeff()}},
      {"NVLamb",
       {.type = nvlamb},
       {betas(), eps(), bias_correction(),
        real("normalize_above", &Rule::normalize_above, "1.0", 0)
            .means("gradients are divided by their global norm where that is larger; 1: apex's version")}},
      {"LARS",
       {.type = lars, .momentum = 0.9},
       {momentum("0.8"), eps(),
        real("trust_coefficient", &Rule::trust_coefficient, "0.02", 0).means("factor of the trust ratio"),
        boolean("clip", &Rule::clip).means("the rate is at most `lr` (LARC)")}},
      {"OneBitAdam", {.type = onebitadam}, {betas(), eps(), freeze_step()}},
      {"OneBitLamb", {.type = onebitlamb}, one_bit_lamb_params()},
      {"Muon",
       {.type = muon, .weight_decay = 0.1, .momentum = 0.95, .nesterov = true},
       muon_params(),
       {{"lr", "not given: 1e-3, as torch.optim.Muon has it; DeepSpeed takes 0.02 for the matrices"},
        {"weight_decay", "not given: 0.1, as torch.optim.Muon has it; DeepSpeed takes 0"}}},
      {"AdamW8bit", {.type = adamw8bit}, {betas(), eps(), bias_correction(), torch_adam()}}};
}

const std::vector<Entry>& entries() {
  static const std::vector<Entry> all = [] {
    std::vector<Entry> out = optimizers();
    for (Entry& entry : out) {
      std::vector<Row> params = {lr(), weight_decay()};
      append(params, foreign_keys<Rule>("optimizer.params"));
      append(params, std::move(entry.own));
      append(params, foreign_keys<Rule>("optimizer.params", entry.name));
      for (Row& row : params)
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
  const std::vector<Row>& params = entry_of(type).params.keys;
  return std::any_of(params.begin(), params.end(), [](const Row& row) { return row.name == "betas"; });
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

const Table<OptimizerRule>& optimizer_params(OptimizerType type) {
  return entry_of(type).params;
}

void note_other_defaults(OptimizerType type, const std::string& params, const Given& given,
                         Context& context) {
  for (const auto& [key, note] : entry_of(type).unlike_deepspeed)
    if (!given.contains(key)) context.note(join(params, key), note);
}

}  // namespace sherd::config
