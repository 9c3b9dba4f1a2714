#include <algorithm>

#include "config/sections/tables.h"

namespace sherd::config {
namespace {

OptimizerType type_of_section(const Value& section) {
  const Node* type = section.node.find("type");
  if (!type || type->is(Node::Kind::null))
    section.error("needs a \"type\"; this build has ", known_optimizers());
  return read_optimizer_type(section.at("type"));
}

/// The section's keys beside `params`. read_optimizer() has read the type before, and reads groups later.
Table<Optimizer> section_table() {
  const auto later = [](Optimizer&, const Value&) {};
  Table<Optimizer> table{
      Auto::is_a_value,
      {custom<Optimizer>("type", "\"SGD\"", later)
           .one_of(optimizer_names())
           .means("the rule of updates ([optimizers](optimizers.md))",
                  "also takes PyTorch's, muP's and 0/1 Adam; has no NVLamb, LARS and AdamW8bit",
                  by("required; without the section AdamW with lr 1e-3, or what the caller brings")),
       custom<Optimizer>("groups", R"([{"match": "*.bias", "weight_decay": 0.5}])", later)
           .means(
               "parameters with a rule of their own: `match` (required: a pattern of full parameter names, "
               "or a list; shell patterns, whose `*` matches dots too), `type` (default: the section's) and "
               "any key of that type's `params` beside them ([groups](config.md#optimizergroups))",
               "are given to `initialize()`, not in the file", by("none"))}};
  table.keys[1].is_list = true, table.keys[1].values = "list of sections";
  for (const OptimizerType type : optimizer_types())
    for (KeyInfo& key : infos(group_table(type))) {
      std::vector<KeyInfo>& below = table.keys[1].below;
      const auto same = [&](const KeyInfo& other) { return other.name == key.name; };
      if (std::none_of(below.begin(), below.end(), same)) below.push_back(std::move(key));
    }
  append(table.keys, foreign_keys<Optimizer>("optimizer"));
  return table;
}

Node write_optimizer(const Config& config) {
  const Optimizer& optimizer = config.optimizer;
  if (!optimizer.given) return {};
  Node out = node_of({{"type", node_of(name_of(optimizer.type))},
                      {"params", written<OptimizerRule>(optimizer_params(optimizer.type), optimizer)}});
  if (optimizer.groups.empty()) return out;
  Node& groups = out.members.emplace_back("groups", list_of(std::vector<bool>())).second;
  for (const OptimizerGroup& group : optimizer.groups)
    groups.items.push_back(written(group_table(group.type), group));
  return out;
}

void read_optimizer(Config& config, const Value& section) {
  Optimizer& optimizer = config.optimizer;
  optimizer.given = true;
  section.expect(Node::Kind::object);
  static_cast<OptimizerRule&>(optimizer) = default_rule(type_of_section(section));
  Table<Optimizer> table = section_table();
  table.keys.push_back(custom<Optimizer>("params", "", [](Optimizer& target, const Value& params) {
    OptimizerRule& rule = target;
    const Given given = read_section(optimizer_params(rule.type), rule, params);
    finish_rule(rule, params, given);
    note_other_defaults(rule.type, params.path, given, params.context);
  }));
  const Given given = read_section(table, optimizer, section);
  if (!given.contains("params"))
    note_other_defaults(optimizer.type, join(section.path, "params"), {}, section.context);
  // Last, wherever it stands: what a group does not give comes from the section.
  if (given.contains("groups")) read_optimizer_groups(optimizer, section.at("groups"));
}

/// Where the matrices have a rate of their own, `lr` is that of the rest.
void finish_muon(OptimizerRule& rule, const Value& params, const Given& given) {
  MuonOptions& muon = rule.as<MuonOptions>();
  if (given.contains("muon_lr")) {
    muon.adam_lr = muon.adam_lr.value_or(rule.lr);
    rule.lr = unquoted(params.at("muon_lr")).number;
  }
  if (muon.momentum >= 1) params.error("momentum ", muon.momentum, " must be below 1: Muon's is a mean");
  if (muon.ns_eps == 0) params.error("ns_eps must be above 0: it divides matrices of zeros");
}

struct Check {
  const Value& params;

  template <class O>
  void operator()(const O& own) const {
    if constexpr (requires { own.nesterov; })
      if (own.nesterov && own.momentum == 0)
        params.error("nesterov needs a momentum above 0; set momentum or drop nesterov");
    if constexpr (requires { own.min_coeff; })
      if (own.min_coeff > own.max_coeff)
        params.error("min_coeff ", own.min_coeff, " is above max_coeff ", own.max_coeff);
    if constexpr (requires { own.coeff_beta; }) {
      if (own.coeff_beta >= 1)
        params.error("coeff_beta ", own.coeff_beta, " must be below 1: it is a mean's");
      if (own.factor_min > own.factor_max)
        params.error("factor_min ", own.factor_min, " is above factor_max ", own.factor_max);
    }
  }
};

}  // namespace

void finish_rule(OptimizerRule& rule, const Value& params, const Given& given) {
  // DeepSpeed hands torch_adam to PyTorch's AdamW, whose own default decay is 0.01.
  const Node* torch_adam = params.node.find("torch_adam");
  const bool of_torch = torch_adam && (torch_adam->boolean || !torch_adam->text.empty());
  if (of_torch && rule.decoupled_decay() && !given.contains("weight_decay")) rule.weight_decay = 0.01;
  if (rule.type == OptimizerType::muon) finish_muon(rule, params, given);
  std::visit(Check{params}, rule.options);
}

void check_replicas(Config& config, const Value& file) {
  const OptimizerRule* exchanges = config.optimizer.exchanges_momentum() ? &config.optimizer : nullptr;
  for (const OptimizerGroup& group : config.optimizer.groups)
    if (!exchanges && group.exchanges_momentum()) exchanges = &group;
  if (!exchanges) return;
  const std::string type = name_of(exchanges->type);
  const Node* section = file.node.find("optimizer");
  const Value optimizer{section ? *section : file.node, "optimizer", file.context};
  if (config.training.moments_dtype != DType::f32)
    optimizer.error("what ", type, " has not sent yet is kept in fp32: drop training.moments_dtype");
  if (config.parallel.shard_size > 0) return;
  if (config.zero.stage > 0)
    optimizer.error(type, " compresses what replicas exchange, and at zero_optimization.stage ",
                    config.zero.stage,
                    " all ranks share one replica's states: give parallel.shard_size, the ranks ",
                    "that share (such as those of one machine), or take stage 0");
  config.parallel.shard_size = config.parallel.context;
  file.context.note("parallel.shard_size",
                    cat(config.parallel.shard_size, ", as ", type, " at stage 0 makes each rank a replica"));
}

Key<Config> optimizer_key() {
  Key<Config> key = custom<Config>("optimizer", "", read_optimizer, write_optimizer);
  key.below = infos(section_table());
  for (const OptimizerType type : optimizer_types())
    key.below.push_back({.name = "params", .below = infos(optimizer_params(type)), .type = name_of(type)});
  return key;
}

}  // namespace sherd::config
