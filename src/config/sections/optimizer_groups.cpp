#include <algorithm>

#include "config/key_defaults.h"
#include "config/sections/tables.h"

namespace sherd::config {
namespace {

/// Keys that a reader may well expect in a group.
void check_names(const Value& group, const Table<OptimizerGroup>& table) {
  for (const auto& [name, node] : group.node.members) {
    const Value value = group.at(name);
    if (name == "params")
      value.error("a group has its parameters beside \"match\": put them there, without \"params\"");
    if (std::any_of(table.keys.begin(), table.keys.end(), [&](const auto& key) { return key.name == name; }))
      continue;
    for (const KeyInfo& known : known_keys())
      if (known.path.starts_with("optimizer[") && known.path.ends_with(cat("].params.", name)))
        value.error("belongs to the type ", type_in(known.path),
                    ", which this group is not of; set its \"type\" or drop it");
  }
}

OptimizerGroup read_group(const Optimizer& section, const Value& value) {
  value.expect(Node::Kind::object);
  const Node* type = value.node.find("type");
  OptimizerGroup group;
  static_cast<OptimizerRule&>(group) = section.for_type(
      type && !type->is(Node::Kind::null) ? read_optimizer_type(value.at("type")) : section.type);
  const Table<OptimizerGroup>& table = group_table(group.type);
  check_names(value, table);
  Given given = read_section(table, group, value);
  if (!given.contains("match"))
    value.error("needs \"match\", a pattern of parameter names such as \"*.bias\", or a list of them");
  finish_rule(group, value, given);
  if (group.type != section.type) {
    given["lr"] = &value.node;  // the section's, in any case
    note_other_defaults(group.type, value.path, given, value.context);
  }
  return group;
}

Table<OptimizerGroup> make_group_table(OptimizerType type) {
  Table<OptimizerGroup> table{Auto::needs_caller,
                              {custom<OptimizerGroup>(
                                   "match", "",
                                   [](auto& group, const Value& value) {
                                     group.match = read_patterns(value, "\"*.bias\"");
                                     if (group.match.empty())
                                       value.error("needs at least one pattern, such as \"*.bias\"");
                                   },
                                   [](const auto& group) { return list_of(group.match); })
                                   .takes({"string, or list of strings", R"({"type": ["string", "array"]})"})
                                   .means("patterns of full parameter names", Auto::is_a_value, required),
                               custom<OptimizerGroup>(
                                   "type", "", [](OptimizerGroup&, const Value&) {},
                                   [](const auto& group) { return node_of(name_of(group.type)); })
                                   .one_of(optimizer_names())
                                   .means("the rule of updates; default: the section's")}};
  for (const Key<OptimizerRule>& key : optimizer_params(type).keys)
    table.keys.push_back(lifted<OptimizerGroup>(
        key, [](auto& group) -> auto& { return group; }));
  return table;
}

}  // namespace

std::vector<std::string> read_patterns(const Value& value, const char* example) {
  const bool list = value.node.is(Node::Kind::array);
  if (!list && !value.node.is(Node::Kind::string))
    value.error("must be a pattern of parameter names such as ", example, ", or a list of them, not ",
                value.node.brief());
  std::vector<std::string> out;
  const auto add = [&](const Value& pattern) {
    if (pattern.text().empty())
      pattern.error("must be a pattern of parameter names such as ", example, ", not \"\"");
    out.push_back(pattern.text());
  };
  if (!list) add(value);
  for (std::size_t i = 0; list && i < value.node.items.size(); ++i) add(value.item(i));
  return out;
}

const Table<OptimizerGroup>& group_table(OptimizerType type) {
  static const std::vector<Table<OptimizerGroup>> all = [] {
    std::vector<Table<OptimizerGroup>> out;
    for (const OptimizerType each : optimizer_types()) out.push_back(make_group_table(each));
    return out;
  }();
  return all.at(static_cast<std::size_t>(type));
}

OptimizerRule OptimizerRule::for_type(OptimizerType other) const {
  if (other == type) return *this;
  OptimizerRule rule = default_rule(other);
  rule.lr = lr, rule.weight_decay = weight_decay;
  return rule;
}

void read_optimizer_groups(Optimizer& optimizer, const Value& list) {
  list.expect(Node::Kind::array);
  for (std::size_t i = 0; i < list.node.items.size(); ++i)
    list.context.attempt([&] { optimizer.groups.push_back(read_group(optimizer, list.item(i))); });
}

void check_group_rates(const Config& config, const Given& given, Context& context) {
  const Optimizer& optimizer = config.optimizer;
  if (std::holds_alternative<std::monostate>(config.scheduler) || optimizer.lr != 0) return;
  if (std::all_of(optimizer.groups.begin(), optimizer.groups.end(), [](const auto& g) { return g.lr == 0; }))
    return;
  Value{*given.at("optimizer"), "optimizer", context}.error(
      "a group's rate keeps its proportion to params.lr under a scheduler, and params.lr is 0; give it a "
      "rate, or drop the scheduler");
}

}  // namespace sherd::config
