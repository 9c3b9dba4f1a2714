#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/update/update_chunk.h"

namespace sherd::engine {

/// Whether a phase is a pass over elements, chunk by chunk; else ranks exchange something of whole segments.
bool is_pass(optim::Phase phase);
/// Whether such a pass changes anything.
bool writes(optim::Phase phase);

/// One of the things that the pipeline does, one after the other. Reads and writes only start; a pass waits
/// for its reads, and a read for the writes that still need its buffer.
struct UpdateInstruction {
  enum class Op : std::uint8_t {
    read,
    pass,  ///< over the elements of the chunk, as the phase says
    write,
    wait_written,
    exchange,  ///< between ranks, as the phase says, of the segment or batch whose last chunk this is
    agree      ///< all ranks add up what they have measured; of no chunk
  } op;
  std::size_t chunk;
  int buffer;     ///< -1: all states are in memory
  int phase = 0;  ///< index into UpdateChunk::phases
  bool operator==(const UpdateInstruction&) const = default;
};

/// The update of one step as data. The phases of each chunk's rule follow each other, with the last ones of
/// all chunks together, those before them, and so on. What is measured is added up once, before the last
/// ones: also where no chunk here is of such a rule, as other ranks may have some. Batches come behind all
/// else, each with all of its phases, so that directions of one alone are kept at a time. A pass over
/// elements is the offload pipeline (Rajbhandari et al. 2021, ZeRO-Infinity, §5.2.2): while chunk i is
/// updated, the next ones are being read (`pipeline_read`) and earlier ones written (`pipeline_write`), as
/// far as `buffers` go. `rules`: of the whole model. Pure.
std::vector<UpdateInstruction> plan_update(std::span<const UpdateChunk> chunks, int buffers,
                                           bool pipeline_read, bool pipeline_write,
                                           std::span<const optim::Description> rules = {});

}  // namespace sherd::engine
