#pragma once

#include <cstdint>

namespace sherd::bench {

/// The fp32 streams of an optimizer step, and 16-bit ones.
struct OptimizerStreams {
  float *p, *m, *v, *g;
  std::uint16_t *p16, *g16;
};

/// Bytes per element that move_streams() reads and writes.
inline constexpr int streamed_bytes = 30;

/// The streaming limit of a fused step: over [begin, end), a multiple of 64 elements from a multiple of 64,
/// reads p, m, v, g and writes p, m, v and (past the caches) p16 with software prefetch and next to no
/// arithmetic. The widest vectors of the processor are chosen at run time.
void move_streams(const OptimizerStreams& s, std::int64_t begin, std::int64_t end);

}  // namespace sherd::bench
