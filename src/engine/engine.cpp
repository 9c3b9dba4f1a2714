#include "engine/engine.h"

#include <algorithm>
#include <chrono>
#include <climits>
#include <cmath>
#include <cstring>
#include <filesystem>

#include "base/log.h"
#include "device/trace_range.h"
#include "engine/checkpoint/access.h"
#include "engine/checkpoint/save_folder.h"
#include "engine/make_device.h"
#include "engine/same_setup.h"
#include "engine/token_data.h"
#include "engine/update_pipeline.h"

namespace sherd {
namespace {

using engine::StepReport;
using tensor::Tensor;

/// Adds the wall time of its life to `total`, in milliseconds, and names it for profilers.
class PhaseTimer {
 public:
  PhaseTimer(double& total, const char* name)
      : range_(name), total_(total), start_(std::chrono::steady_clock::now()) {}
  ~PhaseTimer() {
    total_ += std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start_).count();
  }
  PhaseTimer(const PhaseTimer&) = delete;
  PhaseTimer& operator=(const PhaseTimer&) = delete;

 private:
  device::TraceRange range_;
  double& total_;
  std::chrono::steady_clock::time_point start_;
};

autograd::Recompute recompute_for(const config::Config& config) {
  switch (config.training.recompute) {
    case config::Recompute::full:
      return autograd::Recompute::full;
    case config::Recompute::selective:
      return autograd::Recompute::selective;
    case config::Recompute::none:
      break;
  }
  return autograd::Recompute::none;
}

std::shared_ptr<device::Device> device_for(const config::Config& config,
                                           std::shared_ptr<device::Device> given, const Distributed* dist) {
  require(dist != nullptr, "an engine needs ranks");
  return given ? std::move(given) : engine::make_device(config, *dist);
}

/// Whether an update needs nothing that is known only after backward, and has transfers to hide behind it.
bool may_update_early(const config::Config& config) {
  return config.gradient_clipping <= 0 && config.precision.compute == DType::bf16 &&
         !config.precision.check_grad_overflow &&
         config.zero.offload_optimizer.device != config::OffloadDevice::none;
}

}  // namespace

Engine::Engine(DistributedPtr dist, std::shared_ptr<nn::Model> model, const config::Config& config,
               std::shared_ptr<device::Device> device, std::unique_ptr<tensor::Kernels> kernels)
    : dist_(std::move(dist)),
      config_(config),
      device_(device_for(config, std::move(device), dist_.get())),
      kernels_(std::move(kernels)),
      model_(std::move(model)),
      losses_(*device_),
      run_ahead_(*device_) {
  require(model_ != nullptr, "an engine needs a model");
  if (device_->kind() != device::Kind::meta)
    engine::require_same_setup(config_, *dist_);  // absent ranks tell nothing
  const comm::Grid grid(
      dist_->world_size(),
      {.shard = static_cast<int>(std::min<std::int64_t>(config_.parallel.shard_size, INT_MAX))});
  config_.batch = config::resolve_batch(config_, grid.size(comm::Axis::data));
  device_->ledger().set_limit(device::Tier::device, config_.device.device_memory_limit);
  device_->ledger().set_limit(device::Tier::host, config_.device.host_memory_limit);
  groups_ = std::make_unique<comm::ProcessGroups>(dist_->world(), grid);
  groups_->bind(device_);
  if (!kernels_) kernels_ = engine::make_kernels(config_, *device_);
  optimizer_ = std::make_shared<engine::Optimizer>(config_.optimizer, config_.training.seed);
  scheduler_ = engine::make_scheduler(config_, optimizer_);
  const sharding::StateSources sources = open_stores();
  sharded_ = std::make_unique<sharding::ShardedModel>(
      model_, sharding::make_sharding_options(config_, optimizer_->moments()), sources);
  const config::Offload& offload = config_.zero.offload_optimizer;
  pipeline_ = std::make_unique<engine::UpdatePipeline>(
      *sharded_, sources,
      engine::UpdatePipelineOptions{config_.zero.sub_group_size, static_cast<int>(offload.buffer_count),
                                    offload.pipeline_read, offload.pipeline_write});
  tape_ = std::make_unique<autograd::Tape>(*kernels_);
  tape_->recompute = recompute_for(config_);
  tape_->input_dtype = config_.precision.compute;
  tape_->checkpoints_in_host = config_.training.cpu_checkpointing;
  updates_early_ = may_update_early(config_);
  if (updates_early_)
    sharded_->listen([this](sharding::Segment& segment) {
      if (pipeline_->under_way()) update_early(segment);
    });
  if (config_.precision.compute == DType::f16)
    scaler_ = std::make_unique<optim::LossScaler>(config_.precision.fp16);
  if (config_.log_level) set_log_level(*config_.log_level);
  if (dist_->rank() != 0) return;
  for (const std::string& note : config_.notes) log_info(note);
  if (config_.dump_state) log_info("configuration: ", config::dump(config_));
}

