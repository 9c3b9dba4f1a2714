#include "engine/update/pass_runner.h"

#include "device/accelerator.h"
#include "engine/update/pruned_weights.h"
#include "engine/update/update_staging.h"

namespace sherd::engine {

struct PassRunner::OnGpu {
  explicit OnGpu(device::Accelerator& device) : check(device), staging(device) {}
  optim::FiniteCheck check;
  UpdateStaging staging;
};

PassRunner::OnGpu& PassRunner::on_gpu(device::Device& device) {
  if (!gpu_) gpu_ = std::make_shared<OnGpu>(*device.accelerator());
  return *gpu_;
}

bool PassRunner::beside_gpu(device::Device& device, const sharding::Segment& segment) {
  return device.has_own_memory() && UpdateStaging::by_processor(segment);
}

bool PassRunner::run(const UpdateView& view, device::Device& device, const UpdatePass& pass) {
  const bool beside = beside_gpu(device, *view.segment);
  if (device.kind() == device::Kind::meta) {
    if (beside)
      UpdateStaging::charge(device, view);
    else if (device.has_own_memory() && pass.charge_on_gpu)
      pass.charge_on_gpu();
    return true;
  }
  const bool prunes = pass.moves_weights && view.segment->has_pruned();
  const auto work = [&](const UpdateView& part, std::int64_t most, optim::FiniteCheck& check) {
    prunes ? update_pruned(part, most, pass.work, device, check) : pass.work(part, check);
  };
  const auto on_processor = [&](const UpdateView& part) {
    // Values are read three times, from a cache.
    constexpr std::int64_t most = std::int64_t{1} << 17;
    optim::FiniteCheck check(device);
    work(part, most, check);
    return check.finite();
  };
  if (beside) return on_gpu(device).staging.run(on_processor, pass.moves_weights);
  if (device.kind() == device::Kind::cpu) return on_processor(view);
  work(view, view.gradients.numel(), on_gpu(device).check);
  if (pass.moves_weights && view.segment->parameters().stored())
    device.synchronize();  // the store is going to read them
  return true;
}

void PassRunner::announce(const UpdateView& view, const device::Event& ready, device::Device& device) {
  if (device.kind() != device::Kind::meta && beside_gpu(device, *view.segment))
    on_gpu(device).staging.announce(view, ready);
}

void PassRunner::join() {
  if (gpu_) gpu_->staging.join();
}

void PassRunner::end_series() noexcept {
  if (gpu_) gpu_->staging.end_series();
}

bool PassRunner::finite() {
  return !gpu_ || gpu_->check.finite();
}

}  // namespace sherd::engine
