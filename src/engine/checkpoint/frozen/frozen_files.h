#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "device/device.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/distributed.h"
#include "sharding/sharded_model.h"

namespace sherd::engine {

/// The ranks' files of parameters that do not train. They are written once: each checkpoint after the first
/// has hard links to the files of the one before. One per engine; used on the rank's thread.
///
/// A link is as good as a copy because
/// - what it would hold has not changed. Whether a parameter trains is settled when the model is sharded, and
///   only loading sets the values of one that does not: forget();
/// - the file is the one that this rank wrote, or found whole in the checkpoint that it went on from: its
///   inode, size and time of change say so, looked at through the link itself. Files of checkpoints are never
///   written to under their names, only replaced.
class FrozenFiles {
 public:
  FrozenFiles(const Distributed& dist, const sharding::ShardedModel& model, device::Device& device)
      : dist_(dist), model_(model), device_(device) {}

  /// Puts the files in `partial`, the folder of the act of saving `save_id`, which all ranks see. Where a
  /// link is refused (another file system, one without links, too many of them) the file is written. Throws
  /// on all ranks what one of them met. Collective.
  void put(const std::filesystem::path& partial, const std::string& save_id);
  /// Adds what put() has put to the manifest of its checkpoint. On rank 0.
  void describe(Manifest& manifest) const;
  /// Looks for the file that this rank would write itself in a checkpoint from which its values come. False
  /// where it is not there, or holds other elements, as one of another layout.
  bool find_in(const CheckpointReader& reader);
  /// The files of put(), or those that find_in() found on all ranks, lie in `folder`, whole: the next put()
  /// links to them.
  void keep(const std::filesystem::path& folder);
  /// The checksums of the files that put() has put, by rank; no bytes: that rank has none.
  const std::vector<FileChecksum>& sums() const { return sums_; }
  /// Where *base is set, put() puts nothing, and manifests refer to it. It must outlive this.
  void refer_to(const std::optional<BaseReference>* base) { base_ = base; }
  /// Values may change: the next put() writes.
  void forget() { kept_ = {}; }

 private:
  /// The marks that tell a file from another, or from itself after a change.
  struct Identity {
    std::uint64_t device = 0, inode = 0, bytes = 0;
    std::int64_t changed_s = 0, changed_ns = 0;
    bool operator==(const Identity&) const = default;
  };
  /// The files of one checkpoint.
  struct Files {
    std::string id;              ///< in the metadata of all of them; empty: there are none yet
    std::filesystem::path path;  ///< this rank's file
    Identity identity;
    FileChecksum sum;  ///< no bytes: this rank holds none of such parameters
  };
  bool refers() const { return base_ && *base_; }
  static Identity identity_of(const std::filesystem::path& path);
  bool link(const std::filesystem::path& path);

  const Distributed& dist_;
  const sharding::ShardedModel& model_;
  device::Device& device_;
  Files kept_;                      ///< as keep() left them
  Files next_;                      ///< as put() or find_in() found them
  std::vector<FileChecksum> sums_;  ///< as put() found them, by rank
  bool said_ = false;               ///< that links are refused
  const std::optional<BaseReference>* base_ = nullptr;
};

}  // namespace sherd::engine
