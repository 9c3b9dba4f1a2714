#pragma once

// This folder turns one model, one configuration and some ranks into training. It knows no model.
//
//   engine.h          Engine: forward, backward, step, and train_batch(); what a caller has
//   initialize.h      how an engine, its model, data and groups of ranks are made from a configuration
//   trainer.h         a whole run: from the first step to the last, with evaluations, checkpoints, reports
//   best_loss.h       which evaluation was the best, and patience
//   distributed.h     the ranks: launched, or threads of this process
//   scheduler.h       rates and betas by step, and what set_lr() overrules
//   token_data.h      the token data of a run, and its tokenizer
//   stop_signals.h    signals that ask to stop
//   setup/            device, kernels, groups and stores of a rank (resources.h)
//   estimate/         what a run will take, from an engine on a device that only tracks memory: bytes
//                     (estimate.h), and by a machine's rates the time of a step (step_time.h)
//   step/             runs the instructions of a step (executor.h)
//   pipeline/         which schedule, which parts of the model, and what stages pass on (train_schedule.h)
//   preference/       losses of answers that people compared, and what they need beside the texts
//   update/           from gradients to new parameters (update_pipeline.h)
//   checkpoint/       saves and loads (checkpoint.h)
//   report/           what a run tells: metrics, traces, progress (report.h)
//
// A step is a list: train_batch() makes the list of instructions (pipeline/), Executor runs it (step/),
// StepUpdate decides about the update and runs it (update/), and step() moves the schedule of rates on.

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "autograd/tape.h"
#include "comm/process_groups.h"
#include "config/config.h"
#include "data/loader.h"
#include "device/device.h"
#include "engine/distributed.h"
#include "engine/pipeline/stage_layout.h"
#include "engine/scheduler.h"
#include "engine/step/metric_sums.h"
#include "engine/step/step_report.h"
#include "nn/module.h"
#include "nn/weight_source.h"
#include "sharding/sharded_model.h"

namespace sherd {

namespace engine {

struct BaseReference;
class CheckpointReader;
class Checkpoints;
struct Comparison;
class Executor;
class Fp8Layers;
class PrunedLayers;
class PreferenceTextLoss;
class Resources;
class InstructionObserver;
class StepUpdate;
class Trace;
struct TokenData;
struct TrainSchedule;

/// Evaluates a batch on a tape, and adds what it finds to the sums.
using AddMetrics = std::function<void(autograd::Tape&, const tensor::Batch&, MetricSums&)>;

/// Strings that a caller wants to find again in a checkpoint.
using ClientState = std::map<std::string, std::string>;

/// Files that checkpoints hold beside what training made, by name: bytes.
using ExtraFiles = std::map<std::string, std::string>;

/// The checkpoint that Engine::load_newest_checkpoint() has loaded.
struct LoadedCheckpoint {
  ClientState client;
  bool local = false;           ///< from a local checkpoint, not from one in the run's folder
  std::int64_t in_folder = -1;  ///< the step of the newest one in the run's folder; -1: there is none
};

/// How Engine::save_checkpoint() saves, where a tag is not enough.
struct SaveOptions {
  std::string tag{};     ///< the folder's name; empty: global_stepN
  ClientState client{};  ///< comes back from load_checkpoint()
  /// Copies the states, and writes while training goes on. Engine::finish_save() waits for it.
  bool async = false;
  /// DIR/best is to name this checkpoint, too; until then remove_old_checkpoints() spares the one before.
  bool best = false;
  std::int64_t keep_last = 0;  ///< once it is whole, as remove_old_checkpoints(); 0: nothing is removed
};

}  // namespace engine

/// Trains one sharded model: forward, backward, step, with DeepSpeed's counters and rules of accumulation.
///
/// Made by initialize(). One per rank; every method is called from that rank's thread, and by all ranks alike
/// (making one, which throws Error{config} where configurations differ, and all that trains, saves or loads
/// is collective).
class Engine {
 public:
  /// `device`: another than the one that the config describes. On a meta device nothing is computed, read or
  /// written (also not to NVMe), while the ledger tracks what a real run would hold. `kernels`: others than
  /// tensor::make_kernels() has for it. `groups`: those with whose layout the model was built (make_groups(),
  /// or the caller's own); null: made here.
  Engine(DistributedPtr dist, std::shared_ptr<nn::Model> model, const config::Config& config,
         std::shared_ptr<device::Device> device = nullptr, std::unique_ptr<tensor::Kernels> kernels = nullptr,
         std::shared_ptr<comm::ProcessGroups> groups = nullptr);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // ---- the three calls of a micro-batch ----
  // On a GPU they only queue work, up to four micro-batches ahead of it; the thread waits for the GPU in the
  // step() of an accumulation boundary (and where an early update needs the loss). What is wrong with data
  // that only the GPU has looked at (an id beyond the vocabulary) is thrown there at the latest, or by
  // item(), as Error{data} that names the value.

