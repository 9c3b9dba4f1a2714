#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/atomic_file.h"
#include "engine/checkpoint_data.h"
#include "engine/checksum.h"
#include "engine/engine.h"
#include "engine/safetensors.h"

namespace sherd::engine {

// A checkpoint is a folder:
//
//   DIR/latest                      the tag to resume from; moved last
//   DIR/TAG/manifest.json           counters, schedule, caller's strings, configuration, size and CRC-32C of
//                                   each file; at its end the CRC-32C of all before
//   DIR/TAG/rank_RRRRR.safetensors  what rank R owns of every tensor
//   DIR/TAG/tokenizer.model         the SentencePiece model of the training data, where it has one
//   DIR/.sherd.lock                 while a run saves there (engine/save_folder.h)
//
// One act of saving writes its own random "save" into the manifest and the metadata of all files, so that
// files of different ones are not taken for one checkpoint.
//
// Tensors carry parameter names and offsets, never offsets within units: "fp32.NAME" holds elements
// [b, b + n) of the master weights of parameter NAME, and the metadata entry of that tensor's name is b;
// likewise each of the optimizer's moments ("exp_avg.NAME", …) and "frozen.NAME" for parameters that do not
// train. So a reader can put any range of any parameter together, whatever the sharding was.

/// Everything of a checkpoint but its tensors.
struct Manifest {
  int world_size = 0;
  std::int64_t micro_steps = 0, global_steps = 0, global_samples = 0, skipped_steps = 0;
  std::int64_t optimizer_steps = 0;
  std::string save_id;                 ///< of the act of saving; empty in checkpoints of format 1
  std::optional<double> lr;            ///< a rate set by the caller; else the configuration of the resumed run decides
  std::string scheduler, loss_scaler;  ///< states as their owners wrote them; empty: none
  std::string compute_dtype;
  std::string config;                  ///< config::dump of the run
  ClientState client;
  DataRecord data;
  std::map<std::string, std::vector<std::int64_t>> shapes;  ///< of every parameter, by name
  std::map<std::string, FileChecksum> files;

  /// In the newest format, with its checksum. Throws Error{usage} where a string is not UTF-8.
  std::string to_json() const;
  /// Reads this format and the one before, which had no checksum. Throws Error{data} naming `path` where the
  /// text is not as it was written, or holds a value that no run can have.
  static Manifest from_json(const std::string& text, const std::filesystem::path& path);
};

/// Name in the folder of a checkpoint: "rank_00007.safetensors".
std::string rank_file(int rank);

/// Key in the metadata of a rank's file of the act of saving.
inline constexpr const char* save_id_key = "sherd.save";

/// The folder that DIR/latest, or `tag`, names. Throws Error{io} when there is none, Error{data} when
/// DIR/latest holds no name.
std::filesystem::path checkpoint_folder(const std::filesystem::path& directory, const std::string& tag = "");

/// Reads ranges of parameters out of a checkpoint's files, however they were cut.
class CheckpointReader {
 public:
  /// Reads and checks the manifest and opens all files, which must be of one act of saving. Throws
  /// Error{data} or Error{io} naming the file.
  explicit CheckpointReader(std::filesystem::path folder);

  const Manifest& manifest() const { return manifest_; }
  const std::filesystem::path& folder() const { return folder_; }
  /// Compares one file's bytes with the manifest's checksum. Throws Error{data}.
  void verify(const std::string& file) const;
  /// Throws Error{data} unless elements [begin, end) of KIND.PARAMETER are there, in `dtype`.
  void require_state(const std::string& kind, const std::string& parameter, std::int64_t begin, std::int64_t end,
                     DType dtype) const;
  /// Elements [begin, begin + to.numel()) of KIND.PARAMETER into `to`. Throws Error{data} when any of them is missing or
  /// the dtype differs.
  void read(const std::string& kind, const std::string& parameter, std::int64_t begin, const tensor::Tensor& to) const;

 private:
  struct Part {
    std::size_t file;
    std::int64_t begin, count;
  };
  void add(SafetensorsFile file);
  template <class Visit>
  void for_each_part(const std::string& name, std::int64_t begin, std::int64_t end, const Visit& visit) const;
  Manifest manifest_;
  std::filesystem::path folder_;
  std::vector<SafetensorsFile> files_;
  std::map<std::string, std::vector<Part>> parts_;  ///< by "KIND.PARAMETER"
};

/// Reads the weights alone into a model sharded in any way, over any number of ranks. Throws Error{data} where names or
/// shapes differ. Collective over the model's group.
void load_weights(const CheckpointReader& reader, sharding::ShardedModel& model, tensor::Kernels& kernels);

/// The engine's half of saving and loading.
class CheckpointAccess {
 public:
  static void claim(Engine& engine, const std::string& directory);
  static void save(Engine& engine, const std::string& directory, const std::string& tag, const ClientState& client);
  static ClientState load(Engine& engine, const std::string& directory, const std::string& tag);

 private:
  static Manifest describe(const Engine& engine, const ClientState& client);
  static std::string begin_save(Engine& engine, const std::filesystem::path& base, const std::string& tag);
  static void take_folder(Engine& engine, const std::string& directory);
  static CheckpointReader open(Engine& engine, const std::string& directory, const std::string& tag);
  static void forget_findings(Engine& engine);
  static void restore_counters(Engine& engine, const Manifest& manifest);
  static void restore_data(Engine& engine, const CheckpointReader& reader);
};

}  // namespace sherd::engine
