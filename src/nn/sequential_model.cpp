#include "nn/sequential_model.h"

namespace sherd::nn {

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