  /// The loss of one micro-batch. In train() mode backward() must follow before the next forward(), in either
  /// mode. On a pipeline there is no such thing to go back from: train_batch() trains, and in eval() mode the
  /// loss is undefined on stages but the last. Trains by parallel.schedule `auto` and `accumulate` alone.
  autograd::Var forward(const tensor::Batch& batch);
  /// Gradients of `loss`, divided by gradient_accumulation_steps (and multiplied by the loss scale; both are
  /// undone or meant). Reduces over ranks as the placement says.
  ///
  /// With an offloaded optimizer in bf16, gradient_clipping off and bf16.check_grad_overflow off, nothing
  /// that is known only after backward decides about the update: at an accumulation boundary it begins here,
  /// with the learning rate of this moment, unless the loss is NaN or infinite. No lease on gathered
  /// parameters may be held then, and until step() weights are partly updated: evaluation and
  /// save_checkpoint() are refused. When it fails after it has changed a weight, the step cannot be undone:
  /// the error says so, and only load_checkpoint() goes on. The same holds for step() in any setting.
  void backward(const autograd::Var& loss);
  /// Counts a micro-batch; at an accumulation boundary clips, updates, moves the schedule on, and clears
  /// gradients. Throws Error{numerics} when the loss is NaN or infinite (fp16: when the loss scale cannot
  /// shrink further). A step that fails before it changes a weight drops what was accumulated. That a GPU's
  /// update has made a weight NaN or infinite is thrown by the next boundary's step(), evaluation,
  /// save_checkpoint() or synchronize().
  void step();

