#include "cli/trainer.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>

#include "base/atomic_file.h"
#include "base/excerpt.h"
#include "base/log.h"
#include "cli/weights.h"
#include "device/cuda.h"
#include "engine/checkpoint.h"
#include "engine/gather_records.h"
#include "engine/gather_results.h"
#include "engine/process_grid.h"
#include "engine/report.h"
#include "models/from_config.h"

namespace sherd::cli {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

Trainer::Trainer(DistributedPtr dist, const TrainRequest& request,
                 std::shared_ptr<const engine::TokenData> data, double gemm_rate,
                 std::function<double(double)> better_rate)
    : dist_(std::move(dist)),
      request_(request),
      data_(std::move(data)),
      shape_(models::gpt_options(request.config, data_->vocab_size)),
      gemm_rate_(gemm_rate),
      better_rate_(std::move(better_rate)) {
  const auto groups = make_groups(dist_, request_.config);
  engine_ = std::make_unique<Engine>(
      dist_, std::make_shared<models::Gpt>(shape_, layout_of(*groups, request_.config)), request_.config,
      nullptr, nullptr, groups);
  experts_ = parallel::layers_of_experts(engine_->module());
  const config::Batch& batch = engine_->config().batch;
  train_loader_ = data_->training_loader(engine_->loader_rank(), engine_->device());
  engine_->set_training_data(*train_loader_, data_);
  if (data_->validation)
    validation_loader_ = data_->validation_loader(
        engine_->loader_rank(), request_.config.training.eval_steps * batch.train_batch_size,
        engine_->device());
  if (validation_loader_ && validation_batches() == 0) {
    if (speaks())
      log_warning("no validation: its split has ", counted(validation_loader_->samples_per_epoch(), "sample"),
                  ", fewer than the ", batch.micro_batch_size * engine_->data_ranks().size(),
                  " that all ranks take at once; give data.split a larger share");
    validation_loader_.reset();
  }
  require_validation();
  if (const auto& folder = request_.config.training.save_dir; !folder.empty())
    engine_->claim_save_folder(folder);
  if (request_.resume)
    resume();
  else if (!request_.config.training.init_from.empty())
    begin_from(request_.config.training.init_from);
  else
    require_base();
  first_step_ = engine_->global_steps();
  if (!request_.trace.empty()) {
    if (speaks()) AtomicFile probe(request_.trace);  // an error now rather than after the last step
    trace_ = std::make_unique<engine::Trace>();
    engine_->set_trace(trace_.get());
  }
  stop_signals_ = std::make_unique<StopSignals>(
      "\nsherd: stopping after this step, and saving where training.save_dir is set; a second signal ends "
      "the run at once, unsaved\n");
  if (!speaks()) return;
  if (!request_.metrics.empty())
    metrics_ = std::make_unique<engine::MetricsWriter>(request_.metrics, first_step_ + 1);
  monitors_ = std::make_unique<engine::Monitors>(
      engine_->config(), first_step_ > 0 ? std::optional(engine_->global_samples()) : std::nullopt);
  announce();
  progress_ = std::make_unique<Progress>(STDERR_FILENO, request_.config.training.steps,
                                         request_.config.training.log_interval);
}

/// An adapter means nothing without the model that it belongs to.
void Trainer::require_base() const {
  const config::Adapter& adapter = request_.config.training.adapter;
  if (!adapter.init_from.empty())
    fail(ErrorKind::config, "training.adapter.init_from names an adapter, '", adapter.init_from,
         "', and nothing names the model that it belongs to: give its folder as training.init_from");
  if (adapter.type != config::AdapterType::none && speaks())
    log_warning(
        "training.adapter trains beside weights that stay as they are, and these are drawn by chance: "
        "give training.init_from");
}

void Trainer::require_validation() const {
  const config::Training& training = request_.config.training;
  if (validation_loader_ || (!training.keep_best && training.patience == 0)) return;
  fail(
      ErrorKind::config, training.keep_best ? "training.keep_best" : "training.patience",
      " goes by the validation loss, and there are no validation data: give data.split a larger second part");
}

/// ", tensor 2 x context 1 x data 2" where ranks share a model, or its experts.
std::string Trainer::layout_shown() const {
  const comm::Grid& grid = engine_->groups().grid();
  const bool apart = grid.size(comm::Axis::data) == grid.ranks() && grid.size(comm::Axis::expert) == 1;
  return apart ? "" : cat(", ", engine::describe(grid));
}

void Trainer::announce() const {
  const config::Config& config = engine_->config();
  log_info(config::name_of(config.model->type), " with ",
           engine::human_count(static_cast<double>(shape_.num_parameters())), " parameters (",
           counted(shape_.layers, "layer"), ", ", shape_.hidden, " hidden, ", shape_.vocab_size,
           " vocabulary) in ", name_of(config.precision.compute), ", ZeRO stage ", config.zero.stage,
           " over ", dist_->world().name(), layout_shown(), ", ",
           counted(engine_->device().arena().threads(), "thread"), " per rank");
  if (const config::Adapter& adapter = config.training.adapter; adapter.type != config::AdapterType::none) {
    std::int64_t trained = 0;
    for (const nn::ParameterPtr& parameter : engine_->module().parameters())
      if (parameter->trainable) trained += parameter->logical_slice().logical().numel();
    log_info("trained is an adapter (", config::name_of(adapter.type), ") with ",
             engine::human_count(static_cast<double>(trained)),
             " parameters; the model's own stay as they are");
  }
  log_info("batch ", config.batch.train_batch_size, " = ", config.batch.micro_batch_size, " per rank x ",
           config.batch.gradient_accumulation_steps, " accumulated x ",
           counted(engine_->data_ranks().size(), "data-parallel rank"), ", ",
           counted(shape_.max_seq, "token"), " each; data ", data_->name(), ": ",
           engine::human_count(static_cast<double>(data_->train->tokens())), " training tokens");
  if (config.training.save_dir.empty()) log_info("nothing will be saved: training.save_dir is not set");
  if (engine_->device().kind() != device::Kind::cuda) return;
  if (gemm_rate_ > 0)
    log_info("MFU counts against ", engine::human_count(gemm_rate_),
             "FLOP/s: ", config.device.peak_tflops > 0 ? "device.peak_tflops" : "the data sheet's dense peak",
             ", over all GPUs");
  else
    log_info("the peak of GPU '", device::as_cuda(engine_->device()).gpu().name,
             "' is not known, so MFU is not told: set device.peak_tflops");
}

/// Ids mean nothing to weights that were trained on others'.
void Trainer::warn_of_other_tokenizer(const engine::ExtraFiles& companions) const {
  const std::string prefix = companion_prefix;
  const auto came = companions.find(prefix + engine::tokenizer_file_of(data_->tokenizer));
  const bool any = companions.contains(prefix + engine::tokenizer_file) ||
                   companions.contains(prefix + engine::tokenizer_json_file) ||
                   companions.contains(prefix + "vocab.json");
  const bool other = came != companions.end() && !data_->tokenizer_model.empty()
                         ? came->second != data_->tokenizer_model
                         : any;
  if (other && !data_->tokenizer.empty())
    log_warning("the weights came with a tokenizer of their own, and the data were made with '",
                data_->tokenizer, "': ids will mean other text than the weights were trained on");
}

void Trainer::begin_from(const std::string& folder) {
  const config::Config& config = engine_->config();
  Weights weights(folder, *config.model, shape_, engine_->device(), config.training.adapter.init_from);
  engine::gather_results(*dist_, "weights verified", [&] {
    weights.verify_share(dist_->rank(), dist_->world_size());
    return true;
  });
  engine_->load_weights(weights.source());
  if (speaks()) engine_->set_checkpoint_files(weights.companions());
  if (!speaks()) return;
  log_info("weights from ", folder);
  warn_of_other_tokenizer(weights.companions());
  for (const std::string& note : weights.notes()) log_info(folder, "/config.json: ", note);
}

void Trainer::resume() {
  const std::string& folder = request_.config.training.save_dir;
  best_.restore(engine_->load_checkpoint(folder, request_.resume_tag));
  // The run may go on from before the best that was found.
  if (speaks() && request_.config.training.keep_best)
    engine::point_best(folder, best_.loss() ? cat("global_step", best_.step()) : "");
  saved_step_ = saving_step_ = engine_->global_steps();
  if (!speaks()) return;
  log_info("resumed from ", folder, " at step ", engine_->global_steps());
  if (const auto steps = request_.config.training.steps; engine_->global_steps() >= steps)
    log_info("nothing is left to do: training ends at step ", steps, "; raise training.steps to go on");
  else if (out_of_patience())
    log_info("nothing is left to do: training.patience is used up; raise it to go on");
}

/// The signal that asked a rank to stop; 0 where none was asked.
int Trainer::stop_signal() {
  const std::int32_t mine = StopSignals::received();
  if (dist_->world_size() == 1) return mine;
  tensor::Tensor flag = tensor::Tensor::of<std::int32_t>(engine_->device(), {1}, std::span(&mine, 1));
  comm::CallOptions options;
  options.label = "stop flag";
  options.scalar = true;
  dist_->world().all_reduce(flag, comm::ReduceOp::max, 1, options).wait();
  return *tensor::to_host(engine_->device(), flag).data<std::int32_t>();
}

int Trainer::train_steps() {
  const config::Training& training = request_.config.training;
  int signal = 0;
  while (engine_->global_steps() < training.steps && !out_of_patience() && (signal = stop_signal()) == 0) {
    train_step();
    if (save_is_due()) save(training.save_async);
  }
  if (!training.save_dir.empty() && saving_step_ != engine_->global_steps()) save(false);
  engine_->finish_save();
  note_saved();
  engine_->synchronize();  // a GPU's last update has been looked at only where it was saved or evaluated
  return signal;
}

/// An error's message with what a person at the command line can do next, unless another rank has said it.
std::string Trainer::with_next_step(const std::string& message) const {
  if (saving_step_ < 0 || message.find("--resume") != std::string::npos) return message;
  const std::string& folder = request_.config.training.save_dir;
  const std::string begun = !engine_->save_under_way()
                                ? ""
                                : cat("that of step ", saving_step_, " was being written and may be whole");
  if (saved_step_ < 0 && begun.empty()) return message;
  if (saved_step_ < 0)
    return cat(message, "; go on with --resume if there is a checkpoint in ", folder, ": ", begun);
  return cat(message, "; go on with --resume (checkpoint of step ", saved_step_, " in ", folder,
             begun.empty() ? "" : "; ", begun, ", or an earlier one with --tag)");
}

int Trainer::run() {
  int signal = 0;
  try {
    signal = train_steps();
  } catch (const Error& error) {
    throw Error(error.kind(), with_next_step(error.what()));
  }
  if (progress_) progress_->finish();
  if (speaks()) report_end(signal);
  report();
  report_trace();
  return signal;
}

/// Why training ends before its last step, and what is the best of it.
void Trainer::report_end(int signal) const {
  const config::Training& training = request_.config.training;
  if (signal != 0)
    log_info("stopped by SIG", ::sigabbrev_np(signal), " after step ", engine_->global_steps(),
             saved_step_ < 0 ? "; nothing was saved because training.save_dir is not set"
                             : cat("; go on with --resume (checkpoint in ", training.save_dir, ")"));
  if (out_of_patience() && engine_->global_steps() > first_step_)
    log_info("stopped after step ", engine_->global_steps(), ": ",
             counted(best_.without_improvement(), "evaluation"),
             " without a lower validation loss (training.patience)",
             best_.loss() ? cat("; the lowest, ", *best_.loss(), ", was after step ", best_.step()) : "");
  if (!training.keep_best || training.save_dir.empty() || !best_.loss()) return;
  const auto folder = std::filesystem::path(training.save_dir) / cat("global_step", best_.step());
  if (std::filesystem::exists(folder / "manifest.json"))
    log_info("the best checkpoint is ", folder.string(), ", with validation loss ", *best_.loss());
}

bool Trainer::out_of_patience() const {
  const std::int64_t patience = request_.config.training.patience;
  return patience > 0 && best_.without_improvement() >= patience;
}

void Trainer::train_step() {
  const auto start = std::chrono::steady_clock::now();
  const engine::IoBytes before = engine_->io_bytes();
  engine_->train_batch([&] { return train_loader_->next(); });
  note_saved();
  step_seconds_.push_back(seconds_since(start));
  step_traffic_ = engine_->groups().traffic();
  engine_->groups().reset_traffic();
  total_traffic_.resize(step_traffic_.size());
  for (std::size_t i = 0; i < step_traffic_.size(); ++i) {
    total_traffic_[i].axis = step_traffic_[i].axis;
    total_traffic_[i].traffic.add(step_traffic_[i].traffic);
  }
  step_routing_.clear();
  total_routing_.resize(experts_.size());
  for (std::size_t i = 0; i < experts_.size(); ++i) {
    const auto& [name, layer] = experts_[i];
    step_routing_.emplace_back(name, layer->last_step());
    total_routing_[i].first = name;
    total_routing_[i].second.add(layer->last_step());
  }
  const engine::IoBytes after = engine_->io_bytes();
  step_io_ = {after.read - before.read, after.written - before.written};
  const config::Training& training = request_.config.training;
  const std::int64_t step = engine_->global_steps();
  evaluated_ = validation_loader_ &&
               (step == training.steps || (training.eval_interval > 0 && step % training.eval_interval == 0));
  if (evaluated_) evaluate();
  rate_step();
  write_metrics();
  show(evaluated_);
}

void Trainer::rate_step() {
  tokens_per_s_ = static_cast<double>(engine_->train_batch_size() * shape_.max_seq) / step_seconds_.back();
  if (!speaks() || gemm_rate_ <= 0) return;
  const double reached =
      tokens_per_s_ * models::flops_per_token(shape_, shape_.max_seq, models::AttentionFlops::causal_half);
  if (reached > gemm_rate_)
    gemm_rate_ = better_rate_(reached);  // measured while the machine did other things
  mfu_ = reached / gemm_rate_;
}

/// Of all ranks; what is left over is not looked at.
std::int64_t Trainer::validation_batches() const {
  return validation_loader_->samples_per_epoch() /
         (engine_->train_micro_batch_size_per_gpu() * engine_->data_ranks().size());
}

void Trainer::evaluate() {
  validation_loader_->seek(0);
  val_loss_ = engine_->eval_batches([this] { return validation_loader_->next(); }, validation_batches());
  best_.see(engine_->global_steps(), *val_loss_);
  engine_->groups().reset_traffic();
}

bool Trainer::save_is_due() const {
  const config::Training& training = request_.config.training;
  if (training.save_dir.empty()) return false;
  const bool best = training.keep_best && evaluated_ && best_.improved();
  return best || (training.save_interval > 0 && engine_->global_steps() % training.save_interval == 0);
}

void Trainer::save(bool async) {
  const config::Training& training = request_.config.training;
  engine_->finish_save();
  note_saved();
  engine::SaveOptions options;
  options.async = async;
  options.best = training.keep_best && evaluated_ && best_.improved();
  options.keep_last = training.keep_last;
  if (evaluated_) options.client["val_loss"] = exact(*val_loss_);
  best_.save(options.client);
  engine_->save_checkpoint(training.save_dir, options);
  saving_step_ = engine_->global_steps();
  note_saved();
  engine_->groups().reset_traffic();
}

/// What was being written is whole once the engine, on all ranks alike, is through with it.
void Trainer::note_saved() {
  if (!engine_->save_under_way()) saved_step_ = saving_step_;
}

void Trainer::write_metrics() {
  if (!metrics_ && !(monitors_ && monitors_->enabled())) return;
  const engine::StepReport& step = engine_->last_step();
  engine::StepMetrics line;
  line.step = engine_->global_steps();
  line.loss = step.loss;
  if (evaluated_) line.val_loss = val_loss_;
  line.lr = step.lr.empty() ? 0 : step.lr.front();
  line.lrs = step.lr;
  line.grad_norm = step.grad_norm;
  line.loss_scale = step.loss_scale;
  line.skipped = !step.applied;
  line.tokens = engine_->global_samples() * shape_.max_seq;
  line.step_ms = step_seconds_.back() * 1e3;
  line.tokens_per_s = tokens_per_s_;
  line.mfu = mfu_;
  line.experts = step_routing_;
  const device::Ledger& ledger = engine_->device().ledger();
  line.mem = {ledger.peak(device::Tier::device), ledger.peak(device::Tier::host),
              ledger.peak(device::Tier::nvme)};
  for (const auto& [axis, bytes] : step_traffic_) line.comm.add(bytes);
  line.axes = step_traffic_;
  line.io.read_bytes = step_io_.read;
  line.io.write_bytes = step_io_.written;
  if (metrics_) metrics_->write(line);
  monitors_->write(line, engine_->global_samples());
}

void Trainer::show(bool evaluated) {
  if (!progress_) return;
  const engine::StepReport& step = engine_->last_step();
  ProgressState state;
  state.step = engine_->global_steps();
  state.total_steps = request_.config.training.steps;
  state.loss = step.loss;
  state.val_loss = val_loss_;
  state.lr = step.lr.empty() ? 0 : step.lr.front();
  state.lrs = step.lr;
  state.grad_norm = step.grad_norm;
  state.tokens_per_s = tokens_per_s_;
  state.mfu = mfu_;
  progress_->update(state, evaluated);
}

void Trainer::report_trace() {
  if (!trace_) return;
  engine_->set_trace(nullptr);
  const std::vector<engine::TraceTotals> all =
      engine::gather_records(*dist_, trace_->totals(), "totals of the trace");
  engine::write_trace(*dist_, *trace_, request_.trace);
  if (speaks())
    std::printf("\n%s",
                engine::trace_table(all, engine_->groups().grid().size(comm::Axis::pipeline)).c_str());
}

void Trainer::report() {
  const engine::MemoryReport mine = engine::MemoryReport::of(engine_->device());
  const std::vector<engine::MemoryReport> all = engine::gather_records(*dist_, mine, "memory report");
  if (!speaks()) return;
  const auto steps = static_cast<std::int64_t>(step_seconds_.size());
  std::printf("\n%s", engine::memory_table(all).c_str());
  if (const std::string layout = layout_shown(); !layout.empty())
    std::printf("\n%s%s\n", counted(dist_->world_size(), "rank").c_str(), layout.c_str());
  if (steps > 0 && !total_routing_.empty())
    std::printf("\n%s", engine::experts_table(total_routing_).c_str());
  if (steps > 0 && all.size() > 1) std::printf("\n%s", engine::traffic_table(total_traffic_, steps).c_str());
  if (steps > 0) {
    std::sort(step_seconds_.begin(), step_seconds_.end());
    const double median = step_seconds_[step_seconds_.size() / 2];
    std::printf("\nstep %lld: loss %.4f%s; median step %.1f ms, %.0f tokens/s\n",
                static_cast<long long>(engine_->global_steps()), engine_->last_step().loss,
                val_loss_ ? cat(", validation loss ", *val_loss_).c_str() : "", median * 1e3,
                static_cast<double>(engine_->train_batch_size() * shape_.max_seq) / median);
  }
  if (data_->info)
    std::printf("unigram entropy of the corpus: %.4f nats per token\n", data_->info->unigram_entropy);
}

}  // namespace sherd::cli
