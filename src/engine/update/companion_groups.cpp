#include "engine/update/parameter_groups.h"

#include <algorithm>
#include <cctype>
#include <set>
#include <unordered_set>

#include "base/text/excerpt.h"
#include "engine/update/rules/packed_tensors.h"
#include "optim/description.h"
#include "sharding/ownership.h"

namespace sherd::engine {
namespace {

using Names = std::vector<std::string>;

/// The 2-dimensional weights that blocks declare.
std::unordered_set<const autograd::Parameter*> matrices_of_blocks(nn::Module& model) {
  std::unordered_set<const autograd::Parameter*> out;
  for (const sharding::BlockParameters& owner : sharding::assign_parameters(model)) {
    if (!owner.block || owner.block == &model || !owner.block->is_block()) continue;
    for (const nn::ParameterPtr& parameter : owner.owned)
      if (parameter->shape.rank() == 2) out.insert(parameter.get());
  }
  return out;
}

/// A name with `*` for its numbers, as those of blocks.
std::string without_numbers(const std::string& name) {
  std::string out;
  for (std::size_t at = 0; at < name.size();) {
    const std::size_t end = std::min(name.find('.', at), name.size());
    const std::string word = name.substr(at, end - at);
    const bool number = !word.empty() && std::all_of(word.begin(), word.end(), [](unsigned char letter) {
      return std::isdigit(letter);
    });
    out += number ? "*" : word;
    if (end < name.size()) out += '.';
    at = end + 1;
  }
  return out;
}

/// Patterns that match these names and none of the others.
Names patterns_of(const std::set<std::string>& names, const Names& all) {
  Names out;
  for (const std::string& name : names) {
    const std::string pattern = without_numbers(name);
    if (std::find(out.begin(), out.end(), pattern) != out.end()) continue;
    const bool exact = std::all_of(all.begin(), all.end(), [&](const std::string& other) {
      return names.contains(other) || !matches(pattern, other);
    });
    out.push_back(exact ? pattern : literally(name));
  }
  return out;
}

config::OptimizerGroup group_beside(config::OptimizerRule rule, Names match) {
  config::OptimizerGroup out;
  static_cast<config::OptimizerRule&>(out) = *optim::beside(rule);
  out.match = std::move(match);
  return out;
}

/// Fewer elements are not worth codes, and bitsandbytes keeps them as they are.
constexpr std::int64_t least_in_codes = 4096;

/// The parts of a model that a rule with a companion takes itself.
class Taken {
 public:
  explicit Taken(nn::Module& model) : matrices_(matrices_of_blocks(model)) {}
  bool operator()(const config::OptimizerRule& rule, const std::string& name,
                  const autograd::Parameter& parameter) const {
    if (rule.type != config::OptimizerType::muon)
      return !parameter.is_table && parameter.logical_slice().logical().numel() >= least_in_codes;
    if (!matrices_.contains(&parameter)) return false;
    packed_runs(parameter, name);  // throws for tensors that are not its rows
    return true;
  }

 private:
  std::unordered_set<const autograd::Parameter*> matrices_;
};

/// A group with an `lr` of its own leaves that to AdamW, not the section's `adam_lr`.
void drop_inherited_rate(config::OptimizerRule& rule, const config::OptimizerRule& section) {
  auto* own = std::get_if<config::MuonOptions>(&rule.options);
  const auto* inherited = std::get_if<config::MuonOptions>(&section.options);
  if (own && own->adam_lr == (inherited ? inherited->adam_lr : std::nullopt)) own->adam_lr.reset();
}

void require_matrices(const std::string& where, const std::string& left) {
  fail(ErrorKind::config, where, " is of type Muon, which takes matrices of blocks, and has none: '",
       excerpt(left), "' is no 2-dimensional weight of a block (mark_block()); choose another type");
}

}  // namespace

config::Optimizer with_companions(config::Optimizer optimizer, nn::Module& model) {
  const std::vector<config::OptimizerGroup> groups = std::move(optimizer.groups);
  optimizer.groups.clear();
  const auto rule_of = [&](std::size_t index) -> const config::OptimizerRule& {
    return index == groups.size() ? static_cast<const config::OptimizerRule&>(optimizer) : groups[index];
  };
  const Taken takes(model);
  std::vector<std::set<std::string>> left(groups.size() + 1);  // by group, the section's last
  std::vector<std::size_t> taken(groups.size() + 1);
  Names all;
  for (const auto& [name, parameter] : named_once(model)) {
    all.push_back(name);
    const auto found = std::find_if(groups.begin(), groups.end(),
                                    [&, &name = name](const auto& group) { return in_group(group, name); });
    const auto index = static_cast<std::size_t>(found - groups.begin());
    if (!optim::beside(rule_of(index)) || takes(rule_of(index), name, *parameter))
      ++taken[index];
    else
      left[index].insert(name);
  }
  // Groups that inherit Muon, and the section beside them, may have what it leaves to AdamW alone.
  std::size_t family = 0;
  for (std::size_t i = 0; i < taken.size(); ++i) family += rule_of(i).type == optimizer.type ? taken[i] : 0;
  for (std::size_t i = 0; i < left.size(); ++i) {
    const bool section = i == groups.size();
    if (!left[i].empty()) {
      config::OptimizerRule rule = rule_of(i);
      if ((rule.type == optimizer.type ? family : taken[i]) == 0 && rule.type == config::OptimizerType::muon)
        require_matrices(section ? "optimizer" : cat("optimizer.groups[", i, "]"), *left[i].begin());
      if (taken[i] == 0 && rule.lr != optimizer.lr) drop_inherited_rate(rule, optimizer);
      optimizer.groups.push_back(group_beside(std::move(rule), patterns_of(left[i], all)));
    }
    if (!section && (taken[i] > 0 || left[i].empty())) optimizer.groups.push_back(groups[i]);
  }
  return optimizer;
}

}  // namespace sherd::engine
