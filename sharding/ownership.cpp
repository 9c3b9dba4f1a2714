#include "sharding/ownership.h"

#include <algorithm>
#include <unordered_map>

namespace sherd::sharding {
namespace {

/// Goes through a model's modules in the order of declaration.
class Assignment {
 public:
  explicit Assignment(nn::Module& model) : blocks_{{.block = &model}} {
    const auto* layered = dynamic_cast<nn::LayeredModel*>(&model);
    for (std::size_t part = 0; layered && part < layered->parts(); ++part) {
      const auto& modules = layered->modules(part);
      if (modules.size() == 1 && modules[0]->is_block()) continue;
      for (const auto& module : modules) parts_of_[module.get()].push_back(part);
    }
    visit(model, 0);
  }
  std::vector<BlockParameters> take() { return std::move(blocks_); }

 private:
  void visit(nn::Module& module, std::size_t current) {
    const auto parts = parts_of_.find(&module);
    if (parts == parts_of_.end()) return visit_inside(module, current);
    for (const std::size_t part : parts->second) visit_inside(module, block_of(part));
  }

  void visit_inside(nn::Module& module, std::size_t current) {
    if (module.is_block() && blocks_[current].block != &module) {
      blocks_.push_back({.block = &module});
      current = blocks_.size() - 1;
    }
    for (const auto& [name, parameter] : module.own_parameters()) {
      const auto [it, first] = owners_.emplace(parameter.get(), current);
      std::vector<std::size_t>& lenders = blocks_[current].lenders;
      if (first)
        blocks_[current].owned.push_back(parameter);
      else if (it->second != current &&
               std::find(lenders.begin(), lenders.end(), it->second) == lenders.end())
        lenders.push_back(it->second);
    }
    for (const auto& [name, child] : module.children()) visit(*child, current);
  }

  std::size_t block_of(std::size_t part) {
    const auto found =
        std::find_if(blocks_.begin(), blocks_.end(), [&](const auto& block) { return block.part == part; });
    if (found != blocks_.end()) return static_cast<std::size_t>(found - blocks_.begin());
    blocks_.push_back({.part = part});
    return blocks_.size() - 1;
  }

  std::vector<BlockParameters> blocks_;
  std::unordered_map<const nn::Module*, std::vector<std::size_t>> parts_of_;
  std::unordered_map<const autograd::Parameter*, std::size_t> owners_;
};

}  // namespace

std::vector<BlockParameters> assign_parameters(nn::Module& model) {
  return Assignment(model).take();
}

std::string name_of(const BlockParameters& block, nn::Module& model) {
  if (block.block) return block.block == &model ? "root" : block.block->path();
  std::string name;
  for (const auto& module : dynamic_cast<nn::LayeredModel&>(model).modules(*block.part))
    if (!module->parameters().empty()) name += (name.empty() ? "" : " + ") + module->path();
  return name;
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
