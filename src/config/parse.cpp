#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <set>
#include <tuple>

#include "base/text/excerpt.h"
#include "config/sections/tables.h"

namespace sherd::config {
namespace {

/// The file's content, of a larger one a little more than it may have.
std::string read_text(const std::string& path, const char* kind) {
  const std::string what = cat("cannot read the ", kind, " ", excerpt(path, 300));
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored))
    fail(ErrorKind::io, what, ": it is a folder; name a file");
  std::ifstream in(path, std::ios::binary);
  if (!in) fail(ErrorKind::io, what, "; check the path and its permissions");
  std::string text;
  std::array<char, 1 << 16> part;
  while (text.size() <= most_bytes && in.read(part.data(), part.size()).gcount() > 0)
    text.append(part.data(), static_cast<std::size_t>(in.gcount()));
  if (in.bad()) fail(ErrorKind::io, what, " to its end");
  return text;
}

void note_default_optimizer(Config& config, Context& context) {
  if (!config.optimizer.given)
    context.note("optimizer", cat("not given; AdamW with lr ", config.optimizer.lr,
                                  " unless the caller brings an optimizer"));
}

void note_cycle(const Config& config, Context& context) {
  const auto has = [](const OptimizerRule& rule) { return rule.betas() != nullptr; };
  const std::vector<OptimizerGroup>& groups = config.optimizer.groups;
  if (std::holds_alternative<OneCycle>(config.scheduler) && !has(config.optimizer) &&
      std::none_of(groups.begin(), groups.end(), has))
    context.note("scheduler.params.cycle_momentum",
                 cat("no effect with ", name_of(config.optimizer.type), ", which has no betas"));
}

/// Notes the keys in `node` that cannot matter beside the rest of the file, and those below.
void note_idle_keys(const KeyInfo& section, const Node& node, const std::string& path, const Config& config,
                    Context& context) {
  for (const auto& [name, value] : node.members) {
    const auto key = std::find_if(section.below.begin(), section.below.end(), [&](const KeyInfo& known) {
      return known.type.empty() &&
             (known.name == name || std::count(known.aliases.begin(), known.aliases.end(), name) > 0);
    });
    if (key == section.below.end() || value.is(Node::Kind::null) ||
        (key->takes_auto && value.is_text("auto")))
      continue;
    const std::string place = join(path, name);
    if (const std::string why = key->idle ? key->idle(config) : ""; !why.empty())
      context.note(place, why);
    else if (key->is_section())
      note_idle_keys(*key, value, place, config, context);
  }
}

std::string text_in(const Node* section, const char* key) {
  const Node* node = section ? section->find(key) : nullptr;
  return node && node->is(Node::Kind::string) ? node->text : std::string();
}

/// Takes out of the adapter section of weights what one in the files says by another key, and how a prompt
/// began; all of it where the files name another adapter.
void drop_replaced(Node& base, Node& tree, bool of_adapter) {
  Node* there = find_path(base, "training.adapter");
  const Node* here = find_path(tree, "training.adapter");
  if (!there || !here) return;
  const std::string type = text_in(here, "type");
  if (!of_adapter &&
      (!text_in(here, "init_from").empty() || (!type.empty() && type != text_in(there, "type"))))
    return there->members.clear();
  const auto first_name = [](const std::string& name) {
    for (const Row& key : adapter_table().keys)
      if (std::find(key.aliases.begin(), key.aliases.end(), name) != key.aliases.end()) return key.name;
    return name;
  };
  std::set<std::string> given;
  for (const auto& [name, node] : here->members) given.insert(first_name(name));
  for (const char* key : {"base_format", "base_double_quant"})
    if (find_path(tree, cat("training.", key))) given.insert(key);
  const auto replaced = [&](const std::string& key) {
    if (key == "init" || key == "init_text" || given.contains(first_name(key))) return true;
    if (key == "reduction_factor") return here->find("bottleneck_size") != nullptr;
    return key == "bottleneck_size" && here->find("reduction_factor");
  };
  std::erase_if(there->members, [&](const auto& member) { return replaced(member.first); });
}

