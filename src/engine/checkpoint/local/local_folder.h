#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "engine/checkpoint/manifest.h"

namespace sherd::comm {
class Topology;
}

namespace sherd::engine {

/// The name, in a folder of checkpoints, of the file that holds the run's id: sixteen hexadecimal digits. Its
/// local checkpoints bear it, so that another run in the same folder does not take them for its own.
inline constexpr const char* run_id_file = ".sherd.run";

/// How the names of folders begin in which runs of `save_dir` keep local checkpoints: "sherd-HASH-".
std::string local_folder_prefix(const std::filesystem::path& save_dir);

/// A whole local checkpoint on this machine: its manifest and, beside it, some of its files.
struct LocalCheckpoint {
  std::filesystem::path path;
  Manifest manifest;
};

/// A machine's folder of a run's local checkpoints, DIRECTORY/sherd-HASH-RUNID (of the path of the run's own
/// folder, and of its id). Ranks that see the same one share a machine, as far as losing it goes.
class LocalFolder {
 public:
  /// Makes the folder, for its owner alone, and removes what other runs of the same `save_dir` left there.
  /// `anew`: the run begins, and gets another id. Throws Error{io} on all ranks where one cannot. Collective.
  LocalFolder(comm::Communicator& world, const std::filesystem::path& directory,
              const std::filesystem::path& save_dir, bool anew);

  const std::filesystem::path& path() const { return path_; }
  const comm::Topology& machines() const { return *machines_; }
  /// Whether this rank makes and removes what its machine's ranks share.
  bool leads() const;
  /// The rank on the next machine that keeps the copy of what `rank` saves.
  int keeper_of(int rank) const;

  /// The checkpoints in it that are whole, in no order; one that cannot be read is a warning.
  std::vector<LocalCheckpoint> checkpoints() const;
  /// The folder in which an act of saving makes its checkpoint, and the one where that is to be. The latter
  /// bears the act's id, so that no checkpoint has to make room for another of the same step.
  std::filesystem::path partial(const std::string& tag, const std::string& save_id) const;
  std::filesystem::path place(const std::string& tag, const std::string& save_id) const;
  /// Removes all but `keep`, on the leader.
  void remove_others(const std::filesystem::path& keep) const;
  /// Removes the folder, on the leader.
  void remove() const;

 private:
  std::filesystem::path path_;
  std::shared_ptr<const comm::Topology> machines_;
};

}  // namespace sherd::engine
