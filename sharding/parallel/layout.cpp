#include "sharding/parallel/layout.h"

#include <numeric>

#include "base/error.h"

namespace sherd::parallel {

using tensor::Positions;
using tensor::Range;
using tensor::Slice;

namespace {

/// Rows [first, first + rows) of those that lie at `all`.
Positions part_of(const Positions& all, std::int64_t first, std::int64_t rows) {
  if (first + rows <= all.count || first >= all.count) return {.first = all.at(first)};
  return {.first = all.at(first), .count = all.count - first, .second = all.second};
}

[[noreturn]] void does_not_divide(const std::string& what, const std::vector<std::int64_t>& blocks,
                                  int ranks) {
  std::int64_t common = 0;
  std::string sizes, would_do;
  for (const std::int64_t block : blocks) {
    common = std::gcd(common, block);
    sizes += cat(sizes.empty() ? "" : " + ", block);
  }
  for (std::int64_t divisor = 1; divisor <= std::min<std::int64_t>(common, 64); ++divisor)
    if (common % divisor == 0) would_do += cat(would_do.empty() ? "" : ", ", divisor);
  fail(ErrorKind::config, what, " cannot be cut over ", ranks, " tensor-parallel ranks: ", sizes,
       blocks.size() == 1 ? " is no multiple of " : " are not all multiples of ", ranks,
       "; take parallel.tensor of ", would_do, ", or sizes that ", ranks, " divides");
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

namespace {

/// Elements of [batch, all, width] in the rows that a rank has, and in some of the columns.
Slice slice_of_rows(const tensor::Shape& local, const Positions& at, std::int64_t all, Range columns,
                    std::int64_t width) {
  require(local.rank() == 3, "the stream is [batch, seq, width], not ", local.str());
  const std::int64_t rows = local[1];
  std::vector<Range> tokens;
  if (at.count == 0)
    tokens = {{at.first, at.first + rows}};
  else
    tokens = {{at.first, at.first + at.count}, {at.second, at.second + rows - at.count}};
  return {{local[0], all, width}, {{{0, local[0]}}, std::move(tokens), {columns}}};
}

}  // namespace

Slice Layout::stream_slice(const tensor::Shape& local) const {
  require(local.rank() == 3, "the stream is [batch, seq, width], not ", local.str());
  return slice_of_rows(local, stream_positions(local[1]),
                       local[1] * context_size() * (cuts_stream() ? tensor_size() : 1), {0, local[2]},
                       local[2]);
}

Slice Layout::inner_slice(const tensor::Shape& local) const {
  require(local.rank() == 3, "the inner part is [batch, seq, width], not ", local.str());
  const std::int64_t columns = local[2], first = tensor_rank() * columns;
  return slice_of_rows(local, inner_positions(local[1]), local[1] * context_size(), {first, first + columns},
                       columns * tensor_size());
}

Slice tensor_slice(const std::string& what, const tensor::Shape& logical, int dim, const Layout& layout,
                   std::vector<std::int64_t> blocks) {
  const int ranks = layout.tensor_size();
  if (blocks.empty()) blocks = {logical[dim]};
  require(std::accumulate(blocks.begin(), blocks.end(), std::int64_t{0}) == logical[dim], what,
          ": its blocks do not add up to ", logical[dim]);
  Slice::Blocks held;
  for (const std::int64_t extent : logical.dims()) held.push_back({{0, extent}});
  auto& cut = held[static_cast<std::size_t>(dim)];
  cut.clear();
  std::int64_t begin = 0;
  for (const std::int64_t block : blocks) {
    if (block % ranks != 0) does_not_divide(what, blocks, ranks);
    const std::int64_t part = block / ranks, first = begin + layout.tensor_rank() * part;
    cut.push_back({first, first + part});
    begin += block;
  }
  return {logical, std::move(held)};
}

void set_slice(const autograd::ParameterPtr& parameter, Slice slice) {
  if (!slice.is_whole()) parameter->slice = std::move(slice);
}

}  // namespace sherd::parallel