Engine::~Engine() = default;

namespace {
std::unique_ptr<offload::Store> open_store(const config::Config& config, const std::string& folder, int rank,
                                           device::Device& device) {
  offload::StoreOptions options;
  options.folder = folder;
  options.rank = rank;
  options.block_size = static_cast<std::size_t>(config.aio.block_size);
  options.queue_depth = static_cast<int>(config.aio.queue_depth);
  options.single_submit = config.aio.single_submit;
  options.overlap_events = config.aio.overlap_events;
  options.thread_count = static_cast<int>(config.aio.thread_count);
  options.checksums = config.aio.checksums;
  options.backend = static_cast<offload::StoreOptions::Backend>(config.aio.backend);
  options.timeout_seconds = config.parallel.timeout_seconds;
  options.dry = device.kind() == device::Kind::meta;
  return std::make_unique<offload::Store>(options, device.ledger());
}
}  // namespace

sharding::StateSources Engine::open_stores() {
  sharding::StateSources sources{{groups_->group(comm::Axis::shard), &groups_->group(comm::Axis::replica)},
                                 *kernels_};
  sources.model_ranks = &data_ranks();
  const config::Offload &parameters = config_.zero.offload_param, &optimizer = config_.zero.offload_optimizer;
  if (parameters.device == config::OffloadDevice::nvme) {
    parameter_store_ = open_store(config_, parameters.nvme_path, dist_->rank(), *device_);
    sources.parameter_store = parameter_store_.get();
  }
  if (optimizer.device != config::OffloadDevice::nvme) return sources;
  const auto same_folder = [](const std::string& a, const std::string& b) {
    return std::filesystem::weakly_canonical(a) == std::filesystem::weakly_canonical(b);
  };
  if (parameter_store_ && same_folder(optimizer.nvme_path, parameters.nvme_path)) {
    sources.optimizer_store = parameter_store_.get();
  } else {
    optimizer_store_ = open_store(config_, optimizer.nvme_path, dist_->rank(), *device_);
    sources.optimizer_store = optimizer_store_.get();
  }
  return sources;
}

engine::IoBytes Engine::io_bytes() const {
  engine::IoBytes out;
  for (const auto* store : {parameter_store_.get(), optimizer_store_.get()})
    if (store)
      out.read += store->bytes_read(), out.written += store->bytes_written(),
          out.bounced += store->bytes_bounced();
  return out;
}

bool Engine::is_gradient_accumulation_boundary() const {
  return boundary_override_.value_or(accumulated_ + 1 >= gradient_accumulation_steps());
}

RandomKey Engine::micro_batch_key() const {
  return RandomKey{config_.training.seed, 0}
      .at(static_cast<std::uint64_t>(counters_.global_steps))
      .at(static_cast<std::uint64_t>(accumulated_ * data_ranks().size() + data_ranks().rank()));
}

optim::AverageScale Engine::average_scale() const {
  return optim::AverageScale::over(gradient_accumulation_steps() * data_ranks().size());
}

