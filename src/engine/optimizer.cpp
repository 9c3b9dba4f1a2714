#include "engine/optimizer.h"

#include <algorithm>

#include "device/meta.h"
#include "engine/update_staging.h"
#include "optim/device_update.h"

namespace sherd::engine {

optim::SpanUpdate Optimizer::span_of(const UpdateView& view, const sharding::Piece& piece,
                                     double factor) const {
  const std::int64_t begin = piece.flat_begin - view.begin, end = begin + piece.count;
  const sharding::MasterForm form = view.segment->master_form();
  const autograd::Parameter& parameter = *view.segment->layout().parameters()[piece.slot];
  const tensor::Tensor weights = view.parameters.range(begin, end);
  optim::SpanUpdate span;
  switch (form) {
    case sharding::MasterForm::in_parameters:
      span.master = weights.data<float>();
      break;
    case sharding::MasterForm::separate:
      span.master = view.masters.range(begin, end).data<float>();
      break;
    case sharding::MasterForm::split:
      span.low = view.masters.range(begin, end).data<std::uint16_t>();
      break;
  }
  if (form != sharding::MasterForm::in_parameters)
    span.param = weights.raw(), span.param_dtype = weights.dtype();
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
  return span;
}

struct Optimizer::OnGpu {
  explicit OnGpu(device::CudaDevice& device) : check(device), staging(device) {}
  optim::FiniteCheck check;
  UpdateStaging staging;
};

Optimizer::OnGpu& Optimizer::on_gpu(device::Device& device) {
  if (!gpu_) gpu_ = std::make_shared<OnGpu>(device::as_cuda(device));
  return *gpu_;
}

bool Optimizer::update(const UpdateView& view, double factor, tensor::Kernels& kernels) {
  device::Device& device = kernels.device();
  if (device.kind() == device::Kind::meta) {
    if (device::stands_for(device) == device::Kind::cuda && UpdateStaging::by_processor(*view.segment))
      UpdateStaging::book(device, view);
    return true;
  }
  const auto spans_of = [&](const UpdateView& part) {
    std::vector<optim::SpanUpdate> spans;
    for (const sharding::Piece& piece :
         part.segment->layout().pieces(part.begin, part.begin + part.gradients.numel()))
      spans.push_back(span_of(part, piece, factor));
    return spans;
  };
  const auto by_processor = [&](const UpdateView& part) {
    bool finite = true;
    for (const optim::SpanUpdate& span : spans_of(part))
      finite = optim::update(span, used_, steps_, device.arena()) && finite;
    return finite;
  };
  if (device.kind() == device::Kind::cpu) return by_processor(view);
  OnGpu& gpu = on_gpu(device);
  if (UpdateStaging::by_processor(*view.segment)) return gpu.staging.run(by_processor);
  optim::update(spans_of(view), used_, steps_, device, gpu.check);
  if (view.segment->parameters().stored()) device.synchronize();  // the store is going to read them
  return true;
}

void Optimizer::announce(const UpdateView& view, const device::Event& ready, tensor::Kernels& kernels) {
  device::Device& device = kernels.device();
  if (device.kind() == device::Kind::cuda && UpdateStaging::by_processor(*view.segment))
    on_gpu(device).staging.announce(view, ready);
}

void Optimizer::join() {
  if (gpu_) gpu_->staging.join();
}

void Optimizer::end_series() noexcept {
  if (gpu_) gpu_->staging.end_series();
}

bool Optimizer::finite() {
  return !gpu_ || gpu_->check.finite();
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

std::shared_ptr<Scheduler> make_scheduler(const config::Config& config,
                                          const std::shared_ptr<Optimizer>& optimizer) {
  if (std::holds_alternative<std::monostate>(config.scheduler)) return nullptr;
  const bool betas = config::has_betas(config.optimizer.type);
  return std::make_shared<Scheduler>(optim::LrSchedule(config.scheduler, config.optimizer.lr, betas),
                                     optimizer);
}

}  // namespace sherd::engine