  /// A whole step: the schedule that section `parallel` asks for, over gradient_accumulation_steps batches
  /// from `next`, which comes for them in order; the report of the step. On every stage of a pipeline `next`
  /// is called as often; stages with neither the first nor the last part of the model look at nothing that it
  /// gives.
  ///
  /// `accumulate` is forward(), backward() and step() in a loop, up to the next update: only this schedule
  /// goes by set_gradient_accumulation_boundary() and ends a step that forward() has begun. `auto` comes to
  /// it then; others are refused. All micro-batches of a pipeline's step have one shape. What one stage
  /// throws, the others tell; a pipeline that has failed in the middle of a step trains no more.
  const engine::StepReport& train_batch(const std::function<tensor::Batch()>& next);
  /// Ends an update that train_batch() left for beside the next step (parallel.schedule layered), waits until
  /// this rank's device has done all that it was given, and throws what is known only then: Error{numerics}
  /// when the last update made a weight NaN or infinite, Error{data} for wrong data, Error{io}. For the end
  /// of a training after whose last step nothing is evaluated or saved, and before weights are read. To be
  /// called by all ranks; it may fail on one of them alone.
  void synchronize();
  /// Mean loss over ranks, without gradients and dropout.
  double eval_batch(const tensor::Batch& batch);
  /// The same over `count` batches of each rank, as many on all. Losses are gathered once, and added in the
  /// global order of batches, so that the bits do not depend on how many ranks share them.
  double eval_batches(const std::function<tensor::Batch()>& next, std::int64_t count);
  /// The same of batches of which a part may not count: the mean over each sample of a pass over a loader
  /// (data::Loader::next_of_pass(), batches_per_epoch()), whatever the number of ranks.
  double eval_batches(const std::function<data::CountedBatch()>& next, std::int64_t count);
  /// Runs `run` on a tape that records nothing, with dropout off: the model on inputs of any kind, generation
  /// (models::generate()). Parameters are gathered ahead of use, as in an evaluation. All ranks run the same.
  void evaluate(const std::function<void(autograd::Tape&)>& run);
  /// Evaluates more than a loss. Calls `run` for each of `count` batches of this rank, as many on all, on a
  /// tape as evaluate() has it, and gives the means of what it adds to the sums, over all batches of all data
  /// ranks: the same on every rank, whatever number of ranks shares them. On a pipeline what the last stage
  /// adds counts. Ranks that share a model add the same. `run` may use blocks, the model's parameters outside
  /// of blocks, and the model itself.
  engine::MetricMeans evaluate(const std::function<tensor::Batch()>& next, std::int64_t count,
                               const engine::AddMetrics& run);
  /// The same of batches of which a part may not count; of one without any nothing is added.
  engine::MetricMeans evaluate(const std::function<data::CountedBatch()>& next, std::int64_t count,
                               const engine::AddMetrics& run);
  /// The same over one epoch of `loader`, from its beginning, each sample once; its position is then what it
  /// was.
  engine::MetricMeans evaluate(data::Loader& loader, const engine::AddMetrics& run);
  /// The result of `run` on the batch without gradients and dropout, a model's predictions, where the
  /// processor can read it: each rank's own, on all stages of a pipeline what the last one gives.
  tensor::Tensor predict(const tensor::Batch& batch,
                         const std::function<autograd::Var(autograd::Tape&, const tensor::Batch&)>& run);
  /// The number behind a loss, on this rank. Waits for the device.
  static double item(const autograd::Var& loss);

  /// Dropout on, gradients recorded (the default) or off.
  void train(bool on = true) { training_ = on; }
  void eval() { train(false); }

  // ---- accumulation ----
  /// Overrules the count until it is called again: is the coming micro-batch the last before an update? Call
  /// before forward. Nothing: the count decides again.
  void set_gradient_accumulation_boundary(std::optional<bool> boundary);
  bool is_gradient_accumulation_boundary() const;
  /// Forgets the micro-batches of a step that has not ended, as if they had not been.
  void drop_step();

  // ---- counters, as DeepSpeed's ----
  const engine::Counters& counters() const;
  std::int64_t micro_steps() const { return counters().micro_steps; }
  std::int64_t global_steps() const { return counters().global_steps; }
  std::int64_t global_samples() const { return counters().global_samples; }
  std::int64_t skipped_steps() const { return counters().skipped_steps; }
  bool was_step_applied() const { return last_step().applied; }
  /// Unscaled, before clipping; nothing before the first step.
  std::optional<double> get_global_grad_norm() const;
  std::vector<double> get_lr() const { return optimizer_->lr(); }
  std::int64_t train_batch_size() const { return config_.batch.train_batch_size; }
  std::int64_t train_micro_batch_size_per_gpu() const { return config_.batch.micro_batch_size; }
  std::int64_t gradient_accumulation_steps() const { return config_.batch.gradient_accumulation_steps; }
  const engine::StepReport& last_step() const;
  /// That train_batch() runs; never automatic.
  config::Schedule schedule() const;
  /// Is told of every instruction of training from here on, until null is given; must outlive its use.
  void set_observer(engine::InstructionObserver* observer);
  /// Records training from here on, on this thread (engine/report/trace.h), in place of another observer;
  /// null: no more. Must outlive its use.
  void set_trace(engine::Trace* trace);
  /// The layers whose products run in FP8.
  engine::Fp8Layers& fp8() const { return *fp8_; }
  /// The loss by which the model learns preferences (engine/preference/); null: it learns something else.
  engine::PreferenceTextLoss* preference_loss() const { return preferences_.get(); }
  /// Payload that this rank has moved from and to NVMe.
  engine::IoBytes io_bytes() const;