autograd::Var Engine::forward(const tensor::Batch& batch) {
  double unbooked = 0;
  PhaseTimer timer(training_ ? times_.forward : unbooked, training_ ? "forward" : "evaluation");
  require_whole_weights(training_ ? "forward()" : "evaluation");
  // Between forward() and backward() the tape, its settings and the gathered units belong to that
  // micro-batch.
  require(phase_ == Phase::idle || (!training_ && phase_ == Phase::backwarded),
          training_ ? "forward() was called again before backward() and step()"
                    : "evaluation between forward() and backward(): finish the micro-batch first");
  tape_->training = training_;
  tape_->random = micro_batch_key();
  if (!training_) return evaluate(batch);
  run_ahead_.begin();
  tape_->clear();
  boundary_ = is_gradient_accumulation_boundary();
  sharded_->begin_training(boundary_);
  autograd::Var loss = (*model_)(*tape_, batch);
  losses_.add(loss.value());
  phase_ = Phase::forwarded;
  end_phase();
  return loss;
}

autograd::Var Engine::evaluate(const tensor::Batch& batch) {
  autograd::Tape::NoGrad no_grad(*tape_);
  sharded_->begin_evaluation();
  try {
    autograd::Var loss = (*model_)(*tape_, batch);
    sharded_->end_evaluation();
    return loss;
  } catch (...) {
    try {
      sharded_->abandon_pass();  // a step may follow, and no lease may last until then
    } catch (const Error&) {
      // Peers that failed as well; the first error is the one to tell.
    }
    throw;
  }
}

void Engine::backward(const autograd::Var& loss) {
  PhaseTimer timer(times_.backward, "backward");
  require_whole_weights("backward()");
  require(phase_ == Phase::forwarded || phase_ == Phase::in_backward,
          "backward() needs the loss of a forward() in train() mode, once");
  const double scale = scaler_ ? scaler_->scale() : 1.0;
  phase_ = Phase::in_backward;
  if (boundary_ && updates_early_) begin_early_update();
  end_or_spoil([&] {
    tape_->backward(loss, scale * average_scale().seed);
    if (boundary_) report_.early_updates = pipeline_->updated();
    sharded_->end_training();
  });
  run_ahead_.end();
  phase_ = Phase::backwarded;
  end_phase();
}

/// Where times by phase are asked for, phases end when the device has done their work.
void Engine::end_phase() {
  if (config_.wall_clock_breakdown) device_->synchronize();
}

void Engine::begin_early_update() {
  sharded_->require_no_leases();  // before anything begins, so that it can be tried again
  optimizer_->begin_step();
  end_or_spoil([&] { pipeline_->begin(*optimizer_, average_scale().rest); });
}

/// The gradients of `segment` are complete. The loss is looked at no earlier than here, when a GPU has work
/// of backward queued.
void Engine::update_early(sharding::Segment& segment) {
  if (!known_loss_) known_loss_ = mean_loss(accumulated_ + 1);
  if (std::isfinite(*known_loss_)) return pipeline_->gradients_complete(segment);
  pipeline_->abandon();  // step() will say so
  optimizer_->abandon_step();
}

namespace {
constexpr const char* load_to_go_on = ": load a checkpoint to go on";
}  // namespace

void Engine::require_whole_weights(const char* call) const {
  require(spoiled_.empty(), call, ": ", spoiled_, ": go on with load_checkpoint()");
  require(!pipeline_->under_way(), call,
          " between backward() and step(): with gradient_clipping and "
          "bf16.check_grad_overflow off the update begins in backward(); call step() first");
}

/// Whether an update under way may have changed weights. What other ranks have done since all agreed on the
/// loss is not known, and one weight is enough.
bool Engine::may_have_changed() const {
  return pipeline_->under_way() && known_loss_ && (pipeline_->updated() > 0 || data_ranks().size() > 1);
}

/// Ends an update under way: one that changed nothing is forgotten, else the weights are lost.
void Engine::give_update_up() {
  if (!pipeline_->under_way()) return;
  if (may_have_changed())
    spoiled_ =
        cat("step ", counters_.global_steps + 1, " has changed part of the weights and cannot be undone");
  else
    optimizer_->abandon_step();
  pipeline_->abandon();
}

/// Runs part of a step; an update that an exception ends with it is given up.
void Engine::end_or_spoil(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    give_update_up();
    if (spoiled_.empty()) throw;
    throw Error(error.kind(), cat(error.what(), "; ", spoiled_, load_to_go_on));
  } catch (...) {
    give_update_up();
    throw;
  }
}

