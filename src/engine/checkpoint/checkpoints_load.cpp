// Checkpoints' part that loads.
#include "engine/checkpoint/checkpoints.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <set>
#include <utility>

#include "base/files.h"
#include "base/log.h"
#include "comm/gather.h"
#include "data/tokenizer.h"
#include "engine/checkpoint/format.h"
#include "engine/checkpoint/local/local_checkpoints.h"
#include "engine/checkpoint/same_run.h"
#include "engine/checkpoint/states.h"
#include "engine/step/executor.h"
#include "engine/step/step_states.h"
#include "engine/update/rules/parameter_norms.h"

namespace sherd::engine {

namespace {

/// Where the data's own tokenizer model is gone, the checkpoint's copy is what later checkpoints hold.
void keep_tokenizer(const CheckpointReader& reader, std::shared_ptr<const TokenData>& tokens) {
  if (!tokens || !tokens->tokenizer_model.empty()) return;
  const std::string copy = reader.manifest().tokenizer_copy();
  if (copy.empty()) return;
  reader.verify(copy);
  auto with_copy = std::make_shared<TokenData>(*tokens);
  with_copy->tokenizer_model = data::read_model_file((reader.folder() / copy).string());
  tokens = std::move(with_copy);
}

/// The files that the checkpoint holds beside ranks' and the tokenizer of its data; null: none.
std::shared_ptr<const ExtraFiles> files_in(const CheckpointReader& reader) {
  auto out = std::make_shared<ExtraFiles>();
  for (const auto& [name, checksum] : reader.manifest().files)
    if (name != reader.manifest().tokenizer_copy() && !name.ends_with(".safetensors")) {
      reader.verify(name);
      (*out)[name] = read_file(reader.folder() / name);
    }
  if (out->empty()) return nullptr;
  return out;
}

/// The patterns of each parameter group; none of group 0.
std::vector<std::vector<std::string>> patterns_of(const config::Optimizer& optimizer) {
  std::vector<std::vector<std::string>> out(1);
  for (const config::OptimizerGroup& group : optimizer.groups) out.push_back(group.match);
  return out;
}

/// The groups of the run that saved. Where its configuration cannot be read, it tells of group 0 alone.
std::vector<std::vector<std::string>> saved_patterns(const Manifest& manifest) {
  try {
    return patterns_of(config::parse_text(manifest.config, "the checkpoint's configuration").optimizer);
  } catch (const Error&) {
    return patterns_of({});
  }
}

/// Rates that the saved run's caller had set go to the groups that have the same patterns as then. `speaks`:
/// say so, and of which no group is left.
void restore_own_lr(const CheckpointReader& reader, const config::Optimizer& here, Optimizer& optimizer,
                    bool speaks) {
  const std::vector<std::optional<double>>& saved = reader.manifest().lr;
  if (saved.empty()) return;
  const auto then = saved_patterns(reader.manifest());
  const auto now = patterns_of(here);
  for (std::size_t group = 0; group < saved.size(); ++group) {
    if (!saved[group]) continue;
    const auto same = group < then.size() ? std::find(now.begin(), now.end(), then[group]) : now.end();
    if (same != now.end()) optimizer.set_lr(static_cast<int>(same - now.begin()), *saved[group]);
    if (!speaks) continue;
    const std::string rate =
        cat("the rate ", *saved[group], " that the saved run's own code had set for group ", group);
    if (same != now.end())
      log_info(rate, " holds for group ", same - now.begin(), " until the schedule or set_lr() moves it");
    else
      log_warning(rate, " is dropped: no group has its patterns any more");
  }
}

}  // namespace

void Checkpoints::restore_counters(const CheckpointReader& reader) {
  const Manifest& manifest = reader.manifest();
  engine_.executor_->counters() = {manifest.micro_steps, manifest.global_steps, manifest.global_samples,
                                   manifest.skipped_steps};
  // Whatever was under way, after a NaN loss for example, is over.
  engine_.executor_->reset();
  engine_.update_->restored();
  engine_.optimizer_->set_steps(manifest.optimizer_steps);
  if (engine_.scheduler_ && !manifest.scheduler.empty())
    engine_.scheduler_->restore(manifest.scheduler);
  else if (!engine_.scheduler_)
    engine_.optimizer_->reset_lr();
  restore_own_lr(reader, engine_.config_.optimizer, *engine_.optimizer_, engine_.dist_->rank() == 0);
  if (optim::LossScaler* scaler = engine_.update_->scaler(); scaler && !manifest.loss_scaler.empty())
    scaler->restore(manifest.loss_scaler);
}

void Checkpoints::restore_data(const CheckpointReader& reader) {
  const DataRecord& data = reader.manifest().data;
  const std::optional<std::int64_t>& position = data.position;
  if (data_position_ && position) data_position_->set(*position, data.epoch_samples);
  if (data_position_) counted_position_ = data_position_->samples();
  if (engine_.dist_->rank() != 0) return;
  if (data_position_ && !position)
    log_warning("checkpoint ", reader.folder().string(),
                " does not say where in the data it stopped: the loader stays at "
                "sample ",
                data_position_->samples());
  if (const std::string change = layout_change(reader.manifest(), engine_.groups().grid()); !change.empty())
    log_info("resuming ", reader.folder().string(), ": ", change);
  const std::int64_t batch = engine_.train_batch_size();
  if (data_position_ && position && data_position_->samples() % batch != 0)
    log_info("resuming ", reader.folder().string(), ": the data go on at sample ", data_position_->samples(),
             ", which is no multiple of train_batch_size (", batch,
             "): steps begin at other samples than in a run with that size from the start");
  for (const std::string& change : changes_since(reader, engine_.config_, tokens_.get()))
    log_info("resuming ", reader.folder().string(), ": ", change);
}

/// Errors that work queued before may still find, in its data or in what it writes, are of the past.
void Checkpoints::forget_errors() {
  try {
    engine_.device().synchronize();
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::data) throw;
  }
  engine_.optimizer_->finite();
}