  // ---- checkpoints (engine/checkpoint/checkpoint.h) ----
  /// The data that training reads. From here on checkpoints hold where `loader` is, so that load_checkpoint()
  /// puts it back there; and of `tokens`, which may be null, the tokenizer, and by what the dataset is known
  /// again. initialize() calls this. The loader may go before the engine.
  void set_training_data(const data::Loader& loader,
                         std::shared_ptr<const engine::TokenData> tokens = nullptr);
  /// Files that checkpoints hold from here on as they are: the tokenizer and settings that a model came with.
  /// load_checkpoint() takes those of the checkpoint, unless this gave some. Rank 0's count.
  void set_checkpoint_files(engine::ExtraFiles files);
  /// Checkpoints do not hold parameters that do not train from here on, and refer to the files that these
  /// came from. For a program that reads them again (engine::set_base_opener()). On all ranks alike.
  void set_checkpoint_base(engine::BaseReference base);
  /// Claims DIR for this run's checkpoints, as the first save_checkpoint() there would, until this engine
  /// ends or saves elsewhere: no other engine can save there meanwhile. Removes what runs that were killed
  /// while they saved there left. Throws Error{io} naming the process that has the folder. Collective.
  void claim_save_folder(const std::string& directory);
  /// Writes DIR/TAG (default global_stepN) whole or not at all, then moves DIR/latest; claims DIR before.
  /// Replaces nothing but a checkpoint. What fails on one rank is thrown on all, which can go on. Waits for a
  /// save under way before, and throws what that failed with. Collective.
  void save_checkpoint(const std::string& directory, const std::string& tag = "",
                       const engine::ClientState& client = {});
  /// The same as `options` say. With `async` it returns as soon as the states are copied to host memory,
  /// which the ledger holds from then on (category `checkpoint`); what lies on NVMe is read later, and
  /// updates wait until it was. A thread of its own writes. The checkpoint has the same bytes. What fails
  /// then is thrown on all ranks by the next step, before it begins, by finish_save() or by the next save.
  /// Where a rank has no memory for the copy, all save while they wait, and one says so in the log.
  void save_checkpoint(const std::string& directory, const engine::SaveOptions& options);
  /// Waits until the save under way is whole; nothing where none is. Throws what it failed with. Where it is
  /// not called, the engine's end waits, and what fails is a warning. Collective.
  void finish_save();
  /// Whether a checkpoint is being written that is not whole yet, as far as all ranks know since the last
  /// step began: the same on all.
  bool save_under_way() const;
  /// Restores everything from DIR/TAG (default: what DIR/latest names), the training loader's position too,
  /// and returns what the caller had saved. Any number of ranks, stage and placement loads what any others
  /// saved. Throws Error{data} or Error{io} naming file and cause, also for training data of another
  /// tokenizer. Other settings that change what is trained (another dataset, seed, batch size or number of
  /// ranks) are a line each in rank 0's log. Collective.
  engine::ClientState load_checkpoint(const std::string& directory, const std::string& tag = "");
  /// Keeps local checkpoints (engine/checkpoint/local/local_checkpoints.h) from here on, in `local_directory`
  /// of each machine, for the run whose checkpoints are in `directory`. `anew`: it begins, and what an
  /// earlier run in that folder has left goes. Throws Error{io} where a machine's folder cannot be made.
  /// Collective.
  void claim_local_folder(const std::string& directory, const std::string& local_directory, bool anew);
  /// Saves on each machine, and copies to another, in the background as save_checkpoint() does. A failure is
  /// a warning: the local checkpoint before it stays. False where a save is under way, which goes first.
  /// Collective.
  bool save_local_checkpoint(const engine::SaveOptions& options);
  /// Loads as load_checkpoint(directory) does, or from a local checkpoint where one is newer, of which other
  /// machines may have parts. Nothing where there is neither. Collective.
  std::optional<engine::LoadedCheckpoint> load_newest_checkpoint(const std::string& directory);
  /// The newest one that is whole, as all ranks know since the last step began; the same on all.
  engine::NewestLocal newest_local_checkpoint() const;
  /// Removes all local checkpoints of the run: it has ended well, or saved. Collective.
  void remove_local_checkpoints();
  /// Takes the weights of the whole model from `source` (engine::CheckpointWeights,
  /// models::HuggingFaceWeights, or a caller's own), fp32 masters included; nothing else changes. Each rank
  /// reads what it holds, from a source of its own. Throws Error{data} naming all that does not fit, before
  /// anything has changed. Between steps. Collective.
  void load_weights(nn::WeightSource& source);
  /// Compares weights, optimizer states and counters with those of a checkpoint to the bit
  /// (engine/checkpoint/compare.h). `before`: a checkpoint from which training came here, so that the result
  /// also tells how far weights moved; null: it does not. Changes nothing. Between steps. Collective.
  engine::Comparison compare_checkpoint(const engine::CheckpointReader& reader,
                                        const engine::CheckpointReader* before = nullptr);

