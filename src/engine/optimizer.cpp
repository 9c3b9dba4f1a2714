#include "engine/optimizer.h"

#include <algorithm>

namespace sherd::engine {

bool Optimizer::update(const UpdateView& view, double factor, tensor::Kernels& kernels) {
  if (kernels.device().kind() == device::Kind::meta) return true;
  const sharding::SegmentLayout& layout = view.segment->layout();
  const sharding::MasterForm form = view.segment->master_form();
  bool finite = true;
  for (const sharding::Piece& piece : layout.pieces(view.begin, view.begin + view.gradients.numel())) {
    const std::int64_t begin = piece.flat_begin - view.begin, end = begin + piece.count;
    const autograd::Parameter& parameter = *layout.parameters()[piece.slot];
    const tensor::Tensor weights = view.parameters.range(begin, end);
    optim::SpanUpdate span;
    switch (form) {
      case sharding::MasterForm::in_parameters: span.master = weights.data<float>(); break;
      case sharding::MasterForm::separate: span.master = view.masters.range(begin, end).data<float>(); break;
      case sharding::MasterForm::split: span.low = view.masters.range(begin, end).data<std::uint16_t>(); break;
    }
    if (form != sharding::MasterForm::in_parameters) span.param = weights.raw(), span.param_dtype = weights.dtype();
    span.grad = view.gradients.range(begin, end).raw();
    span.grad_dtype = view.gradients.dtype();
    for (std::size_t i = 0; i < view.moments.size(); ++i) {
      span.moments[i] = view.moments[i].range(begin, end).raw();
      span.moment_dtype = view.moments[i].dtype();
    }
    span.rounding = {seed_, stable_hash(parameter.name)};
    span.first_element = piece.parameter_begin;
    span.n = piece.count;
    span.grad_factor = factor;
    span.decay = parameter.decay;
    finite = optim::update(span, used_, steps_, kernels.device().arena()) && finite;
  }
  return finite;
}

Scheduler::Scheduler(optim::LrSchedule schedule, std::shared_ptr<Optimizer> optimizer)
    : schedule_(std::move(schedule)), optimizer_(std::move(optimizer)) {
  apply();
}

void Scheduler::step() {
  schedule_.step();
  apply();
}

void Scheduler::restore(const std::string& saved) {
  schedule_.restore(saved);
  apply();
}

void Scheduler::apply() {
  const optim::SchedulePoint point = schedule_.current();
  optimizer_->set_scheduled_lr(point.lr);
  optim::Hyper& hyper = optimizer_->hyper();
  if (point.betas) hyper.beta1 = point.betas->first, hyper.beta2 = point.betas->second;
}

std::shared_ptr<Scheduler> make_scheduler(const config::Config& config, const std::shared_ptr<Optimizer>& optimizer) {
  if (std::holds_alternative<std::monostate>(config.scheduler)) return nullptr;
  const bool betas = config.optimizer.type != config::OptimizerType::sgd;
  return std::make_shared<Scheduler>(optim::LrSchedule(config.scheduler, config.optimizer.lr, betas), optimizer);
}

}  // namespace sherd::engine
