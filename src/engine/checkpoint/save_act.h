#pragma once

#include <filesystem>
#include <memory>
#include <span>
#include <string>

#include "engine/checkpoint/manifest.h"
#include "engine/checkpoint/save_folder.h"
#include "engine/checkpoint/writer.h"
#include "engine/engine.h"

namespace sherd::engine {

/// One act of saving, on one rank, until its checkpoint is whole. Self-contained: the engine may go on.
struct SaveAct {
  int rank = 0, ranks = 1;
  std::string tag, save_id;
  std::filesystem::path partial;  ///< partial_folder()
  RankFile file;                  ///< of this rank
  SaveOptions options;

  // ---- of rank 0 ----
  std::shared_ptr<const SaveFolder> folder;
  Manifest manifest;  ///< but for the files
  std::shared_ptr<const TokenData> tokens;
  std::shared_ptr<const ExtraFiles> files;  ///< beside them; null: none

  std::filesystem::path rank_path() const { return partial / rank_file(rank); }
  /// On rank 0, when all ranks' files lie in `partial`, with these checksums: completes the checkpoint, and
  /// removes old ones as `options` say. Throws Error{io}.
  void publish(std::span<const FileChecksum> sums);
};

}  // namespace sherd::engine