struct Checkpoints::OpenedCheckpoint {
  CheckpointReader reader;
  std::set<std::string> needed;  ///< files that this rank will read
};

/// The checkpoint, looked at by all ranks: each verifies its share of the files where they were not.
Checkpoints::OpenedCheckpoint Checkpoints::open(const std::filesystem::path& folder, bool verify) {
  std::optional<CheckpointReader> reader;
  std::set<std::string> needed;
  const auto read = comm::gather_results(engine_.dist_->world(), "checkpoint opened", [&] {
    reader.emplace(folder);
    if (tokens_) require_same_tokenizer(*reader, *tokens_);
    require_same_prompts(*reader, engine_.config_.training.adapter);
    if (engine_.config_.training.adapter.type != config::AdapterType::none)
      require_same_adapter(*reader, engine_.config_.training.adapter);
    require_same_model(*reader, shapes_of(engine_.model_->parameters()), &engine_.config_);
    require_same_pruning(*reader, *engine_.model_, engine_.config_.training.sparsity);
    needed = require_states(*reader, engine_.sharded(), Kinds::all);
    require_step_states(*engine_.model_, reader->manifest().step_states);
    if (verify) reader->verify_share(engine_.dist_->rank(), engine_.dist_->world_size());
    return stable_hash(reader->manifest().to_json());
  });
  const auto other =
      std::find_if(read.begin(), read.end(), [&](std::uint64_t hash) { return hash != read[0]; });
  if (other != read.end())
    fail(ErrorKind::data, "rank ", other - read.begin(), " reads another checkpoint in '",
         folder.parent_path().string(),
         "' than rank 0: all must see the same folder, in which no run saves meanwhile");
  return {std::move(*reader), std::move(needed)};
}

/// Whatever of a step is under way goes, before states change.
void Checkpoints::drop_step() {
  engine_.update_->abort(engine_.global_steps() + 1);
  forget_errors();
  // Passes that failed are no reason to refuse; the caller's leases are.
  engine_.sharded().abandon_passes();
  engine_.sharded().require_no_leases();
  engine_.executor_->reset();
}

