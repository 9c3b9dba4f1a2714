#include "config/tables.h"

namespace sherd::config {
namespace {

OptimizerType read_type(const Value& section) {
  const Node* type = section.node.find("type");
  if (!type || type->is(Node::Kind::null))
    section.error("needs a \"type\"; this build has ", known_optimizers());
  return read_optimizer_type({*type, join(section.path, "type"), section.context});
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
  static_cast<OptimizerRule&>(optimizer) = default_rule(read_type(section));
  Table<Optimizer> table;
  table.keys.push_back(custom<Optimizer>("type", "", [](Optimizer&, const Value&) {}));
  table.keys.push_back(
      noted<Optimizer>("legacy_fusion", Holds::boolean, "concerns DeepSpeed's fp16 wrappers"));
  table.keys.push_back(custom<Optimizer>("params", "", [](Optimizer& target, const Value& params) {
    OptimizerRule& rule = target;
    const Given given = read_section(optimizer_params(rule.type), rule, params);
    follow_torch_default(rule, params, given);
    note_other_defaults(rule.type, params.path, given, params.context);
  }));
  if (!read_section(table, optimizer, section).contains("params"))
    note_other_defaults(optimizer.type, join(section.path, "params"), {}, section.context);
  if (optimizer.nesterov && optimizer.momentum == 0)
    section.error("nesterov needs a momentum above 0; set params.momentum or drop nesterov");
}

}  // namespace

Key<Config> optimizer_key() {
  Key<Config> key = custom<Config>("optimizer", "", read_optimizer);
  key.list = [](const std::string& prefix, std::vector<KeyInfo>& out) {
    out.push_back({prefix + ".type", Effect::effective, "\"SGD\"", ""});
    out.push_back({prefix + ".legacy_fusion", Effect::noted, "true", "concerns DeepSpeed's fp16 wrappers"});
    for (const OptimizerType type : optimizer_types())
      list_keys(optimizer_params(type), cat(prefix, "[", name_of(type), "].params"), out);
  };
  return key;
}

}  // namespace sherd::config
