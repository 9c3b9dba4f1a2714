#include "sharding/parallel/layout.h"

#include <numeric>

#include "base/error.h"

namespace sherd::parallel {

using tensor::Positions;
using tensor::Range;

namespace {

/// Rows [first, first + rows) of those that lie at `all`.
Positions part_of(const Positions& all, std::int64_t first, std::int64_t rows) {
  if (first + rows <= all.count || first >= all.count) return {.first = all.at(first)};
  return {.first = all.at(first), .count = all.count - first, .second = all.second};
}

}  // namespace

std::int64_t Layout::sequence_multiple() const {
  const int chunks = context_size() > 1 && context_method == ContextMethod::ring ? 2 : 1;
  return context_size() * std::lcm<std::int64_t>(chunks, cuts_stream() ? tensor_size() : 1);
}

Positions Layout::inner_positions(std::int64_t rows, int rank) const {
  const int ranks = context_size();
  if (ranks == 1) return {};
  if (context_method == ContextMethod::ulysses) return {.first = rank * rows};
  require(rows % 2 == 0, "a context-parallel rank has two chunks of each sequence, which ", rows,
          " tokens are not: make the sequence a multiple of ", sequence_multiple(), " tokens");
  const std::int64_t chunk = rows / 2;
  return {.first = ring_chunk(rank, ranks, 0) * chunk,
          .count = chunk,
          .second = ring_chunk(rank, ranks, 1) * chunk};
}

Positions Layout::stream_positions(std::int64_t rows) const {
  if (!cuts_stream()) return inner_positions(rows);
  return part_of(inner_positions(rows * tensor_size()), tensor_rank() * rows, rows);
}

tensor::Slice Layout::stream_slice(const tensor::Shape& local) const {
  require(local.rank() == 3, "the stream is [batch, seq, width], not ", local.str());
  const std::int64_t rows = local[1];
  const Positions at = stream_positions(rows);
  const std::int64_t all = rows * context_size() * (cuts_stream() ? tensor_size() : 1);
  std::vector<Range> tokens;
  if (at.count == 0)
    tokens = {{at.first, at.first + rows}};
  else
    tokens = {{at.first, at.first + at.count}, {at.second, at.second + rows - at.count}};
  return {{local[0], all, local[2]}, {{{0, local[0]}}, std::move(tokens), {{0, local[2]}}}};
}

}  // namespace sherd::parallel
