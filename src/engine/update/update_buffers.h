#pragma once

#include <memory>
#include <span>
#include <vector>

#include "engine/update/rule_update.h"
#include "offload/store.h"
#include "sharding/sharded_model.h"

namespace sherd::engine {

/// Host memory through which chunks pass whose states lie on NVMe, and their reads and writes: one buffer for
/// each chunk under way, and in it room for each of its states. Used from the rank's thread.
class UpdateBuffers {
 public:
  /// Takes `count` buffers with room for any of `chunks`.
  UpdateBuffers(const sharding::StateSources& sources, std::span<const UpdateChunk> chunks, int count);
  UpdateBuffers(const UpdateBuffers&) = delete;
  UpdateBuffers& operator=(const UpdateBuffers&) = delete;

  /// The states of a chunk, of which those on NVMe are in the buffer; −1: none is there.
  UpdateView view(const UpdateChunk& chunk, int buffer) const;
  /// Begins to read what `rule` reads in this phase of the chunk.
  void read(const UpdateChunk& chunk, optim::Phase phase, const RuleUpdate& rule, int buffer);
  /// Begins to write what it has written. Reads that begin from here on see that.
  void write(const UpdateChunk& chunk, optim::Phase phase, const RuleUpdate& rule, int buffer);
  /// Whether all reads, or writes, of the buffer have ended; with `wait`, once they have. Throw what ended
  /// them.
  bool has_read(int buffer, bool wait) { return ended(use_of(buffer).reads, wait); }
  bool has_written(int buffer, bool wait) { return ended(use_of(buffer).writes, wait); }
  bool all_written(bool wait);
  /// Waits for all that is under way, at most the store's deadline.
  void drop() noexcept;

  /// Bytes that one chunk takes while it is in memory; 0 when everything always is.
  std::size_t bytes() const { return bytes_; }

 private:
  /// A chunk's transfers.
  struct Use {
    std::vector<offload::Io> reads, writes;
  };
  /// The parts of all buffers that travel through one store: only its own pages travel without a copy.
  struct Lane {
    offload::Store* store = nullptr;
    std::size_t bytes = 0;  ///< of a buffer
    offload::Pages buffers;
    std::shared_ptr<void> pin;  ///< page-locks them for a GPU that updates in them; goes before the buffers
  };
  void add_lane(offload::Store* store, std::span<const UpdateChunk> chunks, int count);
  static bool ended(std::vector<offload::Io>& ios, bool wait);
  Use& use_of(int buffer) { return uses_[static_cast<std::size_t>(buffer)]; }

  device::Device& device_;
  std::size_t bytes_ = 0;
  std::vector<Lane> lanes_;
  std::vector<Use> uses_;  ///< by buffer; go before the lanes' memory, as their destructors wait
};

}  // namespace sherd::engine
