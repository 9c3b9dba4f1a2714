#include "cli/train_run.h"

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/files.h"
#include "base/log.h"
#include "base/text/excerpt.h"
#include "cli/program.h"
#include "comm/gather.h"
#include "device/accelerator.h"
#include "engine/report/fp8_report.h"
#include "engine/report/report.h"
#include "engine/setup/process_grid.h"
#include "models/gpt.h"

namespace sherd::cli {
namespace {

/// Tells whose kernels attention ran on, on a GPU.
std::string route_shown(const tensor::AttentionRoutes& attention) {
  if (attention.by_own == 0) return "by cuDNN";
  if (attention.by_library == 0) return "by Sherd's own kernels (see docs/gpu.md)";
  return cat("by cuDNN, and ", attention.by_own, " of ", attention.by_library + attention.by_own,
             " calls by Sherd's own kernels (see docs/gpu.md)");
}

double median_of(std::vector<double> seconds) {
  std::sort(seconds.begin(), seconds.end());
  return seconds[seconds.size() / 2];
}

}  // namespace

TrainRun::TrainRun(DistributedPtr dist, const TrainRequest& request,
                   std::shared_ptr<const engine::TokenData> data, double gemm_rate,
                   std::function<double(double)> better_rate)
    : dist_(std::move(dist)),
      request_(request),
      data_(std::move(data)),
      setup_(dist_, request.config, data_),
      gemm_rate_(gemm_rate),
      better_rate_(std::move(better_rate)) {
  if (speaks() && request_.metrics_port > 0) {
    // Whoever starts it by hand hears at once of a port that is taken. Under a launcher what has it may be
    // ending, of the try before on a machine that was lost; and no run ends for who watches it.
    constexpr double connection_seconds = 5, ranks_end_within = 10;
    const bool launched = comm::launcher() != comm::Launcher::none;
    try {
      server_ = std::make_unique<engine::MetricsServer>(request_.metrics_address, request_.metrics_port,
                                                        connection_seconds, launched ? ranks_end_within : 0);
      log_info("metrics for Prometheus: ", server_->url());
    } catch (const Error& error) {
      if (!launched || error.kind() == ErrorKind::usage) throw;
      log_warning("it trains without a page for Prometheus: ", error.what());
    }
  }
  if (speaks() && !request_.metrics_textfile.empty())
    textfile_ = std::make_unique<engine::MetricsTextfile>(request_.metrics_textfile);
  make_validation_loader();
  trainer_ = std::make_unique<Trainer>(engine(), setup_.loader(), trainer_options());
  if (!trainer_->resumed()) setup_.begin();
  if (!request_.trace.empty()) {
    if (speaks()) AtomicFile probe(request_.trace);  // an error now rather than after the last step
    trace_ = std::make_unique<engine::Trace>();
    engine().set_trace(trace_.get());
  }
  if (speaks() && request_.resume_or_start && !trainer_->resumed())
    log_info("there is no checkpoint in ", request_.config.training.save_dir, " yet: training begins");
  if (speaks()) announce();
}

void TrainRun::make_validation_loader() {
  const config::Batch& batch = engine().config().batch;
  if (!data_->validation && speaks() && request_.config.data->split[1] > 0)
    log_warning(
        "no validation: its part of the data has no whole sample; give data.split a larger second part");
  if (!data_->validation) return;
  validation_loader_ = data_->validation_loader(engine().loader_rank(),
                                                request_.config.training.eval_steps * batch.train_batch_size,
                                                engine().device());
}

TrainerOptions TrainRun::trainer_options() {
  TrainerOptions options;
  options.validation = validation_loader_.get();
  options.preferences = setup_.preferences();
  options.resume = request_.resume;
  options.may_begin = request_.resume_or_start;
  options.resume_tag = request_.resume_tag;
  options.metrics_file = request_.metrics;
  if (server_ || textfile_)
    options.after_step = [this](const engine::StepMetrics& step) {
      if (server_) server_->tell(step);
      if (textfile_) textfile_->tell(step);
    };
  options.mfu = [this](double tokens_per_second) { return mfu(tokens_per_second); };
  options.words = {
      .resume = "--resume", .tag = "--tag", .validation = "give data.split a larger second part"};
  return options;
}

/// The model's operations per second, over those that the machine can do.
std::optional<double> TrainRun::mfu(double tokens_per_second) {
  if (gemm_rate_ <= 0) return {};
  const double reached = tokens_per_second * models::flops_per_token(shape(), shape().seq_length,
                                                                     models::AttentionFlops::causal_half);
  if (reached > gemm_rate_)
    gemm_rate_ = better_rate_(reached);  // measured while the machine did other things
  return reached / gemm_rate_;
}

/// Takes the micro-batches that training would.
void TrainRun::report_fp8() {
  std::vector<tensor::Batch> batches;
  for (std::int64_t i = 0; i < request_.fp8_report; ++i) {
    tensor::Batch& batch = batches.emplace_back(setup_.loader().next());
    // The loader uses its memory again.
    for (auto& [name, values] : batch) {
      const tensor::Tensor copy = tensor::Tensor::empty(engine().device(), values.shape(), values.dtype());
      engine().kernels().copy(values, copy);
      values = copy;
    }
  }
  const engine::Fp8Report report = engine::measure_fp8(engine(), batches);
  if (speaks()) std::printf("\n%s", engine::fp8_table(report, {}).c_str());
}

int TrainRun::run() {
  if (request_.fp8_report > 0) return report_fp8(), 0;
  const int signal = trainer_->run();
  report();
  report_trace();
  return signal;
}

/// ", tensor 2 x context 1 x data 2" where ranks share a model, or its experts.
std::string TrainRun::layout_shown() const {
  const comm::Grid& grid = engine().groups().grid();
  const bool apart = grid.size(comm::Axis::data) == grid.ranks() && grid.size(comm::Axis::expert) == 1;
  return apart ? "" : cat(", ", engine::describe(grid));
}

void TrainRun::announce() const {
  const config::Config& config = engine().config();
  log_info(config::name_of(config.model->type), " with ",
           engine::human_count(static_cast<double>(shape().num_parameters())), " parameters (",
           counted(shape().num_layers, "layer"), ", ", shape().hidden_size, " hidden, ", shape().vocab_size,
           " vocabulary) in ", name_of(config.precision.compute), ", ZeRO stage ", config.zero.stage,
           " over ", dist_->world().name(), layout_shown(), ", ",
           counted(engine().device().arena().threads(), "thread"), " per rank");
  if (const config::Adapter& adapter = config.training.adapter; adapter.type != config::AdapterType::none) {
    std::int64_t trained = 0;
    bool in_experts = false;
    for (const nn::ParameterPtr& parameter : engine().module().parameters()) {
      if (!parameter->trainable) continue;
      trained += parameter->logical_slice().logical().numel();
      in_experts = in_experts || models::is_of_expert(parameter->name);
    }
    log_info("trained is an adapter (", config::name_of(adapter.type), ") with ",
             engine::human_count(static_cast<double>(trained)),
             " parameters; the model's own stay as they are");
    if (in_experts && adapter.lora.dropout > 0)
      log_info("training.adapter.dropout: no effect in experts, whose adapters have none");
    if (!adapter.lora.layers.empty() && !adapter.lora.target_parameters.empty())
      log_info("training.adapter.layers: no effect on what target_parameters names");
  }
  log_info("batch ", config.batch.train_batch_size, " = ", config.batch.micro_batch_size, " per rank x ",
           config.batch.gradient_accumulation_steps, " accumulated x ",
           counted(engine().data_ranks().size(), "data-parallel rank"), ", ",
           counted(shape().seq_length, "token"), " each; data ", data_->name(), ": ",
           engine::human_count(static_cast<double>(data_->train->tokens())), " training tokens");
  if (config.training.save_dir.empty()) log_info("nothing will be saved: training.save_dir is not set");
  if (!engine().device().accelerator()) return;
  if (gemm_rate_ > 0)
    log_info("MFU counts against ", engine::human_count(gemm_rate_),
             "FLOP/s: ", config.device.peak_tflops > 0 ? "device.peak_tflops" : "the data sheet's dense peak",
             ", over all GPUs");
  else
    log_info("the peak of GPU '", engine().device().accelerator()->name(),
             "' is not known, so MFU is not told: set device.peak_tflops");
}

void TrainRun::report_trace() {
  if (!trace_) return;
  engine().set_trace(nullptr);
  const std::vector<engine::TraceTotals> all =
      comm::gather_records(dist_->world(), trace_->totals(), "totals of the trace");
  engine::write_trace(*dist_, *trace_, request_.trace);
  if (speaks() && !request_.json)
    std::printf("\n%s",
                engine::trace_table(all, engine().groups().grid().size(comm::Axis::pipeline)).c_str());
}

void TrainRun::report_json(const std::vector<engine::MemoryReport>& all) const {
  const Trainer::Totals& totals = trainer_->totals();
  nlohmann::ordered_json out{{"step", engine().global_steps()}, {"ranks", dist_->world_size()}};
  if (!totals.step_seconds.empty()) {
    const double median = median_of(totals.step_seconds);
    out.update({{"loss", engine().last_step().loss},
                {"median_step_ms", median * 1e3},
                {"tokens_per_s", static_cast<double>(totals.units) /
                                     static_cast<double>(totals.step_seconds.size()) / median}});
  }
  if (const std::optional<double>& loss = trainer_->validation_loss()) out["val_loss"] = *loss;
  out["skipped_steps"] = engine().skipped_steps();
  for (std::size_t tier = 0; tier < device::tier_count; ++tier) {
    std::uint64_t most = 0;
    for (const engine::MemoryReport& rank : all) most = std::max(most, rank.tiers[tier].total_peak);
    out["peak_bytes"][std::string(device::name_of(static_cast<device::Tier>(tier)))] = most;
  }
  print_json(out);
}

void TrainRun::report() const {
  const engine::MemoryReport mine = engine::MemoryReport::of(engine().device());
  const std::vector<engine::MemoryReport> all = comm::gather_records(dist_->world(), mine, "memory report");
  if (!speaks()) return;
  if (request_.json) return report_json(all);
  const Trainer::Totals& totals = trainer_->totals();
  const auto steps = static_cast<std::int64_t>(totals.step_seconds.size());
  std::printf("\n%s", engine::memory_table(all).c_str());
  if (const std::string layout = layout_shown(); !layout.empty())
    std::printf("\n%s%s\n", counted(dist_->world_size(), "rank").c_str(), layout.c_str());
  if (steps > 0 && !totals.routing.empty())
    std::printf("\n%s", engine::experts_table(totals.routing).c_str());
  if (const std::string ranks = trainer_->ranks_table(); !ranks.empty()) std::printf("\n%s", ranks.c_str());
  if (steps > 0 && all.size() > 1) std::printf("\n%s", engine::traffic_table(totals.traffic, steps).c_str());
  if (steps > 0) {
    const double median = median_of(totals.step_seconds);
    const std::optional<double>& val_loss = trainer_->validation_loss();
    const std::int64_t skipped = engine().skipped_steps();
    std::printf("\nstep %lld: loss %.4f%s%s; median step %.1f ms, %.0f tokens/s\n",
                static_cast<long long>(engine().global_steps()), engine().last_step().loss,
                val_loss ? cat(", validation loss ", *val_loss).c_str() : "",
                skipped > 0 ? cat(", ", counted(skipped, "step"), " skipped").c_str() : "", median * 1e3,
                static_cast<double>(totals.units) / static_cast<double>(steps) / median);
  }
  if (const tensor::AttentionRoutes attention = engine().kernels().attention_routes();
      attention.by_library + attention.by_own > 0)
    std::printf("attention: %s\n", route_shown(attention).c_str());
  if (data_->info && data_->info->labels.empty() && data_->info->preferences == data::Preferences::none)
    std::printf("unigram entropy of the corpus: %.4f nats per token\n", data_->info->unigram_entropy);
}

}  // namespace sherd::cli
