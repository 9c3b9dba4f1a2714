#include "engine/report/step_log.h"

#include "base/log.h"

namespace sherd::engine {
namespace {

void log_memory(const device::Ledger& ledger) {
  std::string line;
  for (int c = 0; c < device::category_count; ++c) {
    const auto category = static_cast<device::Category>(c);
    line += cat(" | ", device::name_of(category), ' ', ledger.current(device::Tier::device, category),
                " (peak ", ledger.peak(device::Tier::device, category), ')');
  }
  log_info("memory of rank 0's device (bytes)", line);
}

}  // namespace

void log_step(const Engine& engine) {
  const config::Config& config = engine.config();
  const StepReport& report = engine.last_step();
  std::string lrs;  // of all parameter groups, where there are several
  for (std::size_t i = 0; report.lr.size() > 1 && i < report.lr.size(); ++i)
    lrs += cat(i == 0 ? " lrs=" : ",", report.lr[i]);
  log_info("step=", engine.global_steps(), " loss=", report.loss, " grad_norm=", report.grad_norm,
           " lr=", report.lr.empty() ? 0.0 : report.lr.front(), lrs, " skipped=", engine.skipped_steps(),
           config.precision.compute == DType::f16 ? cat(" loss_scale=", report.loss_scale) : std::string());
  if (config.wall_clock_breakdown)
    log_info("time (ms) | forward ", report.times.forward, " | backward ", report.times.backward, " | step ",
             report.times.update);
  if (config.memory_breakdown) log_memory(engine.device().ledger());
}

}  // namespace sherd::engine
