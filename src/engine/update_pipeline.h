#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/optimizer.h"
#include "offload/buffer_pool.h"
#include "sharding/sharded_model.h"

namespace sherd::engine {

/// A stretch of a segment's update range that is updated at once: flat elements [begin, end).
struct UpdateChunk {
  sharding::Segment* segment;
  std::int64_t begin, end;
  bool stored;  ///< some of its states live on NVMe and pass through a buffer
  bool last;    ///< of its segment
};

/// The update ranges of `segments` in order; those with states on NVMe in as few equal chunks of at most `most_elements`
/// as can be, rounded to whole pages of every dtype.
std::vector<UpdateChunk> cut_update(const std::vector<sharding::Segment*>& segments, std::int64_t most_elements);

/// What the executor does, one after the other. Reads and writes only start; an update waits for its reads, and a read for
/// the writes that still need its buffer.
struct UpdateInstruction {
  enum class Op : std::uint8_t { read, update, write, wait_written } op;
  std::size_t chunk;
  int buffer;  ///< -1: all states are in memory
  bool operator==(const UpdateInstruction&) const = default;
};

/// The offload pipeline of one step (Rajbhandari et al. 2021, ZeRO-Infinity, §5.2.2) as data: while chunk i is updated, the
/// next ones are being read (`pipeline_read`) and earlier ones written (`pipeline_write`), as far as `buffers` go. Pure.
std::vector<UpdateInstruction> plan_update(std::span<const UpdateChunk> chunks, int buffers, bool pipeline_read,
                                           bool pipeline_write);

/// How the pipeline is dimensioned; the names are those of `zero_optimization` and its `offload_optimizer`.
struct UpdatePipelineOptions {
  std::int64_t sub_group_size = 1'000'000'000;  ///< elements of a chunk at most
  int buffer_count = 4;
  bool pipeline_read = true, pipeline_write = true;
};

/// Updates all trainable segments of a model, wherever their states live. The result does not depend on any option. One per
/// rank, used from its thread.
class UpdatePipeline {
 public:
  /// Takes its buffers, if any state lives on NVMe: host memory, as many bytes as buffer_bytes() says.
  UpdatePipeline(sharding::ShardedModel& model, const sharding::StateSources& sources,
                 const UpdatePipelineOptions& options);

  /// One optimizer step; publishes each segment when its last chunk is done, and returns when everything is written.
  /// Throws Error{numerics} when an updated weight is NaN or infinite, and the store's errors. Collective where parameters
  /// are replicated.
  void run(Optimizer& optimizer, double factor);

  const std::vector<UpdateInstruction>& plan() const { return plan_; }
  /// That one chunk takes while it is in memory; 0 when everything always is.
  std::size_t buffer_bytes() const { return buffer_bytes_; }

 private:
  struct Stage;
  /// Buffers for what passes through one store, one for each chunk under way: only its own pools' memory travels without
  /// a copy.
  struct Lane {
    offload::Store* store = nullptr;
    std::unique_ptr<offload::BufferPool> pool;
    std::vector<offload::Buffer> buffers;
  };
  void add_lane(offload::Store* store, int count);
  UpdateView bind(const UpdateChunk& chunk, int buffer) const;
  void update(const UpdateChunk& chunk, const UpdateView& view, Optimizer& optimizer, double factor);

  sharding::ShardedModel& model_;
  tensor::Kernels& kernels_;
  std::vector<UpdateChunk> chunks_;
  std::vector<UpdateInstruction> plan_;
  std::size_t buffer_bytes_ = 0;
  std::vector<Lane> lanes_;
};

}  // namespace sherd::engine
