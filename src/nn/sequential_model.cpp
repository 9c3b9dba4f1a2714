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

Var SequentialModel::forward_part(Tape& tape, std::size_t part, const Var& x, const tensor::Batch& batch) {
  const Var y = (*layers_[part])(tape, part == 0 ? input_(tape, batch) : x);
  return part + 1 == layers_.size() ? loss_(y, batch) : y;
}

}  // namespace sherd::nn
