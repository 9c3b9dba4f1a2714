#include "engine/checkpoint/access.h"

#include <algorithm>
#include <array>
#include <optional>

#include "base/atomic_file.h"
#include "base/counted.h"
#include "base/log.h"
#include "data/tokenizer.h"
#include "engine/checkpoint/checksum.h"
#include "engine/checkpoint/format.h"
#include "engine/checkpoint/load_states.h"
#include "engine/checkpoint/same_data.h"
#include "engine/checkpoint/same_model.h"
#include "engine/checkpoint/save_folder.h"
#include "engine/checkpoint/writer.h"
#include "engine/gather_results.h"
#include "engine/update_pipeline.h"

namespace sherd::engine {

Manifest CheckpointAccess::describe(const Engine& engine, const ClientState& client) {
  Manifest out;
  out.world_size = engine.dist_->world_size();
  for (const comm::Axis axis : {comm::Axis::data, comm::Axis::shard, comm::Axis::replica})
    out.grid[std::string(comm::name_of(axis))] = engine.groups().grid().size(axis);
  out.micro_steps = engine.counters_.micro_steps;
  out.global_steps = engine.counters_.global_steps;
  out.global_samples = engine.counters_.global_samples;
  out.skipped_steps = engine.counters_.skipped_steps;
  out.optimizer_steps = engine.optimizer_->steps();
  out.lr = engine.optimizer_->own_lr();
  if (engine.scheduler_) out.scheduler = engine.scheduler_->save();
  if (engine.scaler_) out.loss_scaler = engine.scaler_->save();
  out.compute_dtype = name_of(engine.config_.precision.compute);
  out.config = config::dump(engine.config_);
  out.client = client;
  if (engine.training_tokens_) out.data = DataRecord::of(*engine.training_tokens_);
  if (engine.data_position_) {
    out.data.position = engine.data_position_->samples();
    out.data.epoch_samples = engine.data_position_->epoch_samples();
  }
  out.shapes = shapes_of(*engine.model_);
  return out;
}

void CheckpointAccess::take_folder(Engine& engine, const std::string& directory) {
  const auto path = std::filesystem::absolute(directory);
  if (engine.save_folder_ && engine.save_folder_->path() == path && !engine.save_folder_->lost()) return;
  engine.save_folder_.reset();
  engine.save_folder_ = std::make_unique<SaveFolder>(path);
}

void CheckpointAccess::claim(Engine& engine, const std::string& directory) {
  gather_results(*engine.dist_, "checkpoint folder", [&] {
    if (engine.dist_->rank() == 0) take_folder(engine, directory);
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
std::exception_ptr CheckpointAccess::end_failed_pass(Engine& engine) {
  if (engine.phase_ != Engine::Phase::in_backward) return nullptr;
  try {
    engine.sharded().abandon_pass();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

/// Makes the partial folder of a new act of saving, whose id all ranks return, where all ranks can save.
std::string CheckpointAccess::begin_save(Engine& engine, const std::filesystem::path& base,
                                         const std::string& tag) {
  std::filesystem::path partial;  // of rank 0, once it is there
  const std::exception_ptr failed = end_failed_pass(engine);
  try {
    const auto drawn = gather_results(*engine.dist_, cat("checkpoint ", tag, " begun"), [&] {
      if (failed) std::rethrow_exception(failed);
      engine.require_finite_update();
      engine.require_whole_weights("save_checkpoint()");
      // A pass that failed is over; one under way would be missing from the checkpoint, and its batch from
      // the data.
      require(engine.phase_ == Engine::Phase::idle || engine.phase_ == Engine::Phase::in_backward,
              "save between micro-batches: forward() has been called, and step() has not");
      require(engine.accumulated_ == 0, "save at an accumulation boundary: ", engine.accumulated_,
              " micro-batches have gradients that no update took up yet");
      require_good_tag(tag);
      std::array<char, 16> id{};
      if (engine.dist_->rank() != 0) return id;
      require_replaceable(base / tag);
      take_folder(engine, base);
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

void CheckpointAccess::save(Engine& engine, const std::string& directory, const std::string& tag,
                            const ClientState& client) {
  require(!directory.empty(), "a checkpoint needs a folder");
  const std::filesystem::path base = std::filesystem::absolute(directory);
  const int rank = engine.dist_->rank();
  const std::string save_id = begin_save(engine, base, tag);
  const std::filesystem::path partial = partial_folder(base, tag, save_id), mine = partial / rank_file(rank);
  try {
    const auto sums = gather_results(*engine.dist_, "checkpoint checksums", [&] {
      require_shared(partial);
      write_rank_file(mine, engine.sharded(), *engine.optimizer_, *engine.device_, save_id);
      return checksum_file(mine);
    });
    gather_results(*engine.dist_, "checkpoint published", [&] {
      if (rank != 0) return true;
      Manifest manifest = describe(engine, client);
      manifest.save_id = save_id;
      for (int r = 0; r < engine.dist_->world_size(); ++r)
        manifest.files[rank_file(r)] = sums[static_cast<std::size_t>(r)];
      write_tokenizer(partial, engine.training_tokens_.get(), manifest);
      write_file_atomically(partial / "manifest.json", manifest.to_json());
      engine.save_folder_->publish(partial, tag);
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

}  // namespace

void CheckpointAccess::restore_counters(Engine& engine, const Manifest& manifest) {
  engine.counters_ = {manifest.micro_steps, manifest.global_steps, manifest.global_samples,
                      manifest.skipped_steps};
  // Whatever was under way, after a NaN loss for example, is over.
  engine.tape_->clear();
  engine.phase_ = Engine::Phase::idle;
  engine.spoiled_.clear();
  engine.drop_accumulated();
  engine.optimizer_->set_steps(manifest.optimizer_steps);
  if (engine.scheduler_ && !manifest.scheduler.empty())
    engine.scheduler_->restore(manifest.scheduler);
  else if (!engine.scheduler_)
    engine.optimizer_->set_scheduled_lr(engine.config_.optimizer.lr);
  if (manifest.lr) engine.optimizer_->set_lr(*manifest.lr);
  if (engine.scaler_ && !manifest.loss_scaler.empty()) engine.scaler_->restore(manifest.loss_scaler);
}

void CheckpointAccess::restore_data(Engine& engine, const CheckpointReader& reader) {
  const DataRecord& data = reader.manifest().data;
  const std::optional<std::int64_t>& position = data.position;
  if (engine.data_position_ && position) engine.data_position_->set(*position, data.epoch_samples);
  if (engine.dist_->rank() != 0) return;
  if (engine.data_position_ && !position)
    log_warning("checkpoint ", reader.folder().string(),
                " does not say where in the data it stopped: the loader stays at "
                "sample ",
                engine.data_position_->samples());
  if (const int saved = reader.manifest().world_size; saved != engine.dist_->world_size())
    log_info("resuming ", reader.folder().string(), ": ", counted(saved, "rank"),
             " wrote it, and it goes on with ", engine.dist_->world_size());
  const std::int64_t batch = engine.train_batch_size();
  if (engine.data_position_ && position && engine.data_position_->samples() % batch != 0)
    log_info("resuming ", reader.folder().string(), ": the data go on at sample ",
             engine.data_position_->samples(), ", which is no multiple of train_batch_size (", batch,
             "): steps begin at other samples than in a run with that size from the start");
  for (const std::string& change : changes_since(reader, engine.config_, engine.training_tokens_.get()))
    log_info("resuming ", reader.folder().string(), ": ", change);
}

/// What work queued before may still find wrong, with its data or in what it writes, is of the past.
void CheckpointAccess::forget_findings(Engine& engine) {
  try {
    engine.device().synchronize();
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::data) throw;
  }
  engine.optimizer_->finite();
}

/// The checkpoint, looked at by all ranks: each verifies its share of the files.
CheckpointReader CheckpointAccess::open(Engine& engine, const std::string& directory,
                                        const std::string& tag) {
  std::optional<CheckpointReader> reader;
  const auto read = gather_results(*engine.dist_, "checkpoint opened", [&] {
    reader.emplace(checkpoint_folder(directory, tag));
    if (engine.training_tokens_) require_same_tokenizer(*reader, *engine.training_tokens_);
    require_same_model(*reader, *engine.model_, &engine.config_);
    require_states(*reader, engine.sharded(), engine.optimizer_->moment_names());
    reader->verify_share(engine.dist_->rank(), engine.dist_->world_size());
    return stable_hash(reader->manifest().to_json());
  });
  const auto other =
      std::find_if(read.begin(), read.end(), [&](std::uint64_t hash) { return hash != read[0]; });
  if (other != read.end())
    fail(ErrorKind::data, "rank ", other - read.begin(), " reads another checkpoint in '", directory,
         "' than rank 0: all must see the same folder, in which no run saves meanwhile");
  return std::move(*reader);
}

ClientState CheckpointAccess::load(Engine& engine, const std::string& directory, const std::string& tag) {
  const std::exception_ptr failed = end_failed_pass(engine);
  // What can be wrong with the checkpoint is found before anything of the engine changes.
  const CheckpointReader reader = open(engine, directory, tag);
  gather_results(*engine.dist_, "checkpoint verified", [&] {
    if (failed) std::rethrow_exception(failed);
    engine.give_update_up();
    forget_findings(engine);
    engine.sharded()
        .abandon_pass();  // a pass that failed is no reason to refuse, but the caller's own leases are
    engine.phase_ = Engine::Phase::idle;
    engine.sharded().require_no_leases();
    return true;
  });
  engine.spoiled_ = cat("loading ", reader.folder().string(), " has ended half-way");
  gather_results(*engine.dist_, "checkpoint read", [&] {
    read_states(reader, engine.sharded(), engine.optimizer_->moment_names(), *engine.device_);
    keep_tokenizer(reader, engine.training_tokens_);
    return true;
  });
  publish_all(engine.sharded());
  restore_counters(engine, reader.manifest());
  restore_data(engine, reader);
  return reader.manifest().client;
}

}  // namespace sherd::engine
