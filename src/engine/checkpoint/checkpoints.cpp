#include "engine/checkpoint/checkpoints.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "base/log.h"
#include "comm/gather.h"
#include "data/tokenizer.h"
#include "engine/checkpoint/background_save.h"
#include "engine/checkpoint/format.h"
#include "engine/checkpoint/local/local_checkpoints.h"
#include "engine/checkpoint/same_run.h"
#include "engine/checkpoint/save_folder.h"
#include "engine/checkpoint/writer.h"
#include "engine/step/executor.h"
#include "engine/step/step_states.h"
#include "engine/update/rules/parameter_norms.h"

namespace sherd::engine {

Checkpoints::Checkpoints(Engine& engine)
    : engine_(engine), frozen_(*engine.dist_, engine.sharded(), engine.device()) {
  frozen_.refer_to(&base_);
}
Checkpoints::~Checkpoints() = default;

void Checkpoints::set_training_data(const data::Loader& loader, std::shared_ptr<const TokenData> tokens) {
  data_position_ = loader.shared_position();
  counted_position_ = data_position_->samples();
  tokens_ = std::move(tokens);
  if (engine_.dist_->rank() != 0 || !tokens_) return;
  if (tokens_->info && tokens_->info->vocab_size > tokens_->vocab_size)
    log_warning("model.vocab_size is ", tokens_->vocab_size, ", and the data's tokenizer has ",
                tokens_->info->vocab_size,
                " ids: none of these texts uses one of the others; a text that does is refused");
  if (!data::model_file_of(tokens_->tokenizer).empty() && tokens_->tokenizer_model.empty())
    log_warning("the tokenizer model of '", tokens_->tokenizer,
                "' cannot be read, so checkpoints will lack it and `sherd generate` will not know it: put it "
                "back, or name it with data.tokenizer");
}

std::int64_t Checkpoints::samples_of_step() {
  const std::int64_t whole = engine_.config_.batch.train_batch_size;
  if (!data_position_) return whole;
  const std::int64_t now = data_position_->samples(), moved = now - std::exchange(counted_position_, now);
  return moved > 0 && moved < whole ? moved : whole;
}

Manifest Checkpoints::describe(const ClientState& client) const {
  Manifest out;
  out.world_size = engine_.dist_->world_size();
  using comm::Axis;
  for (const Axis axis :
       {Axis::tensor, Axis::context, Axis::data, Axis::shard, Axis::replica, Axis::pipeline, Axis::expert})
    out.grid[std::string(comm::name_of(axis))] = engine_.groups().grid().size(axis);
  out.micro_steps = engine_.counters().micro_steps;
  out.global_steps = engine_.counters().global_steps;
  out.global_samples = engine_.counters().global_samples;
  out.skipped_steps = engine_.counters().skipped_steps;
  out.optimizer_steps = engine_.optimizer_->steps();
  const std::vector<std::optional<double>>& own_lr = engine_.optimizer_->own_lr();
  if (std::any_of(own_lr.begin(), own_lr.end(), [](const auto& lr) { return lr.has_value(); }))
    out.lr = own_lr;
  if (engine_.scheduler_) out.scheduler = engine_.scheduler_->save();
  if (optim::LossScaler* scaler = engine_.update_->scaler()) out.loss_scaler = scaler->save();
  out.compute_dtype = name_of(engine_.config_.precision.compute);
  out.config = config::dump(engine_.config_);
  out.client = client;
  if (tokens_) out.data = DataRecord::of(*tokens_);
  if (data_position_) {
    out.data.position = data_position_->samples();
    out.data.epoch_samples = data_position_->epoch_samples();
  }
  out.step_states = save_step_states(*engine_.model_);
  out.shapes = shapes_of(engine_.model_->parameters());
  return out;
}

void Checkpoints::take_folder(const std::string& directory) {
  const auto path = std::filesystem::absolute(directory);
  if (save_folder_ && save_folder_->path() == path && !save_folder_->lost()) return;
  save_folder_.reset();
  save_folder_ = std::make_shared<SaveFolder>(path);
}

void Checkpoints::claim(const std::string& directory) {
  finish();
  comm::gather_results(engine_.dist_->world(), "checkpoint folder", [&] {
    if (engine_.dist_->rank() == 0) take_folder(directory);
    return true;
  });
}

/// Ends a backward that an exception left on all ranks, with the transfers that replicas began in it: before
/// ranks meet, which waits for these. What that fails with is for where they agree.
std::exception_ptr Checkpoints::end_failed_pass() {
  try {
    engine_.executor_->abandon_failed();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

/// Ends what the last step has left of its update.
std::exception_ptr Checkpoints::end_late_update() {
  try {
    engine_.update_->complete();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

SaveAct Checkpoints::new_act(const SaveOptions& options) const {
  SaveAct act;
  act.options = options;
  act.tag = options.tag.empty() ? cat("global_step", engine_.global_steps()) : options.tag;
  act.rank = engine_.dist_->rank(), act.ranks = engine_.dist_->world_size();
  return act;
}

/// Draws the id of a new act of saving, where all ranks can save; `prepare_folder` is called on rank 0.
void Checkpoints::begin_save(SaveAct& act, std::exception_ptr failed,
                             const std::function<void()>& prepare_folder) {
  if (!failed) failed = end_late_update();
  const auto drawn = comm::gather_results(engine_.dist_->world(), cat("checkpoint ", act.tag, " begun"), [&] {
    if (failed) std::rethrow_exception(failed);
    engine_.update_->require_finite(engine_.global_steps());
    engine_.update_->require_whole_weights("save_checkpoint()");
    // A pass that failed is over; one under way would be missing from the checkpoint, and its batch from
    // the data.
    const Executor& executor = *engine_.executor_;
    require(executor.idle() || executor.failed(),
            "save between micro-batches: forward() has been called, and step() has not");
    require(executor.accumulated() == 0, "save at an accumulation boundary: ", executor.accumulated(),
            " micro-batches have gradients that no update took up yet");
    require_good_tag(act.tag);
    std::array<char, 16> id{};
    if (act.rank != 0) return id;
    act.save_id = new_save_id();
    prepare_folder();
    std::copy(act.save_id.begin(), act.save_id.end(), id.begin());
    return id;
  });
  act.save_id.assign(drawn[0].begin(), drawn[0].end());
}

void Checkpoints::save(const std::string& directory, const SaveOptions& options) {
  require(!directory.empty(), "a checkpoint needs a folder");
  const std::filesystem::path base = std::filesystem::absolute(directory);
  std::exception_ptr failed = end_failed_pass();
  finish();
  SaveAct act = new_act(options);
  act.owns_partial = act.rank == 0;
  std::filesystem::path partial;  // of rank 0, once it is there
  try {
    begin_save(act, std::move(failed), [&] {
      require_replaceable(base / act.tag);
      take_folder(base);
      std::error_code error;
      const auto folder = partial_folder(base, act.tag, act.save_id);
      if (!std::filesystem::create_directory(folder, error))
        fail(ErrorKind::io, "cannot create '", folder.string(), "': ", error.message());
      partial = folder;
    });
    act.partial = partial_folder(base, act.tag, act.save_id);
    place_ = base / act.tag;
    frozen_.put(act.partial, act.save_id);
    if (!options.async || !take_snapshot(act)) return save_now(std::move(act));
    saving_ = std::make_unique<BackgroundSave>(std::move(act), engine_.config_.parallel.timeout_seconds);
    saving_locally_ = false;
  } catch (...) {
    if (!partial.empty()) remove_folder(partial);
    throw;
  }
}

FrozenFiles& Checkpoints::frozen_of(const SaveAct& act) {
  return act.write ? local_->frozen() : frozen_;
}

/// Takes down what is to be saved beside the states, where this rank can save.
void Checkpoints::prepare(SaveAct& act) {
  act.file.learned = engine_.optimizer_->norms().save();
  if (act.rank != 0) return;
  act.folder = save_folder_;
  act.tokens = tokens_;
  act.files = files_;
  act.manifest = describe(act.options.client);
  act.manifest.save_id = act.save_id;
  frozen_of(act).describe(act.manifest);
  act.manifest.to_json();  // strings that it cannot hold are an error now, not behind the next step
}

void Checkpoints::save_now(SaveAct act) {
  const auto sums = comm::gather_results(engine_.dist_->world(), "checkpoint checksums", [&] {
    prepare(act);
    act.file.tensors = live_tensors(engine_.sharded(), engine_.device(), FilePart::trained);
    return write_rank_file(act.rank_path(), act.file, act.save_id);
  });
  comm::gather_results(engine_.dist_->world(), "checkpoint published", [&] {
    if (act.rank == 0) act.publish(sums);
    return true;
  });
  frozen_.keep(place_);
}

/// Takes the states for writing them later. False where a rank has no memory for that.
bool Checkpoints::take_snapshot(SaveAct& act) {
  if (!snapshots_) snapshots_ = std::make_unique<Snapshots>(engine_.sharded(), engine_.device());
  std::string missing;
  const auto fits = comm::gather_results(engine_.dist_->world(), "checkpoint snapshot", [&] {
    prepare(act);
    try {
      snapshots_->reserve();
      return true;
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::memory) throw;
      missing = error.what();
      return false;
    }
  });
  const auto without = std::find(fits.begin(), fits.end(), false);
  if (without == fits.end()) {
    comm::gather_results(engine_.dist_->world(), "checkpoint copied", [&] {
      act.file.tensors = snapshots_->take();
      return true;
    });
    return true;
  }
  const bool speaks = without - fits.begin() == act.rank;
  snapshots_.reset();
  if (speaks && !std::exchange(said_too_large_, true))
    log_info(
        "checkpoints are written while training waits, as there is no memory for a copy of what they "
        "hold: ",
        missing, ". training.save_async false says so from the start");
  return false;
}

void Checkpoints::poll() {
  if (saving_) agree("checkpoint under way");
}

void Checkpoints::finish() {
  if (!saving_) return;
  saving_->wait_for(BackgroundSave::Progress::written);
  if (agree("checkpoint written")) return;
  if (engine_.dist_->rank() == 0) saving_->wait_for(BackgroundSave::Progress::whole);
  agree("checkpoint published");
}

/// Whether the checkpoint is whole: then no save is under way any more.
bool Checkpoints::agree(const char* label) {
  struct Told {
    comm::PartOutcome outcome;
    BackgroundSave::Progress progress;
  };
  using Progress = BackgroundSave::Progress;
  const std::exception_ptr error = saving_->error();
  const Told mine{error ? comm::PartOutcome::of(error) : comm::PartOutcome{}, saving_->progress()};
  const std::vector<Told> all = comm::gather_records(engine_.dist_->world(), mine, label);
  const auto failed = std::find_if(all.begin(), all.end(), [](const Told& t) { return t.outcome.failed; });
  if (failed != all.end()) {
    abort();
    if (saving_locally_) {
      give_up_local(cat("rank ", failed - all.begin(), ": ", failed->outcome.message));
      return true;
    }
    if (error) std::rethrow_exception(error);
    failed->outcome.rethrow(static_cast<std::size_t>(failed - all.begin()));
  }
  // A local checkpoint is whole once all ranks have written theirs; any other once rank 0 says so.
  const bool whole = saving_locally_ ? std::ranges::all_of(
                                           all, [](const Told& t) { return t.progress >= Progress::written; })
                                     : all[0].progress == Progress::whole;
  if (!whole) return false;
  saving_.reset();
  if (saving_locally_)
    try_locally([&] { local_->publish(); });
  else
    frozen_.keep(place_);
  return true;
}

/// On all ranks: none writes when one removes the folder.
void Checkpoints::abort() {
  saving_->cancel();
  comm::gather_records(engine_.dist_->world(), char{}, "checkpoint given up");
  saving_->remove_partial();
  if (!saving_->ended()) snapshots_.reset();  // the thread keeps that memory, which nobody else may use
  saving_.reset();
}

}  // namespace sherd::engine