void Engine::step() {
  require(phase_ == Phase::backwarded, "step() follows backward(), once per micro-batch");
  if (boundary_) {
    sharded_->require_no_leases();  // before anything counts, so that it can be tried again
    require_finite_update();
  }
  phase_ = Phase::idle;
  ++counters_.micro_steps;
  ++accumulated_;
  report_.applied = false;
  if (!boundary_) return;  // as forward() told the reduction; the caller may have moved the boundary since
  {
    PhaseTimer timer(times_.update, "update");
    try {
      end_or_spoil([this] { update(); });
    } catch (...) {
      drop_accumulated();
      throw;
    }
    end_phase();
  }
  report_.times = std::exchange(times_, {});
  drop_accumulated();
  stepped_ = true;
  if (config_.steps_per_print > 0 && counters_.global_steps % config_.steps_per_print == 0) print_step();
}

/// The coming micro-batch is the first of a step.
void Engine::drop_accumulated() {
  accumulated_ = 0;
  losses_.clear();
  known_loss_.reset();
  sharded_->clear_gradients();
}

/// Fails where the last update wrote something that is not finite, which a GPU tells when it is through with
/// it.
void Engine::require_finite_update() {
  if (optimizer_->finite()) return;
  if (pipeline_->under_way()) pipeline_->abandon();
  spoiled_ = cat("step ", counters_.global_steps, " has made a weight NaN or infinite");
  fail(ErrorKind::numerics, spoiled_, ": lower the learning rate and load the last checkpoint");
}

void Engine::synchronize() {
  device_->synchronize();
  require_finite_update();
}

void Engine::update() {
  report_.lr = pipeline_->under_way() ? optimizer_->used_lr() : optimizer_->lr();
  if (!known_loss_) known_loss_ = mean_loss(accumulated_);
  report_.loss = *known_loss_;
  report_.loss_scale = scaler_ ? scaler_->scale() : 1.0;
  if (!std::isfinite(report_.loss) && !scaler_)
    fail(ErrorKind::numerics, "the loss is ", report_.loss, " at step ", counters_.global_steps + 1,
         ": nothing was updated; lower the learning rate, clip gradients (gradient_clipping), or resume from "
         "the last "
         "checkpoint");
  if (pipeline_->under_way() && device_->kind() == device::Kind::cuda)
    pipeline_->update_rest();  // before the norm, for which the thread waits until the GPU is through with
                               // backward
  const tensor::ExactSum squares = sharded_->gradient_sum_of_squares();
  const bool overflow = squares.non_finite > 0 || !std::isfinite(report_.loss);
  const double rest = average_scale().rest;
  report_.grad_norm = std::sqrt(squares.value()) * rest / report_.loss_scale;
  if (scaler_) scaler_->update(overflow);
  if (overflow && !scaler_ &&
      !(config_.precision.compute == DType::bf16 && config_.precision.check_grad_overflow))
    fail(ErrorKind::numerics, "a gradient is NaN or infinite at step ", counters_.global_steps + 1,
         " although the loss is finite", may_have_changed() ? "" : ": nothing was updated",
         "; lower the learning rate or clip gradients");
  if (overflow) {
    sharded_->clear_gradients();
    return finish_step(false);
  }
  if (!pipeline_->under_way()) {
    optimizer_->begin_step();
    pipeline_->begin(*optimizer_, rest * optim::gradient_factor(report_.grad_norm, report_.loss_scale,
                                                                config_.gradient_clipping));
  }
  pipeline_->finish();
  finish_step(true);
}

void Engine::finish_step(bool applied) {
  report_.applied = applied;
  if (!applied)
    ++counters_.skipped_steps;
  else if (scheduler_)
    scheduler_->step();
  ++counters_.global_steps;
  counters_.global_samples += train_batch_size();
}

/// In the global order of micro-batches, so that it does not depend on how many ranks share them.
double Engine::mean_loss(std::int64_t micro_batches) {
  return mean_over_ranks(losses_.values(), micro_batches, "loss");
}

