#include "sharding/schedule/schedules.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "base/error.h"

namespace sherd::sharding {
namespace {

/// How many chunks it takes where none may weigh more than `bound`, which no part does.
std::size_t chunks_within(const std::vector<std::int64_t>& weights, std::int64_t bound) {
  std::size_t chunks = 1;
  std::int64_t sum = 0;
  for (const std::int64_t weight : weights) {
    if (sum + weight > bound) ++chunks, sum = 0;
    sum += weight;
  }
  return chunks;
}

/// The least that the largest chunk can weigh. (Fewer chunks than asked for can be cut further.)
std::int64_t least_bound(const std::vector<std::int64_t>& weights, std::size_t chunks) {
  std::int64_t low = *std::max_element(weights.begin(), weights.end()),
               high = std::accumulate(weights.begin(), weights.end(), std::int64_t{0});
  while (low < high) {
    const std::int64_t middle = low + (high - low) / 2;
    if (chunks_within(weights, middle) <= chunks)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

/// The best cut of the parts from one on into a number of chunks.
struct Rest {
  double squares = std::numeric_limits<double>::infinity();  ///< the least sum of the chunks' squared sums
  std::size_t end = 0;                                       ///< where its first chunk ends
};

}  // namespace

std::vector<Chunk> cut(const std::vector<std::int64_t>& weights, std::size_t chunks) {
  const std::size_t parts = weights.size();
  require(chunks >= 1 && chunks <= parts, parts, " parts cannot be cut into ", chunks, " chunks");
  require(*std::min_element(weights.begin(), weights.end()) >= 0, "no part weighs less than nothing");
  const std::int64_t bound = least_bound(weights, chunks);
  // best[k][i]: of parts [i, parts) in k chunks.
  std::vector<std::vector<Rest>> best(chunks + 1, std::vector<Rest>(parts + 1));
  best[0][parts].squares = 0;
  for (std::size_t k = 1; k <= chunks; ++k)
    for (std::size_t i = 0; i + k <= parts; ++i) {
      std::int64_t sum = 0;
      for (std::size_t end = i + 1; end + k - 1 <= parts && (sum += weights[end - 1]) <= bound; ++end) {
        const double squares = static_cast<double>(sum) * static_cast<double>(sum) + best[k - 1][end].squares;
        if (squares < best[k][i].squares) best[k][i] = {squares, end};
      }
    }
  std::vector<Chunk> out;
  for (std::size_t k = chunks, begin = 0; k > 0; begin = out.back().end, --k)
    out.push_back({begin, best[k][begin].end});
  return out;
}

}  // namespace sherd::sharding
