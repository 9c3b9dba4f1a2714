#include "engine/update/parameter_groups.h"

#include <fnmatch.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/text/excerpt.h"
#include "engine/report/report.h"

namespace sherd::engine {

std::vector<std::pair<std::string, nn::ParameterPtr>> named_once(const nn::Module& model) {
  std::vector<std::pair<std::string, nn::ParameterPtr>> out;
  std::unordered_set<const autograd::Parameter*> seen;
  for (const auto& [path, parameter] : model.named_parameters())
    if (seen.insert(parameter.get()).second)
      out.emplace_back(parameter->name.empty() ? path : parameter->name, parameter);
  return out;
}

bool matches(const std::string& pattern, const std::string& name) {
  return fnmatch(pattern.c_str(), name.c_str(), 0) == 0;
}

bool in_group(const config::OptimizerGroup& group, const std::string& name) {
  return std::any_of(group.match.begin(), group.match.end(),
                     [&](const std::string& pattern) { return matches(pattern, name); });
}

std::string literally(const std::string& name) {
  std::string out;
  for (const char letter : name) {
    if (std::string_view("*?[\\").find(letter) != std::string_view::npos) out += '\\';
    out += letter;
  }
  return out;
}

namespace {

/// Edits that make `pattern` match `name`, where a `*` matches anything: Levenshtein's distance.
std::size_t distance(const std::string& pattern, const std::string& name) {
  std::vector<std::size_t> row(name.size() + 1);  // [i]: of the pattern so far to the first i letters
  for (std::size_t i = 0; i < row.size(); ++i) row[i] = i;
  for (const char letter : pattern) {
    std::size_t before = std::exchange(row[0], row[0] + (letter == '*' ? 0 : 1));
    for (std::size_t i = 1; i < row.size(); ++i) {
      const std::size_t above = row[i];
      if (letter == '*')
        row[i] = std::min(above, row[i - 1]);
      else
        row[i] =
            std::min({above + 1, row[i - 1] + 1, before + (letter == '?' || letter == name[i - 1] ? 0 : 1)});
      before = above;
    }
  }
  return row.back();
}

}  // namespace

std::string near_names(const std::string& pattern, const std::vector<std::string>& names) {
  std::vector<std::pair<std::size_t, std::size_t>> order;
  for (std::size_t i = 0; i < names.size(); ++i) order.emplace_back(distance(pattern, names[i]), i);
  std::sort(order.begin(), order.end());
  std::string out;
  for (std::size_t i = 0; i < std::min<std::size_t>(2, order.size()); ++i)
    out += cat(i > 0 ? " or '" : "'", names[order[i].second], "'");
  return out;
}

namespace {

using Names = std::vector<std::string>;

/// Throws where the group of that number has patterns, or all of itself, for nothing.
void check_group(const config::OptimizerGroup& group, std::size_t number, const Names& names, bool empty) {
  for (const std::string& pattern : group.match) {
    const auto is_match = [&](const std::string& name) { return matches(pattern, name); };
    if (std::none_of(names.begin(), names.end(), is_match))
      fail(ErrorKind::config, "optimizer.groups[", number, "]: no parameter of the model matches '",
           excerpt(pattern), "'; is ", near_names(pattern, names), " meant?");
  }
  if (empty)
    fail(ErrorKind::config, "optimizer.groups[", number, "]: earlier groups have all parameters that match '",
         excerpt(group.match.front()), "'", group.match.size() > 1 ? " and its other patterns" : "",
         ": put it before them, or drop it");
}

}  // namespace

GroupOf assign_groups(const nn::Module& model, const config::Optimizer& optimizer,
                      std::vector<std::string>& notes) {
  GroupOf out;
  if (optimizer.groups.empty()) return out;
  Names names;
  std::vector<bool> has_any(optimizer.groups.size()), decays(optimizer.groups.size());
  for (const auto& [name, parameter] : named_once(model)) {
    names.push_back(name);
    const auto group = std::find_if(optimizer.groups.begin(), optimizer.groups.end(),
                                    [&](const auto& candidate) { return in_group(candidate, name); });
    if (group == optimizer.groups.end()) continue;
    const auto index = group - optimizer.groups.begin();
    out[parameter.get()] = static_cast<int>(index) + 1;
    has_any[static_cast<std::size_t>(index)] = true;
    if (parameter->decay) decays[static_cast<std::size_t>(index)] = true;
  }
  for (std::size_t i = 0; i < optimizer.groups.size(); ++i) {
    const config::OptimizerGroup& group = optimizer.groups[i];
    check_group(group, i, names, !has_any[i]);
    if (!decays[i] && group.weight_decay > 0 && group.weight_decay != optimizer.weight_decay)
      notes.push_back(cat("optimizer.groups[", i,
                          "].weight_decay: no effect: the model decays none of these "
                          "parameters (biases and norms)"));
  }
  return out;
}

std::vector<std::string> describe_groups(const nn::Module& model, const config::Optimizer& optimizer,
                                         const GroupOf& group_of) {
  std::vector<std::string> out;
  for (std::size_t group = 0; !optimizer.groups.empty() && group <= optimizer.groups.size(); ++group) {
    std::int64_t tensors = 0, elements = 0;
    for (const auto& [name, parameter] : named_once(model)) {
      const auto found = group_of.find(parameter.get());
      if (!parameter->trainable || std::cmp_not_equal(found == group_of.end() ? 0 : found->second, group))
        continue;
      ++tensors;
      elements += parameter->numel();
    }
    const config::OptimizerRule& rule =
        group == 0 ? static_cast<const config::OptimizerRule&>(optimizer) : optimizer.groups[group - 1];
    const auto short_text = [](const std::string& pattern) { return excerpt(pattern); };
    std::string patterns =
        group == 0 ? "the rest" : joined_text(optimizer.groups[group - 1].match, ", ", short_text);
    if (patterns.size() > 60) patterns = patterns.substr(0, 57) + "...";
    out.push_back(cat("parameter group ", group, " (", patterns, "): ", counted(tensors, "tensor"), ", ",
                      human_count(static_cast<double>(elements)), " elements, ", config::name_of(rule.type),
                      ", lr ", rule.lr, ", weight_decay ", rule.weight_decay));
  }
  return out;
}

namespace {

/// The parser's checks, for rules that were made in code, and what follows from them for other keys.
void check_rules(config::Config& config) {
  config::Config asked = config;
  for (config::OptimizerGroup& group : asked.optimizer.groups) {
    if (!config::is_finite(group))
      fail(ErrorKind::config, "parameter_groups: every number of a rule must be finite");
    if (group.match.empty()) group.match = {"*"};
  }
  const config::Config read =
      config::parse_text(config::dump(asked), "the configuration with parameter_groups");
  if (!(read.optimizer == asked.optimizer && read.scheduler == asked.scheduler))
    fail(ErrorKind::config,
         "parameter_groups: a group sets what its type of optimizer does not have "
         "(momentum of AdamW, for example): give it the type that has it");
  if (read.parallel.shard_size == config.parallel.shard_size) return;
  config.parallel.shard_size = read.parallel.shard_size;
  std::copy_if(read.notes.begin(), read.notes.end(), std::back_inserter(config.notes),
               [](const std::string& note) { return note.starts_with("parallel.shard_size:"); });
}

}  // namespace

config::Config with_rules(config::Config config, const std::vector<ParameterGroup>& groups) {
  if (groups.empty()) return config;
  for (const ParameterGroup& group : groups) {
    config::OptimizerGroup& out = config.optimizer.groups.emplace_back();
    static_cast<config::OptimizerRule&>(out) =
        config.optimizer.for_type(group.type.value_or(config.optimizer.type));
    out.lr = group.lr.value_or(out.lr), out.weight_decay = group.weight_decay.value_or(out.weight_decay);
    if (group.with) group.with(out);
  }
  config.optimizer.given = true;
  check_rules(config);
  return config;
}

void name_parameters(config::Config& config, const nn::Module& model,
                     const std::vector<ParameterGroup>& groups) {
  const auto all = named_once(model);
  std::vector<config::OptimizerGroup>& named = config.optimizer.groups;
  const std::size_t in_file = named.size() - groups.size();
  for (std::size_t i = 0; i < groups.size(); ++i) {
    if (groups[i].parameters.empty()) fail(ErrorKind::config, "parameter_groups[", i, "] has no parameters");
    for (const nn::ParameterPtr& parameter : groups[i].parameters) {
      const auto found =
          std::find_if(all.begin(), all.end(), [&](const auto& p) { return p.second == parameter; });
      if (found == all.end())
        fail(ErrorKind::config, "parameter_groups[", i, "] has a parameter that the model does not have",
             parameter ? ": its own are those of Module::parameters()" : ", a null pointer");
      for (std::size_t other = 0; other < in_file + i; ++other)
        if (in_group(named[other], found->first))
          fail(ErrorKind::config, "parameter_groups[", i, "] has '", found->first, "', which is in ",
               other < in_file ? cat("optimizer.groups[", other, "] of the configuration")
                               : cat("parameter_groups[", other - in_file, "]"),
               " already: leave it out of one of them");
      named[in_file + i].match.push_back(literally(found->first));
    }
  }
}

}  // namespace sherd::engine
