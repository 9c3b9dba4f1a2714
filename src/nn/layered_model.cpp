#include "nn/layered_model.h"

namespace sherd::nn {

void LayeredModel::append_part(std::vector<std::shared_ptr<Module>> modules) {
  require(!modules.empty(), "a part of a model needs a module");
  parts_.push_back({std::move(modules), nullptr});
}

Var LayeredModel::run_part(Tape& tape, std::size_t part, const std::function<Var()>& body) {
  const std::shared_ptr<autograd::Scope>& scope = parts_.at(part).scope;
  if (!scope) return body();
  tape.enter(scope);
  Var out = body();
  if (out.defined()) out.pin();
  tape.leave(scope);
  return out;
}

Var LayeredModel::run(Tape& tape, std::size_t begin, std::size_t end, Var x, const tensor::Batch& batch) {
  for (std::size_t part = begin; part < end; ++part)
    x = run_part(tape, part, [&] { return forward_part(tape, part, x, batch); });
  return x;
}

Var LayeredModel::run_to(Tape& tape, std::size_t end, const tensor::Batch& batch) {
  if (!stages_) return run(tape, 0, end, {}, batch);
  Var x;
  for (std::size_t part = 0; part < end; ++part) {
    if (part > 0) x = stages_->cross(tape, part, x);
    if (stages_->has(part)) x = run(tape, part, part + 1, x, batch);
  }
  return end < parts() ? stages_->cross(tape, end, x) : x;
}

SequentialModel::SequentialModel(const std::vector<std::shared_ptr<Layer>>& layers, Input input, Loss loss)
    : layers_(layers), input_(std::move(input)), loss_(std::move(loss)) {
  require(!layers_.empty() && input_ && loss_, "a sequential model needs layers, an input and a loss");
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    add(std::to_string(i), layers_[i])->mark_block();
    append_part({layers_[i]});
  }
}

Var SequentialModel::run_layer(Tape& tape, std::size_t part, const Var& x, const tensor::Batch& batch) {
  return (*layers_[part])(tape, part == 0 ? input_(tape, batch) : x);
}

Var SequentialModel::outputs(Tape& tape, const tensor::Batch& batch) {
  const std::size_t last = layers_.size() - 1;
  const Var x = run_to(tape, last, batch);
  if (stages() && !stages()->has(last)) return {};
  return run_part(tape, last, [&] { return run_layer(tape, last, x, batch); });
}

Var SequentialModel::forward_part(Tape& tape, std::size_t part, const Var& x, const tensor::Batch& batch) {
  const Var y = run_layer(tape, part, x, batch);
  return part + 1 == layers_.size() ? loss_(y, batch) : y;
}

}  // namespace sherd::nn
