#pragma once

#include <exception>
#include <filesystem>
#include <memory>
#include <string>

#include "engine/checkpoint.h"
#include "engine/engine.h"

namespace sherd::data {
class LoaderPosition;
}

namespace sherd::engine {

class SaveFolder;

/// What an engine saves and loads, and where. One per engine, which must outlive it; as the engine's own
/// methods.
class Checkpoints {
 public:
  explicit Checkpoints(Engine& engine);
  ~Checkpoints();

  void set_training_data(const data::Loader& loader, std::shared_ptr<const TokenData> tokens);
  void claim(const std::string& directory);
  void save(const std::string& directory, const std::string& tag, const ClientState& client);
  ClientState load(const std::string& directory, const std::string& tag);
  void load_weights(nn::WeightSource& source);

 private:
  Manifest describe(const ClientState& client) const;
  std::exception_ptr end_failed_pass();
  std::exception_ptr end_late_update();
  std::string begin_save(const std::filesystem::path& base, const std::string& tag);
  void take_folder(const std::string& directory);
  CheckpointReader open(const std::string& directory, const std::string& tag);
  void drop_step();
  void forget_errors();
  void restore_counters(const CheckpointReader& reader);
  void restore_data(const CheckpointReader& reader);

  Engine& engine_;
  std::unique_ptr<SaveFolder> save_folder_;  ///< on rank 0, from the first save or claim on
  std::shared_ptr<data::LoaderPosition>
      data_position_;                        ///< of the training loader; null: the engine knows of none
  std::shared_ptr<const TokenData> tokens_;  ///< null: none, or samples of another kind
};

}  // namespace sherd::engine
