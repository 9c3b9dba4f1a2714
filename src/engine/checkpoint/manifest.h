#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/crc32c.h"
#include "engine/engine.h"
#include "engine/token_data.h"

namespace sherd::engine {

using sherd::FileChecksum;

/// The copies of a SentencePiece model, and of a tokenizer.json, in a checkpoint's folder; one that is there
/// is among the manifest's files.
inline constexpr const char* tokenizer_file = "tokenizer.model";
inline constexpr const char* tokenizer_json_file = "tokenizer.json";
/// The name of the copy by the tokenizer's spec.
const char* tokenizer_file_of(const std::string& spec);

/// The data that a checkpoint's run read.
struct DataRecord {
  /// The training loader's position (LoaderPosition); none: the engine knew of no loader.
  std::optional<std::int64_t> position;
  std::int64_t epoch_samples = 0;  ///< as LoaderPosition::epoch_samples()
  std::string tokenizer;           ///< a spec of data::make_tokenizer(), its path that run's; empty: unknown
  std::int64_t vocab_size = 0;     ///< the token data's, as are all that follow; 0: unknown
  std::int64_t tokens = 0, sequences = 0;
  std::uint32_t fingerprint = 0;  ///< IndexedDataset::fingerprint()
  /// data::ChatTemplate::spec() of the template by which its conversations were written; empty: none were.
  std::string chat_template;

  static DataRecord of(const TokenData& tokens);
};

/// Files from which the parameters came that a run does not train, where its checkpoints do not hold these.
struct BaseReference {
  std::string folder;                         ///< absolute: Hugging Face's files, or a checkpoint
  std::map<std::string, FileChecksum> files;  ///< by name
  bool operator==(const BaseReference&) const = default;
};

/// Everything of a checkpoint but its tensors.
struct Manifest {
  int world_size = 0;  ///< number of ranks that saved, each of which wrote a file
  /// The sizes of the layout that they formed, by axis ("data", …).
  std::map<std::string, std::int64_t> grid;
  std::int64_t micro_steps = 0, global_steps = 0, global_samples = 0, skipped_steps = 0;
  std::int64_t optimizer_steps = 0;
  /// Which of the acts of saving in its folder, from 1; 0: of no run's.
  std::int64_t ordinal = 0;
  std::string save_id;    ///< names the act of saving
  std::string frozen_id;  ///< in frozen files, as save_id in the others; empty: there are none
  /// Rates set by the caller, by parameter group; else the configuration of the resumed run decides. Empty:
  /// none is.
  std::vector<std::optional<double>> lr;
  std::string scheduler, loss_scaler;  ///< states as their owners wrote them; empty: none
  std::string compute_dtype;
  std::string config;  ///< config::dump of the run
  ClientState client;
  DataRecord data;
  /// The values that modules have beside their parameters (nn::StepState), by path; at most 4096 values each.
  std::map<std::string, std::vector<float>> step_states;
  std::map<std::string, std::vector<std::int64_t>> shapes;  ///< logical, of every parameter, by name
  std::map<std::string, FileChecksum> files;
  std::optional<BaseReference> base;  ///< in place of frozen files

  /// Which of the files is the tokenizer's; empty: none.
  std::string tokenizer_copy() const;

  /// With its checksum. Throws Error{usage} where a string is not UTF-8.
  std::string to_json() const;
  /// Throws Error{data} naming `path` where the text is of another format, is not as it was written, or holds
  /// a value that no run can have.
  static Manifest from_json(const std::string& text, const std::filesystem::path& path);
};

}  // namespace sherd::engine
