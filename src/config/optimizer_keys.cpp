#include "config/tables.h"

namespace sherd::config {
namespace {

constexpr const char* supported = "Adam, AdamW and SGD";

// Optimizers that DeepSpeed or PyTorch would accept by name.
const std::vector<std::string> foreign_types = {
    "Adagrad",  "Lamb",  "Lion",  "OneBitAdam", "OneBitLamb", "ZeroOneAdam", "MuAdam",
    "MuAdamW",  "MuSGD", "Muon",  "RMSprop",    "NAdam",      "RAdam",       "Adamax",
    "Adadelta", "ASGD",  "Rprop", "LBFGS",      "SparseAdam", "Adafactor"};

std::vector<Key<OptimizerRule>> common_params() {
  std::vector<Key<OptimizerRule>> keys;
  keys.push_back(real("lr", &OptimizerRule::lr, "0.0003", 0));
  keys.push_back(real("weight_decay", &OptimizerRule::weight_decay, "0.1", 0));
  keys.push_back(refused<OptimizerRule>("max_grad_norm", "1.0",
                                        "clip with the top-level key \"gradient_clipping\"", never));
  keys.push_back(refused<OptimizerRule>("maximize", "true", "training minimises the loss", is_false));
  for (const char* name : {"foreach", "fused", "capturable", "differentiable"})
    keys.push_back(
        noted<OptimizerRule>(name, Holds::boolean, "chooses among PyTorch's kernels; Sherd has one, fused"));
  return keys;
}

Key<OptimizerRule> betas_key() {
  return custom<OptimizerRule>("betas", "[0.9, 0.95]", [](OptimizerRule& optimizer, const Value& value) {
    const std::vector<Node>& items = value.node.items;
    if (!value.node.is(Node::Kind::array) || items.size() != 2)
      value.error("must be a list of two numbers such as [0.9, 0.999], not ", value.node.brief());
    const auto beta = [&](std::size_t i) {
      const Value item{items[i], cat(value.path, "[", i, "]"), value.context};
      const double number = item.real(0, 1);
      if (number == 1) item.error("must be below 1");
      return number;
    };
    optimizer.beta1 = beta(0), optimizer.beta2 = beta(1);
  });
}

Table<OptimizerRule> adam_params(OptimizerType type) {
  std::vector<Key<OptimizerRule>> keys = common_params();
  keys.push_back(betas_key());
  keys.push_back(real("eps", &OptimizerRule::eps, "1e-6", 0));
  keys.push_back(boolean("bias_correction", &OptimizerRule::bias_correction));
  if (type == OptimizerType::adam)
    keys.push_back(boolean("adam_w_mode", &OptimizerRule::adam_w_mode));
  else
    keys.push_back(noted<OptimizerRule>("adam_w_mode", Holds::boolean,
                                        "type AdamW decouples the decay whatever it says"));
  keys.push_back(custom<OptimizerRule>("torch_adam", "true", [](OptimizerRule&, const Value& value) {
    value.boolean();
    value.note("Sherd has one Adam; only PyTorch's default weight decay of 0.01 is taken over");
  }));
  keys.push_back(
      refused<OptimizerRule>("amsgrad", "true", "the AMSGrad variant is not in this build", is_false));
  keys.push_back(refused<OptimizerRule>("fp32_optimizer_states", "false",
                                        "give training.moments_dtype \"bf16\" instead",
                                        [](const Value& value) { return value.boolean(); }));
  return {Auto::needs_caller, std::move(keys)};
}

Table<OptimizerRule> sgd_params() {
  std::vector<Key<OptimizerRule>> keys = common_params();
  keys.push_back(real("momentum", &OptimizerRule::momentum, "0.9", 0));
  keys.push_back(boolean("nesterov", &OptimizerRule::nesterov));
  keys.push_back(
      refused<OptimizerRule>("dampening", "0.1", "dampening is 0 in this build", equals_number(0)));
  return {Auto::needs_caller, std::move(keys)};
}

Table<OptimizerRule> params_of(OptimizerType type) {
  return type == OptimizerType::sgd ? sgd_params() : adam_params(type);
}

OptimizerType read_type(const Value& section) {
  const Node* type = section.node.find("type");
  if (!type || type->is(Node::Kind::null)) section.error("needs a \"type\"; this build has ", supported);
  const Value value{*type, join(section.path, "type"), section.context};
  const std::vector<std::string> names = {"Adam", "AdamW", "SGD"};
  for (const std::string& name : foreign_types)
    if (edit_distance(value.text(), name) == 0)
      value.error(type->brief(), " is not in this build; use one of ", supported);
  return static_cast<OptimizerType>(value.choice(names));
}

// DeepSpeed hands torch_adam to PyTorch's AdamW, whose own default decay is 0.01.
void follow_torch_default(OptimizerRule& optimizer, const Value& params, const Given& given) {
  const Node* torch_adam = params.node.find("torch_adam");
  if (torch_adam && torch_adam->boolean && optimizer.decoupled_decay() && !given.contains("weight_decay"))
    optimizer.weight_decay = 0.01;
}

void read_optimizer(Config& config, const Value& section) {
  Optimizer& optimizer = config.optimizer;
  optimizer.given = true;
  section.expect(Node::Kind::object);
  optimizer.type = read_type(section);
  Table<Optimizer> table;
  table.keys.push_back(custom<Optimizer>("type", "", [](Optimizer&, const Value&) {}));
  table.keys.push_back(
      noted<Optimizer>("legacy_fusion", Holds::boolean, "concerns DeepSpeed's fp16 wrappers"));
  table.keys.push_back(custom<Optimizer>("params", "", [](Optimizer& target, const Value& params) {
    OptimizerRule& rule = target;
    const Given given = read_section(params_of(rule.type), rule, params);
    follow_torch_default(rule, params, given);
  }));
  read_section(table, optimizer, section);
  if (optimizer.nesterov && optimizer.momentum == 0)
    section.error("nesterov needs a momentum above 0; set params.momentum or drop nesterov");
}

}  // namespace

Key<Config> optimizer_key() {
  Key<Config> key = custom<Config>("optimizer", "", read_optimizer);
  key.list = [](const std::string& prefix, std::vector<KeyInfo>& out) {
    out.push_back({prefix + ".type", Effect::effective, "\"SGD\"", ""});
    out.push_back({prefix + ".legacy_fusion", Effect::noted, "true", "concerns DeepSpeed's fp16 wrappers"});
    list_keys(params_of(OptimizerType::adam), prefix + "[Adam].params", out);
    list_keys(params_of(OptimizerType::adamw), prefix + "[AdamW].params", out);
    list_keys(params_of(OptimizerType::sgd), prefix + "[SGD].params", out);
  };
  return key;
}

}  // namespace sherd::config
