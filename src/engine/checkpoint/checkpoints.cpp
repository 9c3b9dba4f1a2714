#include "engine/checkpoint/checkpoints.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "base/atomic_file.h"
#include "base/excerpt.h"
#include "base/log.h"
#include "data/tokenizer.h"
#include "engine/checkpoint/checksum.h"
#include "engine/checkpoint/format.h"
#include "engine/checkpoint/load_states.h"
#include "engine/checkpoint/same_data.h"
#include "engine/checkpoint/same_model.h"
#include "engine/checkpoint/save_folder.h"
#include "engine/checkpoint/writer.h"
#include "engine/executor.h"
#include "engine/gather_results.h"
#include "engine/step_states.h"

namespace sherd::engine {

Checkpoints::Checkpoints(Engine& engine) : engine_(engine) {}
Checkpoints::~Checkpoints() = default;

void Checkpoints::set_training_data(const data::Loader& loader, std::shared_ptr<const TokenData> tokens) {
  data_position_ = loader.shared_position();
  tokens_ = std::move(tokens);
  if (engine_.dist_->rank() != 0 || !tokens_) return;
  if (tokens_->tokenizer.starts_with("spm:") && tokens_->tokenizer_model.empty())
    log_warning("the tokenizer model of '", tokens_->tokenizer,
                "' cannot be read, so checkpoints will lack it and `sherd generate` will not know it: put it "
                "back, or name it with data.tokenizer");
}

Manifest Checkpoints::describe(const ClientState& client) const {
  Manifest out;
  out.world_size = engine_.dist_->world_size();
  using comm::Axis;
  for (const Axis axis :
       {Axis::tensor, Axis::context, Axis::data, Axis::shard, Axis::replica, Axis::pipeline, Axis::expert})
    out.grid[std::string(comm::name_of(axis))] = engine_.groups().grid().size(axis);
  out.micro_steps = engine_.counters_.micro_steps;
  out.global_steps = engine_.counters_.global_steps;
  out.global_samples = engine_.counters_.global_samples;
  out.skipped_steps = engine_.counters_.skipped_steps;
  out.optimizer_steps = engine_.optimizer_->steps();
  const std::vector<std::optional<double>>& own_lr = engine_.optimizer_->own_lr();
  if (std::any_of(own_lr.begin(), own_lr.end(), [](const auto& lr) { return lr.has_value(); }))
    out.lr = own_lr;
  if (engine_.scheduler_) out.scheduler = engine_.scheduler_->save();
  if (engine_.scaler_) out.loss_scaler = engine_.scaler_->save();
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
  save_folder_ = std::make_unique<SaveFolder>(path);
}

void Checkpoints::claim(const std::string& directory) {
  gather_results(*engine_.dist_, "checkpoint folder", [&] {
    if (engine_.dist_->rank() == 0) take_folder(directory);
    return true;
  });
}

namespace {

/// The folder that rank 0 made, which a rank on another machine may lack.
void require_shared(const std::filesystem::path& partial) {
  std::error_code error;
  if (std::filesystem::is_directory(partial, error)) return;
  fail(ErrorKind::io, "rank 0 made the folder '", partial.string(), "', and this rank does not see it",
       error ? ": " + error.message() : "",
       ". Save in a folder (training.save_dir) that all machines share, under the same path");
}

}  // namespace

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

/// Makes the partial folder of a new act of saving, whose id all ranks return, where all ranks can save.
std::string Checkpoints::begin_save(const std::filesystem::path& base, const std::string& tag) {
  std::filesystem::path partial;  // of rank 0, once it is there
  std::exception_ptr failed = end_failed_pass();
  if (!failed) failed = end_late_update();
  try {
    const auto drawn = gather_results(*engine_.dist_, cat("checkpoint ", tag, " begun"), [&] {
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
      require_good_tag(tag);
      std::array<char, 16> id{};
      if (engine_.dist_->rank() != 0) return id;
      require_replaceable(base / tag);
      take_folder(base);
      const std::string text = new_save_id();
      std::copy(text.begin(), text.end(), id.begin());
      std::error_code error;
      const auto folder = partial_folder(base, tag, text);
      if (!std::filesystem::create_directory(folder, error))
        fail(ErrorKind::io, "cannot create '", folder.string(), "': ", error.message());
      partial = folder;
      return id;
    });
    return {drawn[0].begin(), drawn[0].end()};
  } catch (...) {
    if (!partial.empty()) remove_folder(partial);
    throw;
  }
}

void Checkpoints::save(const std::string& directory, const std::string& tag, const ClientState& client) {
  require(!directory.empty(), "a checkpoint needs a folder");
  const std::filesystem::path base = std::filesystem::absolute(directory);
  const int rank = engine_.dist_->rank();
  const std::string save_id = begin_save(base, tag);
  const std::filesystem::path partial = partial_folder(base, tag, save_id), mine = partial / rank_file(rank);
  try {
    const auto sums = gather_results(*engine_.dist_, "checkpoint checksums", [&] {
      require_shared(partial);
      write_rank_file(mine, engine_.sharded(), engine_.device(), save_id, engine_.optimizer_->norms().save());
      return checksum_file(mine);
    });
    gather_results(*engine_.dist_, "checkpoint published", [&] {
      if (rank != 0) return true;
      Manifest manifest = describe(client);
      manifest.save_id = save_id;
      for (int r = 0; r < engine_.dist_->world_size(); ++r)
        manifest.files[rank_file(r)] = sums[static_cast<std::size_t>(r)];
      write_tokenizer(partial, tokens_.get(), manifest);
      write_file_atomically(partial / "manifest.json", manifest.to_json());
      save_folder_->publish(partial, tag);
      return true;
    });
  } catch (...) {
    if (rank == 0) remove_folder(partial);
    throw;
  }
}

namespace {

/// Where the data's own tokenizer model is gone, the checkpoint's copy is what later checkpoints hold.
void keep_tokenizer(const CheckpointReader& reader, std::shared_ptr<const TokenData>& tokens) {
  if (!tokens || !tokens->tokenizer_model.empty() || !reader.manifest().files.contains(tokenizer_file))
    return;
  reader.verify(tokenizer_file);
  auto with_copy = std::make_shared<TokenData>(*tokens);
  with_copy->tokenizer_model = data::read_model_file((reader.folder() / tokenizer_file).string());
  tokens = std::move(with_copy);
}

/// The patterns of each parameter group; none of group 0.
std::vector<std::vector<std::string>> patterns_of(const config::Optimizer& optimizer) {
  std::vector<std::vector<std::string>> out(1);
  for (const config::OptimizerGroup& group : optimizer.groups) out.push_back(group.match);
  return out;
}

/// Of the run that saved. A configuration of an older program, or none, tells of group 0 alone.
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
  engine_.counters_ = {manifest.micro_steps, manifest.global_steps, manifest.global_samples,
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
  if (engine_.scaler_ && !manifest.loss_scaler.empty()) engine_.scaler_->restore(manifest.loss_scaler);
}

void Checkpoints::restore_data(const CheckpointReader& reader) {
  const DataRecord& data = reader.manifest().data;
  const std::optional<std::int64_t>& position = data.position;
  if (data_position_ && position) data_position_->set(*position, data.epoch_samples);
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

/// What work queued before may still find wrong, with its data or in what it writes, is of the past.
void Checkpoints::forget_errors() {
  try {
    engine_.device().synchronize();
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::data) throw;
  }
  engine_.optimizer_->finite();
}

/// The checkpoint, looked at by all ranks: each verifies its share of the files.
CheckpointReader Checkpoints::open(const std::string& directory, const std::string& tag) {
  std::optional<CheckpointReader> reader;
  const auto read = gather_results(*engine_.dist_, "checkpoint opened", [&] {
    reader.emplace(checkpoint_folder(directory, tag));
    if (tokens_) require_same_tokenizer(*reader, *tokens_);
    require_same_model(*reader, shapes_of(engine_.model_->parameters()), &engine_.config_);
    require_states(*reader, engine_.sharded(), Kinds::all);
    require_step_states(*engine_.model_, reader->manifest().step_states);
    reader->verify_share(engine_.dist_->rank(), engine_.dist_->world_size());
    return stable_hash(reader->manifest().to_json());
  });
  const auto other =
      std::find_if(read.begin(), read.end(), [&](std::uint64_t hash) { return hash != read[0]; });
  if (other != read.end())
    fail(ErrorKind::data, "rank ", other - read.begin(), " reads another checkpoint in '", directory,
         "' than rank 0: all must see the same folder, in which no run saves meanwhile");
  return std::move(*reader);
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
  end_late_update();
  gather_results(*engine_.dist_, "weights checked", [&] {
    source.check(engine_.model_->parameters());
    require_step_states(*engine_.model_, source.step_states());
    if (failed) std::rethrow_exception(failed);
    drop_step();
    return true;
  });
  engine_.update_->poison("loading weights has ended half-way");
  gather_results(*engine_.dist_, "weights read", [&] {
    read_weights(source, engine_.sharded(), engine_.device());
    return true;
  });
  publish_all(engine_.sharded());
  engine_.update_->restored();
  restore_step_states(*engine_.model_, source.step_states());
}

ClientState Checkpoints::load(const std::string& directory, const std::string& tag) {
  const std::exception_ptr failed = end_failed_pass();
  end_late_update();  // a checkpoint that cannot be loaded leaves whole weights; another replaces lost ones
  // What can be wrong with the checkpoint is found before anything of the engine changes.
  const CheckpointReader reader = open(directory, tag);
  gather_results(*engine_.dist_, "checkpoint verified", [&] {
    if (failed) std::rethrow_exception(failed);
    drop_step();
    return true;
  });
  engine_.update_->poison(cat("loading ", reader.folder().string(), " has ended half-way"));
  gather_results(*engine_.dist_, "checkpoint read", [&] {
    read_states(reader, engine_.sharded(), Kinds::all, engine_.device());
    engine_.optimizer_->norms().restore(reader.learned());
    keep_tokenizer(reader, tokens_);
    return true;
  });
  publish_all(engine_.sharded());
  restore_counters(reader);
  for (const std::string& line : restore_step_states(*engine_.model_, reader.manifest().step_states))
    if (engine_.dist_->rank() == 0) log_warning("resuming ", reader.folder().string(), ": ", line);
  restore_data(reader);
  return reader.manifest().client;
}

}  // namespace sherd::engine
