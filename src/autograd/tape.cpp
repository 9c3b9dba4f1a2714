#include "autograd/tape.h"

#include <algorithm>
#include <string_view>

#include "tensor/formats/stored_format.h"

namespace sherd::autograd {

struct Remake {
  device::StorageWatch watch;
  std::size_t byte_offset = 0;
  Shape shape;
  DType dtype = DType::f32;
  RemakeFn make;
  Tensor made;  // once made again, kept until the last Saved goes
};

const Tensor& Var::value() const {
  require(defined(), "an undefined Var has no value");
  if (!state_->parameter) return state_->value;
  const Parameter& parameter = *state_->parameter;
  if (stored()) {
    if (!state_->value.defined()) state_->value = state_->tape->made_of_blocks(parameter);
    return state_->value;
  }
  require(parameter.value.defined(), "parameter '", parameter.name,
          "' is not gathered: read it inside the forward of the block that owns it, or take a lease");
  return parameter.value;
}

const StoredValue* Var::stored() const {
  const bool is = state_ && state_->parameter && state_->parameter->in_blocks.blocks.defined();
  return is ? &state_->parameter->in_blocks : nullptr;
}

const Shape& Var::shape() const {
  return stored() ? state_->parameter->shape : value().shape();
}

DType Var::dtype() const {
  return stored() ? stored()->dtype : value().dtype();
}

Tape& Var::tape() const {
  require(defined(), "an undefined Var has no tape");
  return *state_->tape;
}

const Tensor& Var::grad() const {
  static const Tensor none;
  return state_ && state_->slot ? state_->slot->grad : none;
}

Saved::Saved(const Var& var) {
  if (!var.defined()) return;
  if (var.state_->parameter)
    parameter_ = var.state_->parameter;
  else if (var.state_->remake)
    remake_ = var.state_->remake;
  else
    tensor_ = var.state_->value;
}

Tensor Saved::get(Tape& tape) const {
  if (parameter_) {
    if (parameter_->in_blocks.blocks.defined()) return tape.made_of_blocks(*parameter_);
    require(parameter_->value.defined(), "parameter '", parameter_->name,
            "' is not gathered during backward");
    return parameter_->value;
  }
  if (!remake_) return tensor_;
  if (remake_->made.defined()) return remake_->made;
  if (device::Storage alive = remake_->watch.lock())
    return Tensor::view_of(std::move(alive), remake_->byte_offset, remake_->shape, remake_->dtype);
  return remake_->made = remake_->make(tape);
}

Var Tape::constant(Tensor value) {
  auto state = std::make_shared<Var::State>();
  state->tape = this;
  state->value = std::move(value);
  return Var(std::move(state));
}

Tensor Tape::converted(const Tensor& x, DType dtype) const {
  if (!x.defined() || x.dtype() == dtype) return x;
  Tensor out = empty(x.shape(), dtype);
  kernels_.copy(x, out);
  return out;
}

Tensor Tape::on_host(const Tensor& x, DType dtype) const {
  const Tensor out = empty(x.shape(), dtype);
  kernels_.copy(x, out);
  return tensor::to_host(device(), out);
}

Var Tape::input(Tensor value) {
  if (!input_dtype || !value.defined() || !is_floating(value.dtype())) return constant(std::move(value));
  return constant(converted(value, *input_dtype));
}

Var Tape::variable(Tensor value) {
  Var var = constant(std::move(value));
  const Tensor& kept = var.state_->value;
  var.state_->slot = std::make_shared<GradSlot>(GradSlot{{}, nullptr, kept.shape(), kept.dtype()});
  return var;
}

Var Tape::leaf(Tensor value, GradRef slot) {
  // Sharing the slot sends gradients straight to where the first run's would have gone, in the same order of
  // sums.
  Var var = constant(std::move(value));
  if (slot) var.state_->parameter = slot->parameter;
  var.state_->slot = std::move(slot);
  return var;
}

Tensor Tape::made_of_blocks(const Parameter& parameter) const {
  const auto& [blocks, dtype] = parameter.in_blocks;
  const tensor::BlockSize size = tensor::block_size(parameter.stored_as);
  const Tensor whole = empty({blocks.numel() / size.bytes * size.elements}, dtype);
  kernels_.dequantize(parameter.stored_as, blocks, whole);
  return whole.range(0, parameter.numel()).reshape(parameter.shape);
}

Var Tape::parameter(const ParameterPtr& parameter) {
  require(parameter != nullptr, "a null parameter was used in a forward pass");
  auto state = std::make_shared<Var::State>();
  state->tape = this;
  state->parameter = parameter;
  if (parameter->trainable) {
    state->slot = std::make_shared<GradSlot>();
    state->slot->parameter = parameter;
  }
  return Var(std::move(state));
}

Var Tape::record(Tensor value, std::span<const Var> inputs, BackwardFn backward, RemakeFn remake,
                 std::source_location where) {
  count_uses(inputs);
  const bool wanted =
      std::any_of(inputs.begin(), inputs.end(), [](const Var& v) { return v.requires_grad(); });
  Var out = wanted ? variable(std::move(value)) : constant(std::move(value));
  if (!wanted) return out;
  out.state_->pass = recording_ ? pass_ : Var::State::unrecorded;
  if (!recording_) return out;
  for (const Var& input : inputs) require_gradient_arrives(input);
  if (remake && recompute == Recompute::selective) {
    const Tensor& made = out.state_->value;
    auto recipe = std::make_shared<Remake>();
    recipe->watch = device::StorageWatch(made.storage());
    recipe->byte_offset = made.byte_offset();
    recipe->shape = made.shape();
    recipe->dtype = made.dtype();
    recipe->make = std::move(remake);
    out.state_->remake = std::move(recipe);
  }
  nodes_.push_back({out.state_->slot, std::move(backward), nullptr, false, where});
  return out;
}

/// Recompute runs operations again, which is no other use.
void Tape::count_uses(std::span<const Var> inputs) {
  if (begun_ == pass_) return;
  for (const Var& input : inputs)
    if (const GradRef ref = input.grad_ref(); ref && ref->parameter) ++uses_[ref->parameter.get()];
}

std::string Tape::running() const {
  if (!running_) return "accumulate()";
  const std::source_location& where = running_->where;
  const std::string_view file = where.file_name();
  return cat("the operation of ", file.substr(file.rfind('/') + 1), ":", where.line(), " (",
             where.function_name(), ")");
}

void Tape::check_gradient(const GradSlot& slot, const Shape& shape, DType dtype) const {
  const Shape& wanted = slot.parameter ? slot.parameter->shape : slot.shape;
  if (shape == wanted && (slot.parameter ? is_floating(dtype) : dtype == slot.dtype)) return;
  fail(ErrorKind::usage, running(), " gave a gradient of ", sherd::name_of(dtype), " ", shape.str(), " for ",
       slot.parameter ? cat("parameter '", slot.parameter->name, "'") : "a value", " of ",
       slot.parameter ? "" : cat(sherd::name_of(slot.dtype), " "), wanted.str(),
       ": its backward must give every input a gradient of that input's shape and dtype");
}

void Tape::accumulate(const GradRef& ref, Tensor grad) {
  if (!ref) return;
  if (!grad.defined()) fail(ErrorKind::usage, running(), " gave an undefined gradient");
  check_gradient(*ref, grad.shape(), grad.dtype());
  if (ref->parameter || ref->grad.defined()) {
    const Shape shape = grad.shape();
    const DType dtype = grad.dtype();
    write_grad(ref, shape, dtype, [&](const Tensor& to, bool add) {
      if (add)  // a parameter's gradient may have another dtype
        kernels_.add(to, converted(grad, to.dtype()).reshape(to.shape()), to);
      else
        kernels_.copy(grad, to);
    });
  } else {
    ref->grad = std::move(grad);
  }
}

Tensor Tape::take_gathered(const GradRef& ref) {
  if (!ref || ref->parameter || !ref->grad.defined() || !ref->grad.storage().unique()) return {};
  return std::move(ref->grad);
}

void Tape::write_grad(const GradRef& ref, const Shape& shape, DType dtype,
                      const std::function<void(const Tensor&, bool)>& write) {
  if (!ref) return;
  check_gradient(*ref, shape, dtype);
  if (ref->parameter) {
    autograd::Parameter& parameter = *ref->parameter;
    require(parameter.grad.defined(), "parameter '", parameter.name,
            "' takes no gradient outside its block's backward");
    require(!parameter.grad_sum.folded, running(), " gave a second gradient for parameter '", parameter.name,
            "', which only one operation has named among its inputs");
    write(parameter.grad, parameter.grad_written);
    parameter.grad_written = true;
    return;
  }
  const bool add = ref->grad.defined();
  if (!add) {
    ref->grad = empty(shape, dtype);
  } else if (!ref->grad.storage().unique()) {  // somebody else reads this gradient too
    Tensor own = empty(ref->grad.shape(), ref->grad.dtype());
    kernels_.copy(ref->grad, own);
    ref->grad = std::move(own);
  }
  write(ref->grad, add);
}

bool Tape::fold_grad(const GradRef& ref, const Shape& shape, DType dtype,
                     const std::function<void(const Tensor&, bool, DType)>& write) {
  if (!ref || !ref->parameter || dtype == DType::f64) return false;
  GradientSum& sum = ref->parameter->grad_sum;
  const auto uses = uses_.find(ref->parameter.get());
  if (!sum.to.defined() || (sum.to.dtype() != dtype && sum.to.dtype() != DType::f32) || sum.folded ||
      ref->parameter->grad_written || uses == uses_.end() || uses->second != 1)
    return false;
  check_gradient(*ref, shape, dtype);
  write(sum.to, sum.onto, sum.rounding);
  sum.folded = true;
  return true;
}

void Tape::enter(const std::shared_ptr<Scope>& scope) {
  if (!scope) return;
  scope->pre_forward(*this);
  if (recording_) nodes_.push_back({nullptr, nullptr, scope, true});
}

void Tape::leave(const std::shared_ptr<Scope>& scope) {
  if (!scope) return;
  scope->post_forward(*this);
  if (recording_) nodes_.push_back({nullptr, nullptr, scope, false});
}

Tensor Tape::moved(const Tensor& value, device::Tier tier) const {
  const Tensor there =
      Tensor::empty(device(), value.shape(), value.dtype(), device::Category::activations, tier);
  kernels_.copy(value, there);
  return there;
}

/// Brings an input of recompute_later() back.
std::function<Tensor(Tape&)> Tape::save_input(const Var& input) {
  if (saved_inputs) return [restore = saved_inputs->save(input.value())](Tape&) { return restore(); };
  if (saved_inputs_in_host)
    return [there = moved(input.value(), device::Tier::host)](Tape& tape) {
      return tape.moved(there, device::Tier::device);
    };
  return [saved = Saved(input)](Tape& tape) { return saved.get(tape); };
}

Var Tape::recompute_later(const std::vector<Var>& inputs,
                          const std::function<Var(Tape&, const std::vector<Var>&)>& body) {
  if (!recording_) return body(*this, inputs);
  Var ran;
  {
    NoGrad pause(*this);
    ran = body(*this, inputs);
  }
  if (!ran.requires_grad()) return ran;
  std::vector<std::function<Tensor(Tape&)>> saved;
  std::vector<GradRef> refs;
  for (const Var& input : inputs) {
    require_gradient_arrives(input);
    saved.push_back(save_input(input));
    refs.push_back(input.grad_ref());
  }
  Var out = variable(ran.value());
  out.state_->pass = pass_;
  nodes_.push_back({out.grad_ref(),
                    [saved = std::move(saved), refs = std::move(refs), body](Tape& tape, Tensor dy) {
                      const std::size_t mark = tape.nodes_.size();
                      std::vector<Var> again;
                      for (std::size_t i = 0; i < saved.size(); ++i)
                        again.push_back(tape.leaf(saved[i](tape), refs[i]));
                      {
                        Var output = body(tape, again);
                        tape.accumulate(output.grad_ref(), std::move(dy));
                      }
                      tape.run_back_to(mark);
                    },
                    nullptr, false, std::source_location::current()});
  return out;
}

/// Gradients of an earlier pass's values would go where nothing reads them.
void Tape::require_gradient_arrives(const Var& input) const {
  if (!input.requires_grad()) return;
  const std::uint64_t pass = input.state_->pass;
  require(input.state_->tape == this &&
              (pass == pass_ || pass == Var::State::leaf || pass == Var::State::unrecorded),
          "an operation's input was computed by an earlier forward pass, or by another engine's: its "
          "gradient could go "
          "nowhere. Pass its tensor through Tape::input(), which takes no gradient");
}

void Tape::require_output(const Var& output, const char* what) const {
  require(output.defined() && output.requires_grad(), what, " depends on nothing that takes a gradient");
  require(output.state_->tape == this &&
              (output.state_->pass == pass_ || output.state_->pass == Var::State::leaf),
          what,
          " was computed by an earlier forward pass, by another engine's, or without recording (NoGrad, "
          "evaluation): run backward on the loss of the forward just before it");
  require(begun_ != pass_, "backward has begun on this forward pass already: run forward again");
}

void Tape::start(const std::vector<OutputGradient>& outputs, WeightGradients when) {
  when_ = when;
  begun_ = pass_;
  entered_.clear();
  deferred_.clear();
  for (const OutputGradient& each : outputs) accumulate(each.output.grad_ref(), each.gradient);
}

void Tape::begin_backward(const Var& loss, double seed, WeightGradients when) {
  require(loss.defined() && loss.shape().numel() == 1, "backward needs a scalar loss");
  require_output(loss, "the loss");
  Tensor gradient = empty(loss.shape(), loss.dtype());
  kernels_.fill(gradient, seed);
  loss_seed = seed;
  start({{loss, std::move(gradient)}}, when);
}

void Tape::begin_backward(const std::vector<OutputGradient>& outputs, WeightGradients when) {
  for (const OutputGradient& each : outputs) {
    require_output(each.output, "an output");
    const GradSlot& slot = *each.output.grad_ref();
    require(
        each.gradient.defined() && each.gradient.shape() == slot.shape && each.gradient.dtype() == slot.dtype,
        "backward needs a gradient of its output's shape and dtype: ", sherd::name_of(slot.dtype), " ",
        slot.shape.str());
  }
  start(outputs, when);
}

void Tape::backward(const Var& loss, double seed) {
  begin_backward(loss, seed);
  while (continue_backward()) {
  }
}

void Tape::backward(const std::vector<OutputGradient>& outputs) {
  require(!outputs.empty(), "backward needs an output and its gradient");
  begin_backward(outputs);
  while (continue_backward()) {
  }
}

void Tape::clear() {
  nodes_.clear();
  entered_.clear();
  deferred_.clear();
  uses_.clear();
  shared_values_.clear();
  ++pass_;
}

Tensor Tape::shared_value(const std::vector<std::int64_t>& what, const std::function<Tensor()>& make) {
  for (const auto& [known, value] : shared_values_)
    if (known == what) return value;
  return shared_values_.emplace_back(what, make()).second;
}

/// Takes the newest node off the tape and runs its backward. True where that ended a block's.
bool Tape::run_last() {
  RecordedOperation node = std::move(nodes_.back());
  nodes_.pop_back();
  if (node.scope) {
    if (node.entering) return leave_block(node.scope), true;
    node.scope->pre_backward(*this);
    entered_.push_back({node.scope, {}});
    return false;
  }
  if (!node.output->grad.defined()) return false;  // nothing downstream depended on it
  // Within recompute_later()'s run these are the operations of its body.
  const Replaced<const RecordedOperation*> running(running_, &node);
  node.backward(*this, std::move(node.output->grad));
  return false;
}

void Tape::leave_block(const std::shared_ptr<Scope>& scope) {
  Deferred block = std::move(entered_.back());
  entered_.pop_back();
  scope->post_backward(*this);
  // All blocks alike, whatever they have put off: ranks close the same gradients at the same time.
  if (when_ == WeightGradients::later)
    deferred_.push_back(std::move(block));
  else
    scope->gradients_complete(*this);
}

void Tape::run_back_to(std::size_t mark) {
  while (nodes_.size() > mark) run_last();
}

bool Tape::continue_backward() {
  while (!nodes_.empty())
    if (run_last()) return true;
  ++pass_;
  return false;
}

void Tape::weight_gradient(const GradRef& weight, std::function<void(Tape&)> compute) {
  const bool later = when_ == WeightGradients::later && weight && weight->parameter && !entered_.empty();
  if (later)
    entered_.back().compute.push_back(std::move(compute));
  else
    compute(*this);
}

bool Tape::continue_weight_gradients() {
  if (deferred_.empty()) return false;
  const Deferred block = std::move(deferred_.front());
  deferred_.pop_front();
  block.scope->pre_weight_gradients(*this);
  for (const auto& compute : block.compute) compute(*this);
  block.scope->gradients_complete(*this);
  return true;
}

}  // namespace sherd::autograd
