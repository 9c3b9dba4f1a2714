#include "engine/engine.h"

#include <utility>

#include "base/log.h"
#include "base/text/excerpt.h"
#include "base/threads.h"
#include "data/loader.h"
#include "engine/checkpoint/checkpoints.h"
#include "engine/checkpoint/compare.h"
#include "engine/pipeline/train_schedule.h"
#include "engine/preference/preference_loss.h"
#include "engine/report/flight_file.h"
#include "engine/report/report.h"
#include "engine/report/trace.h"
#include "engine/setup/fp8_layers.h"
#include "engine/setup/process_grid.h"
#include "engine/setup/pruned_layers.h"
#include "engine/setup/resources.h"
#include "engine/step/executor.h"
#include "engine/step/recompute.h"
#include "engine/step/step_loss.h"
#include "engine/update/parameter_groups.h"

namespace sherd {

using engine::StepReport;

Engine::Engine(DistributedPtr dist, std::shared_ptr<nn::Model> model, const config::Config& config,
               std::shared_ptr<device::Device> device, std::unique_ptr<tensor::Kernels> kernels,
               std::shared_ptr<comm::ProcessGroups> groups)
    : dist_(std::move(dist)), config_(config), model_(std::move(model)) {
  require(dist_ != nullptr, "an engine needs ranks");
  require(model_ != nullptr, "an engine needs a model");
  engine::write_flight_on_failure(dist_->world(), config_.training.save_dir);
  resources_ = std::make_unique<engine::Resources>(*dist_, config_, std::move(device), std::move(kernels),
                                                   std::move(groups));
  lay_out();
  const engine::GroupOf group_of = make_optimizer();
  fp8_ = std::make_unique<engine::Fp8Layers>(*model_, config_.fp8, resources_->kernels());
  pruned_ = std::make_unique<engine::PrunedLayers>(*model_, config_.training.sparsity);
  shard();
  if (config_.learns_preferences())
    if (auto* texts = dynamic_cast<nn::TextModel*>(model_.get())) {
      preferences_ = std::make_shared<engine::PreferenceTextLoss>(config_, this->device());
      texts->set_text_loss(preferences_);
    }
  choose_schedule();
  const std::int64_t blocks = engine::choose_blocks(*model_, config_.training, stages_);
  executor_ = std::make_unique<engine::Executor>(config_, *model_, *sharded_, stages_, *update_, *resources_);
  checkpoints_ = std::make_unique<engine::Checkpoints>(*this);
  if (config_.log_level) set_log_level(*config_.log_level);
  if (dist_->rank() == 0) describe(group_of, blocks);
}

/// Finds which parts of the model lie on this rank, and refuses what the ranks cannot run.
void Engine::lay_out() {
  const bool others_exist = device().kind() != device::Kind::meta;
  engine::require_cut(*model_, groups(), *dist_, others_exist);
  engine::require_experts(*model_, groups(), config_);
  stages_ = engine::agree_on_stages(*model_, config_, groups(), *dist_, others_exist);
}

engine::GroupOf Engine::make_optimizer() {
  config_.optimizer = engine::with_companions(config_.optimizer, *model_);
  engine::GroupOf group_of = engine::assign_groups(*model_, config_.optimizer, config_.notes);
  optimizer_ = std::make_shared<engine::Optimizer>(config_.optimizer, config_.training.seed, group_of);
  scheduler_ = engine::make_scheduler(config_, optimizer_);
  return group_of;
}

void Engine::shard() {
  sharding::ShardingOptions options = optimizer_->sharding_options(config_);
  options.parts = stages_.all_own();
  options.claimed = [this] { fp8_->adopt(), pruned_->adopt(); };
  options.expert_rank = groups().grid().coordinate(comm::Axis::expert, dist_->rank());
  const bool ordered = config_.parallel.reduction == Reduction::ordered;
  sharded_ = std::make_unique<sharding::ShardedModel>(
      model_, options, resources_->sources(engine::StateGroups(*model_, stages_, groups(), ordered)));
  update_ = std::make_unique<engine::StepUpdate>(config_, *sharded_, *optimizer_, *resources_);
}

void Engine::choose_schedule() {
  schedule_ = std::make_unique<const engine::TrainSchedule>(
      engine::choose_schedule(config_, *model_, stages_, groups().group(comm::Axis::shard).size()));
  if (schedule_->schedule != config::Schedule::accumulate) list();  // what it cannot serve is told here
}

std::vector<sharding::Instruction> Engine::list() const {
  return make_list(*schedule_, config_, engine::StepUpdate::may_begin_early(config_),
                   engine::StepUpdate::may_end_late(config_, device()));
}

void Engine::describe(const engine::GroupOf& group_of, std::int64_t blocks) const {
  std::vector<std::string> lines = config_.notes;
  if (device().kind() != device::Kind::meta) {
    for (std::string& line : engine::describe_groups(*model_, config_.optimizer, group_of))
      lines.push_back(std::move(line));
    lines.push_back(
        describe_schedule(*schedule_, config_, *model_, groups().group(comm::Axis::shard).size()));
    lines.push_back(describe_partial_recompute(config_, blocks, *schedule_));
    lines.push_back(fp8_->describe());
    lines.push_back(pruned_->describe());
  }
  if (config_.dump_state) lines.push_back(cat("configuration: ", config::dump(config_)));
  for (const std::string& line : lines)
    if (!line.empty()) log_info(line);
}

Engine::~Engine() = default;

comm::ProcessGroups& Engine::groups() const {
  return resources_->groups();
}
namespace {
/// Stages of a pipeline between the first and the last need documents' bounds, the lengths of an encoder's
/// texts, sides of answers, and labels for what their routers' losses weigh.
bool every_stage_reads(const config::Config& config) {
  return config.keeps_texts_apart() || config.objective() == config::Objective::seq2seq ||
         config.learns_preferences() || (config.model && config.model->moe.experts > 0);
}
}  // namespace

data::LoaderRank Engine::loader_rank() const {
  return {config_.batch.micro_batch_size, data_ranks().rank(), data_ranks().size(),
          stages_.reads_batches() || every_stage_reads(config_)};
}
device::Device& Engine::device() const {
  return resources_->device();
}
const std::shared_ptr<device::Device>& Engine::shared_device() const {
  return resources_->shared_device();
}
tensor::Kernels& Engine::kernels() const {
  return resources_->kernels();
}
engine::IoBytes Engine::io_bytes() const {
  return resources_->io_bytes();
}
const engine::Counters& Engine::counters() const {
  return executor_->counters();
}
const StepReport& Engine::last_step() const {
  return executor_->report();
}

void Engine::set_gradient_accumulation_boundary(std::optional<bool> boundary) {
  executor_->set_boundary(boundary);
}

void Engine::drop_step() {
  executor_->reset();
}

bool Engine::is_gradient_accumulation_boundary() const {
  return executor_->is_boundary();
}

autograd::Var Engine::forward(const tensor::Batch& batch) {
  if (!training_) return executor_->evaluate(batch);
  schedule_->require_micro_batches(config_);
  begin_step();
  return executor_->forward(batch);
}

/// Where a step begins.
void Engine::begin_step() {
  if (!executor_->idle() || executor_->accumulated() != 0 || executor_->failed()) return;
  if (preferences_) preferences_->sums().clear();
  if (!std::exchange(begun_, true) && dist_->rank() == 0) warn_of_handlers_on_threads_stacks();
  checkpoints_->poll();
}

void Engine::backward(const autograd::Var& loss) {
  executor_->backward(loss);
}

void Engine::step() {
  if (executor_->step()) after_update();
}

void Engine::after_update() {
  // The last batches of an epoch of one's own data are smaller.
  executor_->counters().global_samples += checkpoints_->samples_of_step() - config_.batch.train_batch_size;
  if (scheduler_ && was_step_applied()) scheduler_->step();
  tell_of_skips();
  const bool prints = config_.steps_per_print > 0 && global_steps() % config_.steps_per_print == 0;
  if (prints && dist_->rank() == 0) engine::log_step(*this);
}

/// Steps that change nothing again and again are no training. All ranks find the same.
void Engine::tell_of_skips() {
  const StepReport& step = last_step();
  skipped_in_a_row_ = step.applied ? 0 : skipped_in_a_row_ + 1;
  if (step.applied) return;
  const optim::LossScaler* scaler = update_->scaler();
  const std::string why =
      !step.has_targets
          ? std::string("none of its tokens is a target of the loss (-100 in labels leaves one out)")
      : !scaler ? std::string("gradients overflowed")
                : cat("gradients overflowed at the loss scale ", step.loss_scale,
                      scaler->scale() == step.loss_scale ? "" : cat(", which is now ", scaler->scale()));
  if (dist_->rank() == 0) log_warning("step ", step.step, " was skipped: ", why);
  const std::int64_t most = config_.training.max_skipped_steps;
  if (most == 0 || skipped_in_a_row_ < most) return;
  fail(step.has_targets ? ErrorKind::numerics : ErrorKind::data, "the last ", counted(most, "step"),
       " changed nothing (training.max_skipped_steps): of step ", step.step, ", ", why, "; ",
       !step.has_targets ? "look at the labels, or give a step more samples (train_batch_size)"
       : !scaler         ? "lower the learning rate or clip gradients (gradient_clipping)"
                         : "lower a fixed fp16.loss_scale, or give 0 for one that adapts");
}

const StepReport& Engine::train_batch(const std::function<tensor::Batch()>& next) {
  require(training_, "train_batch() needs train() mode");
  if (schedule_->runs_micro_batches(config_, executor_->by_micro_batches())) {
    const std::int64_t before = global_steps();
    begin_step();  // before a batch is taken, which would be lost where this throws
    while (global_steps() == before) {
      backward(executor_->forward(next()));
      step();
    }
    return last_step();
  }
  begin_step();
  executor_->run(list(), schedule_->layout, next);
  after_update();
  return last_step();
}

config::Schedule Engine::schedule() const {
  return schedule_->schedule;
}

void Engine::set_observer(engine::InstructionObserver* observer) {
  executor_->set_observer(observer);
}

void Engine::set_trace(engine::Trace* trace) {
  set_observer(trace);
  resources_->set_trace(trace);
}

void Engine::synchronize() {
  update_->complete();
  device().synchronize();
  update_->require_finite(global_steps());
}

void Engine::evaluate(const std::function<void(autograd::Tape&)>& run) {
  executor_->evaluate(run);
}

double Engine::eval_batch(const tensor::Batch& batch) {
  return eval_batches([&] { return batch; }, 1);
}

namespace {
/// Batches all of whose samples count.
std::function<data::CountedBatch()> whole(const std::function<tensor::Batch()>& next, std::int64_t samples) {
  return [&next, samples] { return data::CountedBatch{next(), samples}; };
}
}  // namespace

double Engine::eval_batches(const std::function<tensor::Batch()>& next, std::int64_t count) {
  return eval_batches(whole(next, train_micro_batch_size_per_gpu()), count);
}

double Engine::eval_batches(const std::function<data::CountedBatch()>& next, std::int64_t count) {
  require(count > 0, "eval_batches() needs batches, not ", count);
  engine::StepLoss losses(device(), data_ranks(), groups().group(comm::Axis::pipeline), "evaluation loss");
  for (std::int64_t i = 0; i < count; ++i) {
    const auto [batch, samples] = next();
    const autograd::Var loss = executor_->evaluate(batch);
    losses.add(loss.defined() ? loss.value() : tensor::Tensor(),
               engine::evaluation_weight(config_, device(), batch, samples));
    if (loss.defined()) item(loss);  // a GPU is not to be given more than one of them
    update_->require_finite(global_steps());
  }
  const engine::MeanLoss mean = losses.mean();
  if (mean.weight == 0)
    fail(ErrorKind::data,
         "none of the tokens of an evaluation is a target of the loss: take more batches "
         "(training.eval_steps), or look at the labels (-100 leaves a token out)");
  return mean.value;
}

engine::MetricMeans Engine::evaluate(const std::function<tensor::Batch()>& next, std::int64_t count,
                                     const engine::AddMetrics& run) {
  return evaluate(whole(next, train_micro_batch_size_per_gpu()), count, run);
}

engine::MetricMeans Engine::evaluate(const std::function<data::CountedBatch()>& next, std::int64_t count,
                                     const engine::AddMetrics& run) {
  require(count > 0, "evaluate() needs batches, not ", count);
  engine::MetricSums sums(device());
  for (std::int64_t i = 0; i < count; ++i) {
    const data::CountedBatch counted = next();
    const tensor::Batch& batch = counted.batch;
    sums.next_batch();
    evaluate([&](autograd::Tape& tape) {
      tape.enter(model_->scope());  // parameters outside of blocks
      run(tape, batch, sums);
      tape.leave(model_->scope());
    });
    if (counted.samples == 0) sums.drop_batch();
    update_->require_finite(global_steps());
  }
  return sums.means(data_ranks(), groups().group(comm::Axis::pipeline));
}

engine::MetricMeans Engine::evaluate(data::Loader& loader, const engine::AddMetrics& run) {
  const std::int64_t before = loader.position();
  // Also where `run` throws: training may go on by this loader.
  struct Back {
    data::Loader& loader;
    std::int64_t position;
    ~Back() { loader.seek(position); }
  } const back{loader, before};
  loader.seek(0);
  return evaluate([&] { return loader.next_of_pass(); }, loader.batches_per_epoch(), run);
}

tensor::Tensor Engine::predict(
    const tensor::Batch& batch,
    const std::function<autograd::Var(autograd::Tape&, const tensor::Batch&)>& run) {
  tensor::Tensor out;
  evaluate([&](autograd::Tape& tape) {
    tape.enter(model_->scope());  // parameters outside of blocks
    const autograd::Var value = run(tape, batch);
    if (stages_.stages > 1) {
      const auto* cut = dynamic_cast<const nn::LayeredModel*>(model_.get());
      out = cut->stages()->from_last(tape, value.defined() ? value.value() : tensor::Tensor());
    } else {
      require(value.defined(), "predict(): what runs gave no value");
      out = value.value();
    }
    const tensor::Tensor own = tape.empty(out.shape(), out.dtype());  // parameters and batches may go
    kernels().copy(out, own);
    out = tensor::to_host(device(), own);
    tape.leave(model_->scope());
  });
  update_->require_finite(global_steps());
  return out;
}

double Engine::item(const autograd::Var& loss) {
  return tensor::read_scalar(loss.tape().device(), loss.value());
}

std::optional<double> Engine::get_global_grad_norm() const {
  return last_step().step > 0 ? std::optional(last_step().grad_norm) : std::nullopt;
}

void Engine::set_training_data(const data::Loader& loader, std::shared_ptr<const engine::TokenData> tokens) {
  checkpoints_->set_training_data(loader, std::move(tokens));
}

void Engine::set_checkpoint_files(engine::ExtraFiles files) {
  checkpoints_->set_files(std::move(files));
}

void Engine::set_checkpoint_base(engine::BaseReference base) {
  checkpoints_->set_base(std::move(base));
}

void Engine::claim_save_folder(const std::string& directory) {
  checkpoints_->claim(directory);
}

void Engine::save_checkpoint(const std::string& directory, const std::string& tag,
                             const engine::ClientState& client) {
  save_checkpoint(directory, engine::SaveOptions{.tag = tag, .client = client});
}

void Engine::save_checkpoint(const std::string& directory, const engine::SaveOptions& options) {
  checkpoints_->save(directory, options);
}

void Engine::finish_save() {
  checkpoints_->finish();
}

bool Engine::save_under_way() const {
  return checkpoints_->under_way();
}

void Engine::load_weights(nn::WeightSource& source) {
  checkpoints_->load_weights(source);
}

engine::Comparison Engine::compare_checkpoint(const engine::CheckpointReader& reader,
                                              const engine::CheckpointReader* before) {
  return checkpoints_->compare(reader, before);
}

engine::ClientState Engine::load_checkpoint(const std::string& directory, const std::string& tag) {
  return checkpoints_->load(directory, tag);
}

void Engine::claim_local_folder(const std::string& directory, const std::string& local_directory, bool anew) {
  checkpoints_->claim_local(directory, local_directory, anew);
}

bool Engine::save_local_checkpoint(const engine::SaveOptions& options) {
  return checkpoints_->save_local(options);
}

std::optional<engine::LoadedCheckpoint> Engine::load_newest_checkpoint(const std::string& directory) {
  return checkpoints_->load_newest(directory);
}

engine::NewestLocal Engine::newest_local_checkpoint() const {
  return checkpoints_->newest_local();
}

void Engine::remove_local_checkpoints() {
  checkpoints_->remove_local();
}

}  // namespace sherd