  // ---- parts ----
  const config::Config& config() const { return config_; }
  Distributed& dist() { return *dist_; }
  const DistributedPtr& shared_dist() const { return dist_; }
  /// The groups in which this rank exchanges tensors, and what they carried, by axis.
  comm::ProcessGroups& groups() const;
  /// How the model's parts lie on the ranks of a pipeline.
  const engine::StageLayout& stages() const { return stages_; }
  /// The part of the data that this rank's loaders are to give.
  data::LoaderRank loader_rank() const;
  /// Tells an engine on a meta device, whose other stages are not there to do so, the form of each part's
  /// output. Called before the first step.
  void assume_values(std::vector<engine::ValueForm> of_parts) { stages_.given = std::move(of_parts); }
  /// The ranks that train on different data, this one among them.
  comm::Communicator& data_ranks() const { return groups().group(comm::Axis::data); }
  device::Device& device() const;
  /// The device, for a second engine of this rank.
  const std::shared_ptr<device::Device>& shared_device() const;
  tensor::Kernels& kernels() const;
  nn::Model& module() { return *model_; }
  sharding::ShardedModel& sharded() { return *sharded_; }
  const std::shared_ptr<engine::Optimizer>& optimizer() const { return optimizer_; }
  const std::shared_ptr<engine::Scheduler>& scheduler() const { return scheduler_; }

 private:
  friend class engine::Checkpoints;

  void lay_out();
  engine::GroupOf make_optimizer();
  void shard();
  void choose_schedule();
  void describe(const engine::GroupOf& group_of, std::int64_t blocks) const;
  std::vector<sharding::Instruction> list() const;
  void after_update();
  void tell_of_skips();
  void begin_step();

  DistributedPtr dist_;
  config::Config config_;
  std::unique_ptr<engine::Resources> resources_;  ///< go after all that uses them
  std::shared_ptr<nn::Model> model_;
  engine::StageLayout stages_;
  std::unique_ptr<engine::Fp8Layers> fp8_;
  std::unique_ptr<engine::PrunedLayers> pruned_;
  std::shared_ptr<engine::PreferenceTextLoss> preferences_;
  std::shared_ptr<engine::Optimizer> optimizer_;
  std::shared_ptr<engine::Scheduler> scheduler_;
  std::unique_ptr<sharding::ShardedModel> sharded_;
  std::unique_ptr<engine::StepUpdate> update_;
  std::unique_ptr<const engine::TrainSchedule> schedule_;  ///< the schedule of train_batch()
  std::unique_ptr<engine::Executor> executor_;
  std::unique_ptr<engine::Checkpoints> checkpoints_;
  std::int64_t skipped_in_a_row_ = 0;  ///< counted since this engine was made
  bool training_ = true;               ///< train() mode, as PyTorch's
  bool begun_ = false;                 ///< this engine's first step
};

}  // namespace sherd
