#include "engine/optimizer.h"

#include <algorithm>

namespace sherd::engine {

bool Optimizer::update(sharding::Segment& segment, double factor, tensor::Kernels& kernels) {
  const tensor::Tensor masters = segment.masters(), gradients = segment.update_gradients();
  const tensor::Tensor parameters = segment.updated_parameters();
  bool finite = true;
  for (const sharding::Piece& piece : segment.layout().pieces(segment.update_begin(), segment.update_end())) {
    const std::int64_t begin = piece.flat_begin - segment.update_begin(), end = begin + piece.count;
    optim::SpanUpdate span;
    span.master = masters.range(begin, end).data<float>();
    span.grad = gradients.range(begin, end).raw();
    span.grad_dtype = gradients.dtype();
    for (std::size_t i = 0; i < segment.moments().size(); ++i)
      span.moments[i] = segment.moments()[i].tensor().range(begin, end).data<float>();
    if (segment.separate_masters()) {
      span.param = parameters.range(begin, end).raw();
      span.param_dtype = parameters.dtype();
    }
    span.n = piece.count;
    span.grad_factor = factor;
    span.decay = segment.layout().parameters()[piece.slot]->decay;
    finite = optim::update(span, hyper_, steps_, kernels.device().arena()) && finite;
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
  optim::Hyper& hyper = optimizer_->hyper();
  hyper.lr = point.lr;
  if (point.betas) hyper.beta1 = point.betas->first, hyper.beta2 = point.betas->second;
}

std::shared_ptr<Scheduler> make_scheduler(const config::Config& config, const std::shared_ptr<Optimizer>& optimizer) {
  if (std::holds_alternative<std::monostate>(config.scheduler)) return nullptr;
  const bool betas = config.optimizer.type != config::OptimizerType::sgd;
  return std::make_shared<Scheduler>(optim::LrSchedule(config.scheduler, config.optimizer.lr, betas), optimizer);
}

}  // namespace sherd::engine
