#include "nn/module.h"

#include <optional>
#include <unordered_set>

namespace sherd::nn {
namespace {

std::string join(const std::string& prefix, const std::string& name) {
  return prefix.empty() ? name : prefix + "." + name;
}

void collect(const Module& module, const std::string& prefix,
             std::vector<std::pair<std::string, ParameterPtr>>& out) {
  for (const auto& [name, parameter] : module.own_parameters())
    out.emplace_back(join(prefix, name), parameter);
  for (const auto& [name, child] : module.children()) collect(*child, join(prefix, name), out);
}

}  // namespace

std::vector<std::pair<std::string, ParameterPtr>> Module::named_parameters() const {
  std::vector<std::pair<std::string, ParameterPtr>> out;
  collect(*this, "", out);
  return out;
}

std::vector<ParameterPtr> Module::parameters() const {
  std::vector<ParameterPtr> out;
  std::unordered_set<const autograd::Parameter*> seen;
  const std::function<void(const Module&)> collect = [&](const Module& module) {
    for (const auto& [name, parameter] : module.parameters_)
      if (seen.insert(parameter.get()).second) out.push_back(parameter);
    for (const auto& [name, child] : module.children_) collect(*child);
  };
  collect(*this);
  return out;
}

void Module::for_each(const std::function<void(Module&)>& visit) {
  visit(*this);
  for (auto& [name, child] : children_) child->for_each(visit);
}

void Module::assign_names(const std::string& prefix) {
  path_ = prefix;
  std::unordered_set<std::string> taken;
  for (auto& [name, parameter] : parameters_) {
    require(taken.insert(name).second, "module '", prefix, "' declares '", name, "' twice");
    if (parameter->name.empty()) parameter->name = join(prefix, name);
  }
  for (auto& [name, child] : children_) {
    require(taken.insert(name).second, "module '", prefix, "' has two parts named '", name, "'");
    child->assign_names(join(prefix, name));
  }
}

void Module::freeze() {
  for (const ParameterPtr& parameter : parameters()) parameter->trainable = false;
}

ParameterPtr Module::declare(const std::string& name, const Shape& shape, Init init, Attributes attributes) {
  require(!name.empty() && name.find('.') == std::string::npos, "a parameter's name is one word, not '", name,
          "'");
  auto parameter = std::make_shared<autograd::Parameter>();
  parameter->shape = shape;
  parameter->init = init;
  parameter->trainable = attributes.trainable;
  parameter->decay = attributes.decay;
  return share(name, std::move(parameter));
}

ParameterPtr Module::share(const std::string& name, ParameterPtr parameter) {
  require(parameter != nullptr, "sharing a null parameter as '", name, "'");
  parameters_.emplace_back(name, parameter);
  return parameter;
}

void Module::adopt(const std::string& name, std::shared_ptr<Module> child) {
  require(child != nullptr && !name.empty() && name.find('.') == std::string::npos,
          "a part needs a module and a name of one word, not '", name, "'");
  children_.emplace_back(name, std::move(child));
}

Var Module::run(Tape& tape, const std::vector<Var>& inputs,
                const std::function<Var(Tape&, const std::vector<Var>&)>& body) {
  tape.enter(scope_);
  std::optional<autograd::Replaced<Recompute>> keeps_all;
  if (block_ && !recomputes_) keeps_all.emplace(tape.recompute, Recompute::none);
  Var out =
      block_ && tape.recompute == Recompute::full ? tape.recompute_later(inputs, body) : body(tape, inputs);
  keeps_all.reset();
  if (block_ || scope_) out.pin();
  tape.leave(scope_);
  return out;
}

Var Layer::operator()(Tape& tape, const Var& x) {
  return run(tape, {x}, [this](Tape& t, const std::vector<Var>& in) { return forward(t, in[0]); });
}

Var Model::operator()(Tape& tape, const tensor::Batch& batch) {
  tape.enter(scope());
  Var loss = forward(tape, batch);
  tape.leave(scope());
  return loss;
}

Var LayerList::forward(Tape& tape, const Var& x) {
  Var out = x;
  for (const auto& layer : layers_) out = (*layer)(tape, out);
  return out;
}

}  // namespace sherd::nn