double Engine::mean_over_ranks(const std::vector<double>& mine, std::int64_t count, const char* what) {
  const auto ranks = static_cast<std::size_t>(data_ranks().size()), each = mine.size();
  std::vector<double> all = mine;
  if (ranks > 1) {
    const auto elements = static_cast<std::int64_t>(each);
    const Tensor shard = Tensor::of<double>(*device_, {elements}, mine);
    const Tensor full =
        Tensor::empty(*device_, {elements * data_ranks().size()}, DType::f64, device::Category::workspace);
    comm::CallOptions options;
    options.label = what;
    options.scalar = true;
    data_ranks().all_gather({{shard, full}}, options).wait();
    if (device_->kind() == device::Kind::meta)
      return 0;  // of ranks that are not there, of whom there may be millions
    all.resize(each * ranks);
    std::memcpy(all.data(), tensor::to_host(*device_, full).raw(), full.bytes());
  }
  double sum = 0;
  for (std::size_t i = 0; i < each; ++i)
    for (std::size_t rank = 0; rank < ranks; ++rank) sum += all[rank * each + i];
  return sum / static_cast<double>(count * data_ranks().size());
}

const StepReport& Engine::train_batch(const std::function<tensor::Batch()>& next) {
  require(training_, "train_batch() needs train() mode");
  do {
    backward(forward(next()));
    step();
  } while (!boundary_);
  return report_;
}

double Engine::eval_batch(const tensor::Batch& batch) {
  return eval_batches([&] { return batch; }, 1);
}

double Engine::eval_batches(const std::function<tensor::Batch()>& next, std::int64_t count) {
  require(count > 0, "eval_batches() needs batches, not ", count);
  struct Restore {
    bool& flag;
    bool value;
    ~Restore() { flag = value; }
  } restore{training_, std::exchange(training_, false)};
  std::vector<double> losses;
  for (std::int64_t i = 0; i < count; ++i) {
    losses.push_back(item(forward(next())));
    require_finite_update();
  }
  return mean_over_ranks(losses, count, "evaluation loss");
}

double Engine::item(const autograd::Var& loss) {
  return tensor::read_scalar(loss.tape().device(), loss.value());
}

std::optional<double> Engine::get_global_grad_norm() const {
  return stepped_ ? std::optional(report_.grad_norm) : std::nullopt;
}

void Engine::print_step() const {
  if (dist_->rank() != 0) return;
  log_info("step=", counters_.global_steps, " loss=", report_.loss, " grad_norm=", report_.grad_norm,
           " lr=", report_.lr.empty() ? 0.0 : report_.lr.front(), " skipped=", counters_.skipped_steps,
           scaler_ ? cat(" loss_scale=", report_.loss_scale) : std::string());
  if (config_.wall_clock_breakdown)
    log_info("time (ms) | forward ", report_.times.forward, " | backward ", report_.times.backward,
             " | step ", report_.times.update);
  if (config_.memory_breakdown) print_memory();
}

void Engine::print_memory() const {
  const device::Ledger& ledger = device_->ledger();
  std::string line;
  for (int c = 0; c < device::category_count; ++c) {
    const auto category = static_cast<device::Category>(c);
    line += cat(" | ", device::name_of(category), ' ', ledger.current(device::Tier::device, category),
                " (peak ", ledger.peak(device::Tier::device, category), ')');
  }
  log_info("memory of rank 0's device (bytes)", line);
}

void Engine::claim_save_folder(const std::string& directory) {
  engine::CheckpointAccess::claim(*this, directory);
}

void Engine::set_training_data(const data::Loader& loader, std::shared_ptr<const engine::TokenData> tokens) {
  data_position_ = loader.shared_position();
  training_tokens_ = std::move(tokens);
  if (dist_->rank() != 0 || !training_tokens_) return;
  if (training_tokens_->tokenizer.starts_with("spm:") && training_tokens_->tokenizer_model.empty())
    log_warning("the tokenizer model of '", training_tokens_->tokenizer,
                "' cannot be read, so checkpoints will lack it and "
                "`sherd generate` will not know it: put it back, or name it with data.tokenizer");
}

void Engine::save_checkpoint(const std::string& directory, const std::string& tag,
                             const engine::ClientState& client) {
  engine::CheckpointAccess::save(*this, directory,
                                 tag.empty() ? cat("global_step", counters_.global_steps) : tag, client);
}

engine::ClientState Engine::load_checkpoint(const std::string& directory, const std::string& tag) {
  return engine::CheckpointAccess::load(*this, directory, tag);
}

}  // namespace sherd