/// Lays the files' own keys over those that `sections` gives for the weights that init_from names in `place`,
/// of training or a section in it.
void lay_on_weights(Node& tree, const WeightSections& sections, const char* place, const char* what) {
  const Node* training = tree.find("training");
  const Node* section = training && *place ? training->find(place) : training;
  const std::string from = text_in(section, "init_from");
  if (!sections || from.empty()) return;
  Node base = parse_tree(sections(from, text_in(training, "save_dir")),
                         cat("the ", what, " of ", excerpt(from, 200)));
  drop_replaced(base, tree, *place != '\0');
  merge(base, std::move(tree));
  tree = std::move(base);
}

Config read_config(Node tree, const std::vector<std::string>& overrides, Context& context,
                   const WeightSections& sections = nullptr, const WeightSections& adapters = nullptr) {
  for (const std::string& assignment : overrides) apply_override(tree, assignment);
  const Node own = tree;  // keys that the weights bring are nobody's to take out
  lay_on_weights(tree, sections, "", "model");
  lay_on_weights(tree, adapters, "adapter", "adapter");
  drop_notes(tree);
  fill_from_trainer(tree, context);
  Config config;
  context.attempt([&] {
    const Given given = read_section(top_table(), config, Value{tree, "", context});
    check_precision(config, given);
    check_group_rates(config, given, context);
    check_replicas(config, Value{tree, "", context});
    check_schedule(config.parallel, Value{tree, "", context});
    check_moe(config, Value{tree, "", context});
    check_packing(config, Value{tree, "", context});
    check_objective(config, Value{tree, "", context});
    check_preferences(config, Value{tree, "", context});
    check_prompt(config, Value{tree, "", context});
    check_tiers(config, Value{tree, "", context});
    note_idle_keys(all_keys(), sections || adapters ? own : tree, "", config, context);
    note_cycle(config, context);
    note_resident_parameters(config, given, context);
    note_short_schedule(config, context);
    note_default_optimizer(config, context);
  });
  context.raise();
  config.notes = std::move(context.notes);
  return config;
}

Node read_trees(const std::vector<std::string>& paths) {
  if (paths.empty()) fail(ErrorKind::usage, "no configuration file given");
  constexpr const char* what = "configuration";
  Node tree = read_tree(paths.front(), what);
  for (std::size_t i = 1; i < paths.size(); ++i) merge(tree, read_tree(paths[i], what));
  return tree;
}

void gather_keys(const Node& node, const std::string& path, std::set<std::string>& keys) {
  if (!path.empty() && !node.is_text("auto") && !node.is(Node::Kind::null)) keys.insert(path);
  for (const auto& [name, value] : node.members) gather_keys(value, join(path, name), keys);
}

}  // namespace

Node read_tree(const std::string& path, const char* what) {
  Node tree = parse_tree(read_text(path, what), path);
  if (!tree.is(Node::Kind::object))
    fail(ErrorKind::config, path, ": must hold a JSON object with sections, not ", tree.brief());
  return tree;
}

Config parse_files(const std::vector<std::string>& paths, const std::vector<std::string>& overrides,
                   const WeightSections& sections, const WeightSections& adapters) {
  Context context;
  return read_config(read_trees(paths), overrides, context, sections, adapters);
}

std::string in_given_keys(std::string text, const std::vector<std::string>& paths,
                          const std::vector<std::string>& overrides) {
  Context context;
  try {
    read_config(read_trees(paths), overrides, context);
  } catch (const Error&) {  // which the text may be about
    return text;
  }
  return in_given_keys(std::move(text), context.given_as);
}

std::set<std::string> given_keys(const std::vector<std::string>& paths,
                                 const std::vector<std::string>& overrides) {
  Context context;
  Node tree = read_trees(paths);
  read_config(tree, overrides, context);
  for (const std::string& assignment : overrides) apply_override(tree, assignment);
  std::set<std::string> out = std::move(context.given);
  gather_keys(tree, "", out);
  return out;
}

Config parse_text(std::string_view text, const std::string& name, const std::vector<std::string>& overrides) {
  Context context;
  return read_config(parse_tree(text, name), overrides, context);
}

bool Config::operator==(const Config& other) const {
  const auto tie = [](const Config& c) {
    return std::tie(c.batch, c.optimizer, c.scheduler, c.precision, c.fp8, c.gradient_clipping, c.zero, c.aio,
                    c.steps_per_print, c.wall_clock_breakdown, c.memory_breakdown, c.dump_state,
                    c.tensorboard, c.csv_monitor, c.log_level, c.model, c.data, c.training, c.parallel,
                    c.device);
  };
  return tie(*this) == tie(other);
}

}  // namespace sherd::config
