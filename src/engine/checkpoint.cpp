#include "engine/checkpoint.h"

#include <algorithm>
#include <array>
#include <functional>
#include <optional>

#include "base/counted.h"
#include "base/crc32c.h"
#include "base/log.h"
#include "data/tokenizer.h"
#include "engine/gather_results.h"
#include "engine/same_model.h"
#include "engine/save_folder.h"
#include "engine/update_pipeline.h"

namespace sherd::engine {
namespace {

using sharding::Piece;
using sharding::Segment;
using tensor::Tensor;

/// One state of a segment that a checkpoint holds: flat elements [begin, end), and how to read and set them from a flat
/// element on.
struct Kept {
  std::string kind;
  DType dtype;
  std::int64_t begin, end;
  std::function<void(std::int64_t, const Tensor&)> read, write;
};

Kept keep(std::string kind, sharding::StateBuffer& state) {
  return {std::move(kind), state.dtype(), state.begin(), state.end(),
          [&state](std::int64_t at, const Tensor& to) { state.read(at, to).wait(); },
          [&state](std::int64_t at, const Tensor& from) { state.write(at, from).wait(); }};
}

/// The weights first, then the optimizer's moments, of which `moment_names` may name fewer than there are.
std::vector<Kept> kept_states(Segment& segment, const std::vector<std::string>& moment_names) {
  if (!segment.key().trainable) return {keep("frozen", segment.parameters())};
  std::vector<Kept> out{{"fp32", DType::f32, segment.update_begin(), segment.update_end(),
                         [&segment](std::int64_t at, const Tensor& to) { segment.read_masters(at, to); },
                         [&segment](std::int64_t at, const Tensor& from) { segment.write_values(at, from); }}};
  for (std::size_t i = 0; i < moment_names.size(); ++i) out.push_back(keep(moment_names[i], segment.moments()[i]));
  return out;
}

/// What a rank writes, its own part, so that the ranks together write everything once, replicated or not; and
/// what it reads.
enum class Extent : std::uint8_t { written, read };

/// Calls visit(kept, parameter, piece) for the rank's part of the weights and of the moments called
/// `moment_names`.
template <class Visit>
void for_each_piece(const sharding::ShardedModel& model, const std::vector<std::string>& moment_names,
                    Extent extent, const Visit& visit) {
  for (const auto& unit : model.units())
    for (const auto& segment : unit->segments())
      for (const Kept& kept : kept_states(*segment, moment_names)) {
        const bool own = extent == Extent::written;
        for (const Piece& piece : segment->layout().pieces(own ? segment->own_begin() : kept.begin,
                                                           own ? segment->own_end() : kept.end))
          visit(kept, *segment->layout().parameters()[piece.slot], piece);
      }
}

/// Calls visit(done, elements) over `count` elements in pieces that memory hardly notices.
template <class Visit>
void in_chunks(device::Device& device, DType dtype, std::int64_t count, const Visit& visit) {
  constexpr std::int64_t most = std::int64_t{1} << 20;
  const Tensor chunk = Tensor::empty(device, {std::min(most, count)}, dtype, device::Category::workspace,
                                     device.processor_tier());
  for (std::int64_t done = 0; done < count; done += most) visit(done, chunk.range(0, std::min(most, count - done)));
}

void write_rank_file(const std::filesystem::path& path, const sharding::ShardedModel& model,
                     const Optimizer& optimizer, device::Device& device, const std::string& save_id) {
  std::vector<SafetensorsSpec> specs;
  std::map<std::string, std::string> offsets{{save_id_key, save_id}};
  const auto each = [&](const auto& visit) {
    for_each_piece(model, optimizer.moment_names(), Extent::written, visit);
  };
  each([&](const Kept& kept, const autograd::Parameter& parameter, const Piece& piece) {
    specs.push_back({kept.kind + "." + parameter.name, kept.dtype, {piece.count}});
    offsets[specs.back().name] = std::to_string(piece.parameter_begin);
  });
  SafetensorsWriter writer(path, std::move(specs), offsets);
  each([&](const Kept& kept, const autograd::Parameter& parameter, const Piece& piece) {
    in_chunks(device, kept.dtype, piece.count, [&](std::int64_t done, const Tensor& elements) {
      kept.read(piece.flat_begin + done, elements);
      writer.write(kept.kind + "." + parameter.name, done, elements);
    });
  });
  writer.finish();
}

/// Puts the tokenizer of the training data, if it is a file, among the checkpoint's.
void write_tokenizer(const std::filesystem::path& folder, const TokenData* tokens, Manifest& manifest) {
  if (!tokens || tokens->tokenizer_model.empty()) return;
  const std::string& bytes = tokens->tokenizer_model;
  write_file_atomically(folder / tokenizer_file, bytes);
  manifest.files[tokenizer_file] = {bytes.size(), crc32c(bytes.data(), bytes.size())};
}

}  // namespace

Manifest CheckpointAccess::describe(const Engine& engine, const ClientState& client) {
  Manifest out;
  out.world_size = engine.dist_->world_size();
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
  if (engine.data_position_) out.data.position = engine.data_position_->samples();
  for (const nn::ParameterPtr& parameter : engine.model_->parameters()) {
    const auto dims = parameter->shape.dims();
    out.shapes[parameter->name] = {dims.begin(), dims.end()};
  }
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

/// Makes the partial folder of a new act of saving, whose id all ranks return, where all ranks can save.
std::string CheckpointAccess::begin_save(Engine& engine, const std::filesystem::path& base,
                                         const std::string& tag) {
  std::filesystem::path partial;  // of rank 0, once it is there
  try {
    const auto drawn = gather_results(*engine.dist_, cat("checkpoint ", tag, " begun"), [&] {
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

void check_world(const CheckpointReader& reader, int world_size) {
  const int saved = reader.manifest().world_size;
  if (saved != world_size)
    fail(ErrorKind::config, "checkpoint ", reader.folder().string(), " was written by ",
         counted(saved, "rank"), " and cannot be resumed by ", world_size, ": start with --ranks ", saved,
         " (resuming at another world size is not in this build)");
}

/// Reads this rank's weights, from which the compute parameters follow, and moments. Calls no collective.
void read_states(const CheckpointReader& reader, const sharding::ShardedModel& model,
                 const std::vector<std::string>& moment_names, device::Device& device) {
  for_each_piece(model, moment_names, Extent::read,
                 [&](const Kept& kept, const autograd::Parameter& parameter, const Piece& piece) {
                   in_chunks(device, kept.dtype, piece.count, [&](std::int64_t done, const Tensor& elements) {
                     reader.read(kept.kind, parameter.name, piece.parameter_begin + done, elements);
                     kept.write(piece.flat_begin + done, elements);
                   });
                 });
}

/// Where the data's own tokenizer model is gone, the checkpoint's copy is what later checkpoints hold.
void keep_tokenizer(const CheckpointReader& reader, std::shared_ptr<const TokenData>& tokens) {
  if (!tokens || !tokens->tokenizer_model.empty() || !reader.manifest().files.contains(tokenizer_file))
    return;
  reader.verify(tokenizer_file);
  auto with_copy = std::make_shared<TokenData>(*tokens);
  with_copy->tokenizer_model = data::read_model_file((reader.folder() / tokenizer_file).string());
  tokens = std::move(with_copy);
}

/// Collective: all ranks have read theirs.
void publish_all(sharding::ShardedModel& model) {
  for (const auto& unit : model.units())
    for (const auto& segment : unit->segments()) model.publish(*segment);
  model.end_step();
}

}  // namespace

void load_weights(const CheckpointReader& reader, sharding::ShardedModel& model, tensor::Kernels& kernels) {
  require_same_model(reader, model.model(), nullptr);
  read_states(reader, model, {}, kernels.device());
  publish_all(model);
}

void CheckpointAccess::restore_counters(Engine& engine, const Manifest& manifest) {
  engine.counters_ = {manifest.micro_steps, manifest.global_steps, manifest.global_samples, manifest.skipped_steps};
  // Whatever was under way, after a NaN loss for example, is over.
  engine.tape_->clear();
  engine.phase_ = Engine::Phase::idle;
  engine.spoiled_.clear();
  engine.drop_accumulated();
  engine.optimizer_->set_steps(manifest.optimizer_steps);
  if (engine.scheduler_ && !manifest.scheduler.empty()) engine.scheduler_->restore(manifest.scheduler);
  else if (!engine.scheduler_) engine.optimizer_->set_scheduled_lr(engine.config_.optimizer.lr);
  if (manifest.lr) engine.optimizer_->set_lr(*manifest.lr);
  if (engine.scaler_ && !manifest.loss_scaler.empty()) engine.scaler_->restore(manifest.loss_scaler);
}

void CheckpointAccess::restore_data(Engine& engine, const CheckpointReader& reader) {
  const std::optional<std::int64_t>& position = reader.manifest().data.position;
  if (engine.data_position_ && position) engine.data_position_->set(*position);
  if (engine.dist_->rank() != 0) return;
  if (engine.data_position_ && !position)
    log_warning("checkpoint ", reader.folder().string(),
                " does not say where in the data it stopped: the loader stays at "
                "sample ",
                engine.data_position_->samples());
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

/// The checkpoint, looked at by all ranks: each verifies its own file, so that together they have verified
/// all.
CheckpointReader CheckpointAccess::open(Engine& engine, const std::string& directory,
                                        const std::string& tag) {
  std::optional<CheckpointReader> reader;
  const auto read = gather_results(*engine.dist_, "checkpoint opened", [&] {
    reader.emplace(checkpoint_folder(directory, tag));
    check_world(*reader, engine.dist_->world_size());
    if (engine.training_tokens_) require_same_tokenizer(*reader, *engine.training_tokens_);
    require_same_model(*reader, *engine.model_, &engine.config_);
    for_each_piece(engine.sharded(), engine.optimizer_->moment_names(), Extent::read,
                   [&](const Kept& kept, const autograd::Parameter& parameter, const Piece& piece) {
                     reader->require_state(kept.kind, parameter.name, piece.parameter_begin,
                                           piece.parameter_begin + piece.count, kept.dtype);
                   });
    reader->verify(rank_file(engine.dist_->rank()));
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
  // What can be wrong with the checkpoint is found before anything of the engine changes.
  const CheckpointReader reader = open(engine, directory, tag);
  gather_results(*engine.dist_, "checkpoint verified", [&] {
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
