#include "optim/device_update.h"

#include <cstring>
#include <utility>
#include <vector>

#include "optim/cuda/dispatch.h"
#include "optim/split_master.h"

namespace sherd::optim {

unsigned* FiniteCheck::word() {
  if (memory_.bytes() == 0) {
    memory_ = device_.allocate(sizeof(unsigned), device::Category::workspace, device::Tier::host);
    *reinterpret_cast<unsigned*>(memory_.data()) = 0;
  }
  return reinterpret_cast<unsigned*>(memory_.data());
}

bool FiniteCheck::finite() {
  const bool failed = std::exchange(failed_, false);
  if (memory_.bytes() == 0) return !failed;
  try {
    if (const device::Event done = std::exchange(done_, {}))
      done.wait(device_.deadline(), "the optimizer's update");
  } catch (...) {
    *word() = 0;  // the next series shall not answer for this one
    throw;
  }
  return std::exchange(*word(), 0u) == 0 && !failed;
}

void update(std::span<const SpanUpdate> spans, const Hyper& hyper, std::int64_t step, device::Device& device,
            FiniteCheck& check) {
  std::vector<PlannedSpan> queued;
  for (const SpanUpdate& span : spans) {
    if (on_gpu(device, span.grad))
      queued.push_back({plan_span(span, hyper, step), span});
    else if (!update(span, hyper, step, device.arena()))
      check.fail();
  }
  if (queued.empty()) return;
  update_on_gpu(device, queued, check.word());
  check.done_ = device.record();
}

void split_master(const float* master, void* high, std::uint16_t* low, std::int64_t n,
                  device::Device& device) {
  if (on_gpu(device, master)) return split_on_gpu(device, master, high, low, n);
  split_master(master, high, low, n, device.arena());
}

void round_masters(const float* master, void* to, DType dtype, std::int64_t n, device::Device& device) {
  require(dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16,
          "round_masters: masters round to fp32, bf16 or fp16, not ", name_of(dtype));
  if (on_gpu(device, master)) return round_on_gpu(device, master, to, dtype, n);
  round_masters(master, to, dtype, n, device.arena());
}

}  // namespace sherd::optim
