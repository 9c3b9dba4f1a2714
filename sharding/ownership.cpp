#include "sharding/ownership.h"

#include <algorithm>
#include <unordered_map>

namespace sherd::sharding {
namespace {

using Owners = std::unordered_map<const autograd::Parameter*, std::size_t>;

void assign(nn::Module& module, std::size_t current, std::vector<BlockParameters>& blocks, Owners& owners) {
  if (module.is_block() && blocks[current].block != &module) {
    blocks.push_back({&module, {}, {}});
    current = blocks.size() - 1;
  }
  for (const auto& [name, parameter] : module.own_parameters()) {
    const auto [it, first] = owners.emplace(parameter.get(), current);
    std::vector<std::size_t>& lenders = blocks[current].lenders;
    if (first)
      blocks[current].owned.push_back(parameter);
    else if (it->second != current && std::find(lenders.begin(), lenders.end(), it->second) == lenders.end())
      lenders.push_back(it->second);
  }
  for (const auto& [name, child] : module.children()) assign(*child, current, blocks, owners);
}

}  // namespace

std::vector<BlockParameters> assign_parameters(nn::Module& model) {
  std::vector<BlockParameters> blocks{{&model, {}, {}}};
  Owners owners;
  assign(model, 0, blocks, owners);
  return blocks;
}

Claim::Claim(const nn::Module* model) {
  require(model != nullptr, "sharding needs a model");
  for (const ParameterPtr& parameter : model->parameters()) {
    if (!parameter->stored.exchange(true)) {
      held_.push_back(parameter);
      continue;
    }
    release();
    fail(ErrorKind::usage,
         "this model, or a part of it, already belongs to another engine or another rank: every rank builds "
         "its own. Build it inside the function that launch() runs, or give initialize() a function that "
         "builds it");
  }
}

void Claim::release() {
  for (const ParameterPtr& parameter : held_) parameter->stored = false;
}

}  // namespace sherd::sharding
