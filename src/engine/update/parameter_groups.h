#pragma once

#include <functional>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "config/config.h"
#include "nn/module.h"

namespace sherd {

/// Parameters with an update rule of their own, as PyTorch's param_groups. What is not given comes from the
/// configuration's section `optimizer`, as for its `groups`.
struct ParameterGroup {
  std::vector<nn::ParameterPtr> parameters;  ///< some of the model's: model->head()->parameters()
  std::optional<config::OptimizerType> type = {};
  std::optional<double> lr = {}, weight_decay = {};
  /// Sets what else the rule has:
  /// [](config::OptimizerRule& rule) { rule.as<config::SgdOptions>().momentum = 0.9; }
  std::function<void(config::OptimizerRule&)> with = nullptr;
};

namespace engine {

/// The parameter group of every parameter that a group of the configuration has: 1 for the first of
/// `optimizer.groups`, and so on. All others are in group 0.
using GroupOf = std::unordered_map<const autograd::Parameter*, int>;

/// Every parameter once, with the name that Module::assign_names() gives it.
std::vector<std::pair<std::string, nn::ParameterPtr>> named_once(const nn::Module& model);
/// Whether a pattern of the group matches the name.
bool in_group(const config::OptimizerGroup& group, const std::string& name);
bool matches(const std::string& pattern, const std::string& name);
/// The two names that a pattern comes nearest to: "'a' or 'b'".
std::string near_names(const std::string& pattern, const std::vector<std::string>& names);
/// A pattern that matches this name alone.
std::string literally(const std::string& name);

/// Every parameter goes to the first group of which a pattern matches its name; a tied one has the name of
/// its first declaration. Throws Error{config} for a pattern that no parameter has, naming near ones, and for
/// a group of which earlier ones have taken all. Adds a line to `notes` (Config::notes) for a decay that
/// cannot matter, as the model exempts all of a group's parameters from it.
GroupOf assign_groups(const nn::Module& model, const config::Optimizer& optimizer,
                      std::vector<std::string>& notes);

/// A line for each parameter group: its patterns, what it got and the rule that updates it. None without
/// groups.
std::vector<std::string> describe_groups(const nn::Module& model, const config::Optimizer& optimizer,
                                         const GroupOf& group_of);

/// `optimizer` where its section and groups keep what their rule takes alone. Muon takes the matrices of
/// blocks: 2-dimensional weights that a block (nn::Module::mark_block()) is the first to declare. 8-bit AdamW
/// takes parameters of 4096 elements and more that are no tables (Parameter::is_table). Before each of them
/// comes a group of the rest, which optim::beside() updates; that of the section comes last. A group of the
/// section's type from which nothing is taken is such a rest as a whole, and the rate that it gives is that
/// of its parameters. The same where all rules take everything, and where nothing is left to do.
///
/// Throws Error{config} where Muon has no such matrix: a group that is of this type in a section of another,
/// or the section and all of its type; and Error{usage} for a parameter whose packed tensors are not its
/// first rows, each once.
config::Optimizer with_companions(config::Optimizer optimizer, nn::Module& model);

/// `config` with the rules of `groups` after its own `optimizer.groups`, and with the `parallel.shard_size`
/// that they ask for where it has none, as if a file had them. They match no parameters before
/// name_parameters(). Throws Error{config} where no file could have them.
config::Config with_rules(config::Config config, const std::vector<ParameterGroup>& groups);
/// Lets the `groups` that with_rules() has put into `config` match their parameters, by the names that these
/// have in the model. Throws Error{config} where one has no parameters, or some that are not the model's or
/// are in another group.
void name_parameters(config::Config& config, const nn::Module& model,
                     const std::vector<ParameterGroup>& groups);

}  // namespace engine

}  // namespace sherd
