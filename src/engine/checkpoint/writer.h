#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/checkpoint/format.h"
#include "engine/checkpoint/manifest.h"
#include "engine/checkpoint/save_folder.h"
#include "engine/checkpoint/states.h"
#include "engine/engine.h"
#include "sharding/sharded_model.h"

namespace sherd::engine {

/// One tensor of a rank's file, and where its elements come from.
struct FileTensor {
  /// Is given elements, the first of which has this place in the tensor.
  using Put = std::function<void(std::int64_t done, const tensor::Tensor& elements)>;

  std::string name;
  DType dtype = DType::f32;
  std::int64_t count = 0;  ///< in numbers of dtype: of blocks of 8 bits their bytes
  PieceRecord record;
  std::function<void(const Put& put)> elements;  ///< gives all of them, once each, in any cut
};

/// The content of one of a rank's files.
struct RankFile {
  std::vector<FileTensor> tensors;
  /// The optimizer's memory of whole parameters, by name (ParameterNorms::save()).
  std::map<std::string, std::string> learned;
};

/// Which of a rank's files is meant.
enum class FilePart : std::uint8_t {
  trained,  ///< rank_file()
  frozen    ///< frozen_file()
};

/// Calls visit(tensor, state, piece) for each tensor that this rank writes there, without its elements.
void for_each_tensor(
    const sharding::ShardedModel& model, FilePart part,
    const std::function<void(FileTensor, const SavedState& state, const sharding::Piece& piece)>& visit);

/// The model's states as they are when they are written.
std::vector<FileTensor> live_tensors(const sharding::ShardedModel& model, device::Device& device,
                                     FilePart part);

/// Writes the file of the act of saving `save_id`. `go_on` is called now and then, and may throw. Throws
/// Error{io}, and what reading the elements throws.
FileChecksum write_rank_file(const std::filesystem::path& path, const RankFile& file,
                             const std::string& save_id, const std::function<void()>& go_on = nullptr);

/// Puts files among the checkpoint's.
void write_files(const std::filesystem::path& folder, const ExtraFiles& files, Manifest& manifest);

/// Puts the tokenizer of the training data, if it is a file, among the checkpoint's. `tokens` may be null.
void write_tokenizer(const std::filesystem::path& folder, const TokenData* tokens, Manifest& manifest);

/// One act of saving, on one rank, until its checkpoint is whole. Self-contained: the engine may go on.
struct SaveAct {
  int rank = 0, ranks = 1;
  std::string tag, save_id;
  std::filesystem::path partial;  ///< partial_folder()
  RankFile file;                  ///< this rank's
  SaveOptions options;

  // ---- of rank 0 ----
  std::shared_ptr<const SaveFolder> folder;
  Manifest manifest;  ///< but for the files
  std::shared_ptr<const TokenData> tokens;
  std::shared_ptr<const ExtraFiles> files;  ///< beside them; null: none

  // ---- of a local checkpoint (local_checkpoints.h) ----
  /// Writes the rank's file in place of write_rank_file(), and brings it where it is to be; null: of a
  /// checkpoint of files that all ranks see.
  std::function<void(SaveAct& act, const std::function<void()>& go_on)> write;
  bool owns_partial = false;  ///< this rank removes `partial` after a failure; rank 0 of the other kind

  /// "checkpoint global_step3", or "local checkpoint global_step3".
  std::string name() const;
  std::filesystem::path rank_path() const { return partial / rank_file(rank); }
  /// On rank 0: completes the manifest by the checksums of all ranks' files and those that it puts beside
  /// them, and returns it as text.
  std::string complete(std::span<const FileChecksum> sums, std::int64_t ordinal);
  /// On rank 0, when all ranks' files lie in `partial`, with these checksums: completes the checkpoint, and
  /// removes old ones as `options` say. Throws Error{io}.
  void publish(std::span<const FileChecksum> sums);
};

}  // namespace sherd::engine