void Checkpoints::load_weights(nn::WeightSource& source) {
  const std::exception_ptr failed = end_failed_pass();
  finish();
  end_late_update();
  comm::gather_results(engine_.dist_->world(), "weights checked", [&] {
    source.check(engine_.model_->parameters());
    require_step_states(*engine_.model_, source.step_states());
    if (failed) std::rethrow_exception(failed);
    drop_step();
    return true;
  });
  engine_.update_->poison("loading weights has ended half-way");
  base_.reset();
  frozen_.forget();
  if (local_) local_->frozen().forget();
  comm::gather_results(engine_.dist_->world(), "weights read", [&] {
    read_weights(source, engine_.sharded(), engine_.device());
    return true;
  });
  publish_all(engine_.sharded());
  engine_.update_->restored();
  restore_step_states(*engine_.model_, source.step_states());
}

/// Whatever of saving and updating is under way, before another checkpoint is loaded. Returns the error of a
/// pass that failed.
std::exception_ptr Checkpoints::end_what_is_under_way() {
  const std::exception_ptr failed = end_failed_pass();
  try {
    finish();
  } catch (const Error& error) {
    if (engine_.dist_->rank() == 0)
      log_warning("what was being saved is lost, and another checkpoint is loaded: ", error.what());
  }
  end_late_update();  // a checkpoint that cannot be loaded leaves whole weights; another replaces lost ones
  return failed;
}

ClientState Checkpoints::load(const std::string& directory, const std::string& tag) {
  const std::exception_ptr failed = end_what_is_under_way();
  std::filesystem::path folder;
  comm::gather_results(engine_.dist_->world(), "checkpoint found", [&] {
    folder = checkpoint_folder(directory, tag);
    return true;
  });
  return *load_from(folder, false, failed);
}

/// Nothing where the files of a local one cannot be had on all machines; then nothing has changed.
std::optional<ClientState> Checkpoints::load_from(const std::filesystem::path& folder, bool local,
                                                  std::exception_ptr failed) {
  // All that can be wrong with the checkpoint is found before anything of the engine changes.
  const OpenedCheckpoint opened = open(folder, !local);
  const CheckpointReader& reader = opened.reader;
  if (local && !local_->fetch(reader, opened.needed)) return {};
  comm::gather_results(engine_.dist_->world(), "checkpoint verified", [&] {
    if (failed) std::rethrow_exception(failed);
    drop_step();
    return true;
  });
  engine_.update_->poison(cat("loading ", reader.folder().string(), " has ended half-way"));
  frozen_.forget();
  if (local_) local_->frozen().forget();
  FrozenFiles& frozen = local ? local_->frozen() : frozen_;
  const auto found = comm::gather_results(engine_.dist_->world(), "checkpoint read", [&] {
    read_states(reader, engine_.sharded(), Kinds::all, engine_.device());
    engine_.optimizer_->norms().restore(reader.learned());
    keep_tokenizer(reader, tokens_);
    if (engine_.dist_->rank() == 0 && !files_) files_ = files_in(reader);
    return frozen.find_in(reader);
  });
  if (!engine_.config_.training.adapter.save_base) {
    base_ = reader.manifest().base;
    if (!base_ && engine_.dist_->rank() == 0)
      log_warning(
          "checkpoint ", reader.folder().string(),
          " holds its base, and those to come hold it, too, whatever training.adapter.save_base says");
  }
  const std::filesystem::path kept = local ? local_->settle() : reader.folder();
  if (std::ranges::all_of(found, std::identity())) frozen.keep(kept);
  publish_all(engine_.sharded());
  restore_counters(reader);
  for (const std::string& line : restore_step_states(*engine_.model_, reader.manifest().step_states))
    if (engine_.dist_->rank() == 0) log_warning("resuming ", reader.folder().string(), ": ", line);
  restore_data(reader);
  return reader.manifest().client;
}

}  // namespace sherd::engine
