#include "engine/report/monitor.h"

#include "base/error.h"
#include "base/log.h"
#include "engine/report/log_files.h"

namespace sherd::engine {
namespace fs = std::filesystem;
namespace {

fs::path folder_of(const char* section, const config::Monitor& monitor) {
  fs::path folder = fs::path(monitor.output_path) / monitor.job_name;
  std::error_code error;
  fs::create_directories(folder, error);
  if (error || !fs::is_directory(folder))
    fail(ErrorKind::io, section, ": the folder '", folder.string(), "' cannot be made (",
         error ? error.message() : "a file has its name", "): give ", section, ".output_path another one");
  return folder;
}

void warn_of_earlier(const char* section, const fs::path& folder) {
  log_warning(section, ": '", folder.string(), "' holds what an earlier run wrote, to which this one adds; ",
              "another ", section, ".job_name keeps them apart");
}

}  // namespace

std::vector<Scalar> scalars_of(const StepMetrics& m, bool fp16) {
  std::vector<Scalar> out;
  const auto add = [&](const char* name, double value) {
    out.push_back({std::string("Train/Samples/") + name, value});
  };
  add("train_loss", m.loss);
  for (const auto& [name, value] : m.objective) add(name.c_str(), value);
  add("lr", m.lr);
  if (fp16) add("loss_scale", m.loss_scale);
  if (m.val_loss) add("eval_loss", *m.val_loss);
  for (const auto& [name, value] : m.metrics) add(("eval_" + name).c_str(), value);
  add("grad_norm", m.grad_norm);
  add("step_ms", m.step_ms);
  add("tokens_per_s", m.tokens_per_s);
  if (m.mfu) add("mfu", *m.mfu);
  if (m.fp8)
    add("fp8_to_zero", m.fp8->to_zero), add("fp8_not_finite", static_cast<double>(m.fp8->not_finite));
  if (m.experts.empty()) return out;
  const RoutingMeans means = routing_means(m);
  add("moe_balance_loss", means.balance);
  add("moe_z_loss", means.z);
  add("moe_dropped", means.dropped);
  return out;
}

Monitors::Monitors(const config::Config& config, std::optional<std::int64_t> resumed_at)
    : fp16_(config.precision.compute == DType::f16) {
  if (config.tensorboard.enabled) {
    const fs::path folder = folder_of("tensorboard", config.tensorboard);
    if (!resumed_at && !event_files(folder).empty()) warn_of_earlier("tensorboard", folder);
    events_ = std::make_unique<EventFile>(folder, resumed_at);
  }
  if (config.csv_monitor.enabled) {
    const fs::path folder = folder_of("csv_monitor", config.csv_monitor);
    if (!resumed_at && fs::exists(folder / "Train_Samples_train_loss.csv"))
      warn_of_earlier("csv_monitor", folder);
    csv_ = std::make_unique<CsvFiles>(folder, resumed_at);
  }
}

Monitors::~Monitors() = default;

void Monitors::write(const StepMetrics& metrics, std::int64_t samples) {
  if (!enabled()) return;
  const std::vector<Scalar> scalars = scalars_of(metrics, fp16_);
  // Training is worth more than a record of it.
  const auto attempt = [&](const char* section, auto& file) {
    if (!file) return;
    try {
      file->write(samples, scalars);
    } catch (const Error& error) {
      file.reset();
      log_warning(section, ": nothing more is written: ", error.what());
    }
  };
  attempt("tensorboard", events_);
  attempt("csv_monitor", csv_);
}

}  // namespace sherd::engine
