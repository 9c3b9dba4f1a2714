#include "engine/pipeline/model_stages.h"

namespace sherd::engine {

using autograd::Tape;
using autograd::Var;
using tensor::Tensor;

ModelStages::ModelStages(nn::LayeredModel& model, const StageLayout& layout, comm::Communicator& group)
    : model_(model), layout_(layout), group_(group) {
  model_.set_stages(this);
}

ModelStages::~ModelStages() {
  model_.set_stages(nullptr);
}

Var ModelStages::cross(Tape& tape, std::size_t part, const Var& x) {
  const int from = layout_.stage_of(part - 1), to = layout_.stage_of(part);
  if (from == to) return x;
  comm::CallOptions options;
  options.label = cat("what part ", part - 1, " of the model gives");
  comm::CallOptions of_header = options;
  of_header.scalar = true;
  const Tensor header = make_header(tape.device());
  const bool absent = tape.device().kind() == device::Kind::meta;  // the other stages are
  if (from == layout_.stage) {
    if (!absent) write_header(header, x.value());
    group_.send(header, to, of_header);
    group_.send(x.value(), to, options);
    return {};
  }
  if (to != layout_.stage) return {};
  group_.receive(header, from, of_header);
  const ValueForm form = absent ? layout_.given.at(part - 1) : read_header(header);
  const Tensor value = tape.empty(form.shape, form.dtype);
  group_.receive(value, from, options);
  return tape.variable(value);
}

Tensor ModelStages::from_last(Tape& tape, const Tensor& value) {
  const int last = layout_.stages - 1;
  comm::CallOptions options;
  options.label = "what the last stage gives";
  comm::CallOptions of_header = options;
  of_header.scalar = true;
  const Tensor header = make_header(tape.device());
  if (layout_.stage == last) write_header(header, value);
  group_.broadcast(header, last, of_header);
  const ValueForm form = read_header(header);
  const Tensor out = layout_.stage == last ? value : tape.empty(form.shape, form.dtype);
  group_.broadcast(out, last, options);
  return out;
}

}  // namespace sherd::engine
