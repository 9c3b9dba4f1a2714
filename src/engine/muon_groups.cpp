#include "engine/muon_groups.h"

#include <algorithm>
#include <cctype>
#include <set>
#include <unordered_set>

#include "base/excerpt.h"
#include "engine/parameter_groups.h"
#include "optim/muon.h"
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

void check_matrix(const std::string& name, const autograd::Parameter& parameter) {
  if (!parameter.logical_slice().is_whole())
    fail(ErrorKind::config, "optimizer Muon takes whole matrices, and parallel.tensor cuts '", name,
         "': set parallel.tensor to 1, or give such matrices another type in optimizer.groups");
  std::vector<tensor::Range> rows;
  for (const std::vector<tensor::Range>& matrix : parameter.matrices)
    rows.insert(rows.end(), matrix.begin(), matrix.end());
  std::sort(rows.begin(), rows.end(), [](auto& a, auto& b) { return a.begin < b.begin; });
  std::int64_t end = 0;
  for (const tensor::Range& range : rows)
    end = range.begin == end && range.size() > 0 ? range.end : parameter.shape[0] + 1;
  require(rows.empty() || end == parameter.shape[0], "parameter '", name, "' has matrices that are not its ",
          parameter.shape[0], " rows, each once");
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

config::OptimizerGroup group_beside(const config::OptimizerRule& muon, Names match) {
  config::OptimizerGroup out;
  static_cast<config::OptimizerRule&>(out) = optim::beside_muon(muon);
  out.match = std::move(match);
  return out;
}

}  // namespace

config::Optimizer with_muon_groups(config::Optimizer optimizer, nn::Module& model) {
  const auto is_muon = [](const config::OptimizerRule& rule) {
    return rule.type == config::OptimizerType::muon;
  };
  const std::vector<config::OptimizerGroup> groups = std::move(optimizer.groups);
  optimizer.groups.clear();
  const auto matrices = matrices_of_blocks(model);
  std::vector<std::set<std::string>> left(groups.size() + 1);  // by group, the section's last
  std::vector<std::size_t> taken(groups.size() + 1);
  Names all;
  for (const auto& [name, parameter] : named_once(model)) {
    all.push_back(name);
    const auto found = std::find_if(groups.begin(), groups.end(),
                                    [&, &name = name](const auto& group) { return in_group(group, name); });
    const auto index = static_cast<std::size_t>(found - groups.begin());
    if (!is_muon(found == groups.end() ? optimizer : static_cast<const config::OptimizerRule&>(*found)))
      continue;
    if (!matrices.contains(parameter.get())) {
      left[index].insert(name);
      continue;
    }
    check_matrix(name, *parameter);
    ++taken[index];
  }
  for (std::size_t i = 0; i < left.size(); ++i) {
    const bool section = i == groups.size();
    if (!left[i].empty()) {
      if (taken[i] == 0)
        fail(ErrorKind::config, section ? "optimizer" : cat("optimizer.groups[", i, "]"),
             " is of type Muon, which takes matrices of blocks, and has none: '", excerpt(*left[i].begin()),
             "' is no 2-dimensional weight of a block (mark_block()); choose another type");
      optimizer.groups.push_back(
          group_beside(section ? optimizer : static_cast<const config::OptimizerRule&>(groups[i]),
                       patterns_of(left[i], all)));
    }
    if (!section) optimizer.groups.push_back(groups[i]);
  }
  return optimizer;
}

}  // namespace sherd::engine
