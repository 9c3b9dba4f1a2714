#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "optim/description.h"
#include "sharding/segment.h"

namespace sherd::engine {

/// A stretch of a segment's update range that is updated at once: flat elements [begin, end).
struct UpdateChunk {
  sharding::Segment* segment;
  std::int64_t begin, end;
  bool stored;  ///< some of its states live on NVMe and pass through a buffer
  bool last;    ///< of its segment
  /// Of the rule that updates it, in order; lives with the rules.
  std::span<const optim::Phase> phases = elementwise_only;
  /// Segments whose matrices are exchanged together have a number, from 1 on; others, 0.
  int batch = 0;

  static constexpr optim::Phase elementwise_only[] = {optim::Phase::elementwise};
};

/// What is done to a segment in step number `step` by its rule, one of `rules` (SegmentKey::rule); lives with
/// these.
std::span<const optim::Phase> phases_of(const sharding::Segment& segment,
                                        std::span<const optim::Description> rules, std::int64_t step);

/// The update ranges of `segments`, which `rules` update in step number `step`, in order; those with states
/// on NVMe in as few equal chunks of at most `most_elements` as can be, rounded to whole pages of every
/// dtype. Neighbours with matrices form batches. No rules: each is one pass over the elements.
std::vector<UpdateChunk> cut_update(const std::vector<sharding::Segment*>& segments,
                                    std::int64_t most_elements,
                                    std::span<const optim::Description> rules = {}, std::int64_t step = 1);

/// What the executor does, one after the other. Reads and writes only start; an update waits for its reads,
/// and a read for the writes that still need its buffer. What stands for a whole segment names its last
/// chunk.
struct UpdateInstruction {
  enum class Op : std::uint8_t {
    read,
    measure,   ///< a pass over the elements that changes nothing
    compress,  ///< a pass over momentum that replicas are going to exchange
    refresh,   ///< a pass that takes momentum, refreshes a state and measures (Phase::refresh)
    direct,    ///< a pass that updates states, and makes directions (Phase::direction)
    update,    ///< one pass over the elements
    write,
    wait_written,
    norms,    ///< what has been measured is added up over all ranks; of no chunk
    whole,    ///< whole matrices of a batch, by all who share them; of its last chunk
    exchange  ///< between the replicas of the segment, of what was compressed
  } op;
  std::size_t chunk;
  int buffer;     ///< -1: all states are in memory
  int phase = 0;  ///< of the chunk's rule
  bool operator==(const UpdateInstruction&) const = default;
};

/// A pass over the elements of a chunk.
bool is_pass(UpdateInstruction::Op op);

/// The update of one step as data. The phases of each chunk's rule follow each other, with the last ones of
/// all chunks together, those before them, and so on. What is measured is added up once, before the last
/// ones: also where no chunk here is of such a rule, as other ranks may have some. Batches come behind all
/// else, each with all of its phases, so that directions of one alone are kept at a time. A pass over
/// elements is the offload pipeline (Rajbhandari et al. 2021, ZeRO-Infinity, §5.2.2): while chunk i is
/// updated, the next ones are being read
/// (`pipeline_read`) and earlier ones written
/// (`pipeline_write`), as far as `buffers` go. `rules`: of the whole model. Pure.
std::vector<UpdateInstruction> plan_update(std::span<const UpdateChunk> chunks, int buffers,
                                           bool pipeline_read, bool pipeline_write,
                                           std::span<const optim::Description> rules = {});

}  // namespace sherd::engine
