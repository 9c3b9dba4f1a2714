#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "base/arena.h"
#include "engine/checkpoint/writer.h"

namespace sherd::engine {

/// Writes a rank's file on a thread of its own, of low priority, and on rank 0 completes the checkpoint when
/// all ranks' files are there. The ranks' threads exchange nothing: a rank leaves the checksum of its file
/// beside it, where rank 0 finds it. So a save can end well when training cannot go on.
///
/// Used from the rank's thread.
class BackgroundSave {
 public:
  enum class Progress : std::uint8_t {
    writing,
    written,  ///< this rank's file is, of a local checkpoint with its copies
    whole     ///< on rank 0: DIR/latest names the checkpoint
  };

  /// `timeout_seconds`: deadline of every wait, from the last part on that was written.
  BackgroundSave(SaveAct act, double timeout_seconds);
  /// Lets a save that is under way end: writes this rank's file; rank 0 waits for the others' files about as
  /// long as its own took. A checkpoint that is not whole then is removed, with a warning.
  ~BackgroundSave();
  BackgroundSave(const BackgroundSave&) = delete;
  BackgroundSave& operator=(const BackgroundSave&) = delete;

  Progress progress() const;
  /// The error that it failed with; null: none so far.
  std::exception_ptr error() const;
  /// Waits until it is so far or has failed. That the deadline passes is a failure.
  void wait_for(Progress progress);
  /// Ends it soon, unless it has ended or is becoming whole; returns when the thread writes no more, or at
  /// the deadline.
  void cancel();
  /// Whether its thread touches nothing any more.
  bool ended() const;
  /// On the rank that owns the folder: removes what is there of a checkpoint that is not whole.
  void remove_partial() const;

 private:
  /// The state that the thread and its owner share. The thread keeps it where it outlives the owner.
  struct Shared;
  static void run(const std::shared_ptr<Shared>& state);
  static void write(Shared& state);
  static std::vector<FileChecksum> gather_sums(Shared& state, FileChecksum own);
  bool wait_until_ended();

  std::shared_ptr<Shared> shared_;
  double timeout_seconds_;
  std::thread thread_;
};

/// A rank's states that training changes, as they are at one moment, for a thread that writes it while
/// training goes on: a copy in the host tier; of states on NVMe only the promise that updates do not
/// overwrite what has not been read (offload::DeferredRead). The memory is kept from one snapshot to the
/// next, as an allocator would keep it anyway. Made and taken on the rank's thread.
class Snapshots {
 public:
  /// Both must outlive it, and what it takes.
  Snapshots(const sharding::ShardedModel& model, device::Device& device) : model_(model), device_(device) {}

  /// Bytes of the host tier that a snapshot takes.
  std::size_t bytes() const;
  /// Takes that memory, unless it is there. Throws Error{memory} at the ledger's limit, or where the system
  /// has no more.
  void reserve();
  /// Copies. The tensors' elements are to be read once, by one thread, before the next take(); what they
  /// still hold of NVMe goes with them. Throws the store's errors.
  std::vector<FileTensor> take();

 private:
  const sharding::ShardedModel& model_;
  device::Device& device_;
  device::Storage memory_;        ///< for the copies, and behind them for what the other thread reads
  std::shared_ptr<Arena> arena_;  ///< the other thread's
};

}  // namespace sherd::engine
