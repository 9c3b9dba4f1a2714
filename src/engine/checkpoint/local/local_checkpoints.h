#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "engine/checkpoint/frozen/frozen_files.h"
#include "engine/checkpoint/local/local_folder.h"
#include "engine/checkpoint/local/peer_copies.h"
#include "engine/distributed.h"
#include "engine/step/step_report.h"

namespace sherd::engine {

/// Local checkpoints: each machine keeps the files of its own ranks in a folder of its own, in memory
/// (/dev/shm) or on its drive, and copies of those of the machine before it in a ring. So a run that has lost
/// its processes, or a machine, goes on from the last one without a shared file system; what of its files a
/// machine lacks comes from those that have them. Two lie there at a time only while one is being made: the
/// older goes when all machines have the newer. (As in GEMINI, Wang et al., SOSP 2023, section 4, and
/// NVIDIA's local checkpoints with replication.)
///
/// One per engine; used on the rank's thread. All but frozen() and newest() is collective.
class LocalCheckpoints {
 public:
  /// `dist`, `model` and `device` must outlive it. `anew`: the run begins, and does not go on from
  /// checkpoints that it finds.
  LocalCheckpoints(const Distributed& dist, const sharding::ShardedModel& model, device::Device& device,
                   const std::filesystem::path& directory, const std::filesystem::path& save_dir, bool anew);

  FrozenFiles& frozen() { return frozen_; }

  // ---- saving ----
  /// Makes the folder act.partial, puts frozen files there, and sets act.write, which writes the act.
  void begin(SaveAct& act);
  /// Completes, on all machines, the checkpoint that all ranks have written, and removes the older one.
  /// Throws on all ranks what one of them met.
  void publish();
  /// After a failure, when no rank writes any more: removes the files of the checkpoint that failed. The next
  /// one begins with a group of ranks of its own.
  void forget_failed();
  /// Removes all local checkpoints, when the run needs them no more.
  void remove();
  /// The newest local checkpoint: one that this run published, or the one that it went on from.
  const NewestLocal& newest() const { return newest_; }

  // ---- going on ----
  /// The newest of which each file is whole on some machine, if it is newer than `other`; else nothing. The
  /// folder that is returned can be read for the heads of all files.
  std::optional<std::filesystem::path> open_newest(const Manifest* other);
  /// Takes the files `needed` by this rank that its machine lacks from other machines. False on all ranks,
  /// with a warning, where that fails on one, as a machine has no room: then it is not open any more.
  bool fetch(const CheckpointReader& reader, const std::set<std::string>& needed);
  /// After reading: removes the heads of files that are not here, and keeps the rest as a local checkpoint.
  std::filesystem::path settle();

 private:
  /// An act of saving, which its thread keeps alive.
  struct Saving {
    std::shared_ptr<PeerCopies> copies;
    PeerCopies::Copying copying;
    std::filesystem::path partial, place;
    std::chrono::steady_clock::time_point begun = std::chrono::steady_clock::now();
    std::vector<FileChecksum> sums;  ///< of all ranks' files, once they are written
    SaveAct act;                     ///< what publish() needs of it, then; without the states
  };
  /// The checkpoint from which the run goes on.
  struct Opened {
    std::filesystem::path path;
    Manifest manifest;
    std::vector<std::string> names;         ///< of its files
    std::vector<std::vector<int>> holders;  ///< by file: a rank on each machine that has it whole
    std::set<std::size_t> fetched;          ///< files that this machine lacked and has now
    bool partial = false;                   ///< this machine had nothing of it
    bool here(std::size_t file, const comm::Topology& machines) const;
  };
  Manifest manifest_before() const;
  void link_frozen(const SaveAct& act, PeerCopies::Copying& copying) const;
  std::vector<std::vector<int>> find_holders(const Opened& opened) const;
  bool find_files(Opened& opened, int root, const std::vector<LocalCheckpoint>& here);
  void make_readable(Opened& opened) const;
  void pass_over(const Opened& opened, const std::string& reason) const;
  void fetch_files(const CheckpointReader& reader, const std::set<std::string>& needed);
  void keep(const std::filesystem::path& place, const Manifest& manifest, double seconds);

  const Distributed& dist_;
  device::Device& device_;
  std::filesystem::path save_dir_;  ///< of the run's checkpoints
  FrozenFiles frozen_;
  LocalFolder folder_;
  std::shared_ptr<PeerCopies> copies_;  ///< null: to be made
  std::shared_ptr<Saving> saving_;
  std::filesystem::path newest_path_;  ///< as published or settled by this run; empty: none yet
  NewestLocal newest_;                 ///< the same one
  std::optional<Opened> opened_;
};

}  // namespace sherd::engine
