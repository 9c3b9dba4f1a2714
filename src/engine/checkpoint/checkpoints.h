#pragma once

#include <exception>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/frozen/frozen_files.h"
#include "engine/engine.h"

namespace sherd::data {
class LoaderPosition;
}

namespace sherd::engine {

class BackgroundSave;
class LocalCheckpoints;
struct Comparison;
class SaveFolder;
class Snapshots;
struct SaveAct;

/// Saves and loads what an engine trains. One per engine, which must outlive it; as the engine's own methods.
class Checkpoints {
 public:
  explicit Checkpoints(Engine& engine);
  ~Checkpoints();

  void set_training_data(const data::Loader& loader, std::shared_ptr<const TokenData> tokens);
  /// The samples that the training loader has given since the last call, a step's over all ranks; where it is
  /// not known, or has moved by hand, train_batch_size.
  std::int64_t samples_of_step();
  void set_files(ExtraFiles files) { files_ = std::make_shared<const ExtraFiles>(std::move(files)); }
  /// Lets checkpoints refer to `base` for parameters that do not train; on all ranks alike.
  void set_base(BaseReference base) { base_ = std::move(base); }
  void claim(const std::string& directory);
  void save(const std::string& directory, const SaveOptions& options);
  ClientState load(const std::string& directory, const std::string& tag);
  void claim_local(const std::string& directory, const std::string& local_directory, bool anew);
  bool save_local(const SaveOptions& options);
  std::optional<LoadedCheckpoint> load_newest(const std::string& directory);
  NewestLocal newest_local() const;
  void remove_local();
  void load_weights(nn::WeightSource& source);
  Comparison compare(const CheckpointReader& reader, const CheckpointReader* before);

  // ---- a save in the background ----
  /// Whether a checkpoint in the run's folder is being saved; local ones go unnoticed.
  bool under_way() const { return saving_ != nullptr && !saving_locally_; }
  /// Tells all ranks how far it is; throws on all of them where it has failed on one. Collective.
  void poll();
  /// Waits until it is whole. Collective.
  void finish();

 private:
  Manifest describe(const ClientState& client) const;
  std::exception_ptr end_failed_pass();
  std::exception_ptr end_late_update();
  SaveAct new_act(const SaveOptions& options) const;
  void begin_save(SaveAct& act, std::exception_ptr failed, const std::function<void()>& prepare_folder);
  void prepare(SaveAct& act);
  bool take_snapshot(SaveAct& act);
  void save_now(SaveAct act);
  void begin_local(SaveAct act);
  void try_locally(const std::function<void()>& part);
  bool agree(const char* label);
  void give_up_local(const std::string& reason);
  void abort();
  void take_folder(const std::string& directory);
  std::exception_ptr end_what_is_under_way();
  struct OpenedCheckpoint;
  OpenedCheckpoint open(const std::filesystem::path& folder, bool verify);
  std::optional<ClientState> load_from(const std::filesystem::path& folder, bool local,
                                       std::exception_ptr failed);
  FrozenFiles& frozen_of(const SaveAct& act);
  void drop_step();
  void forget_errors();
  void restore_counters(const CheckpointReader& reader);
  void restore_data(const CheckpointReader& reader);

  Engine& engine_;
  std::shared_ptr<SaveFolder> save_folder_;  ///< on rank 0, from the first save or claim on
  FrozenFiles frozen_;
  std::optional<BaseReference> base_;        ///< what they hold in place of frozen_'s files
  std::unique_ptr<LocalCheckpoints> local_;  ///< null: there are none
  bool saving_locally_ = false;              ///< what is under way is a local checkpoint
  std::filesystem::path place_;              ///< where the checkpoint is to be that is being written
  std::unique_ptr<Snapshots> snapshots_;     ///< from the first save in the background on
  std::unique_ptr<BackgroundSave> saving_;   ///< null: none is under way
  bool said_too_large_ = false;              ///< that a snapshot does not fit
  /// The training loader's; null: the engine knows of none.
  std::shared_ptr<data::LoaderPosition> data_position_;
  std::int64_t counted_position_ = 0;        ///< to which samples_of_step() has counted
  std::shared_ptr<const TokenData> tokens_;  ///< null: none, or samples of another kind
  std::shared_ptr<const ExtraFiles> files_;  ///< null: none
};

}  // namespace sherd::engine
