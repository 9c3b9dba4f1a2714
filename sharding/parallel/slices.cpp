#include "sharding/parallel/slices.h"

#include <numeric>

#include "base/error.h"

namespace sherd::parallel {

using tensor::Range;
using tensor::Slice;

namespace {

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

}  // namespace sherd::parallel
