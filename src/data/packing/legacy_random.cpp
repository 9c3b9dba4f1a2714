#include "data/packing/legacy_random.h"

#include <bit>
#include <limits>

namespace sherd::data {

std::uint64_t LegacyRandom::interval(std::uint64_t max) {
  if (max == 0) return 0;
  const std::uint64_t mask = std::numeric_limits<std::uint64_t>::max() >> std::countl_zero(max);
  std::uint64_t value;
  do {
    value = next_32();
    if (max > 0xffffffffu) value = value << 32 | next_32();
    value &= mask;
  } while (value > max);
  return value;
}

IndexList::IndexList(std::int64_t base, std::int64_t count, std::int64_t times) {
  const auto fill = [&](auto& items) {
    items.reserve(static_cast<std::size_t>(count * times));
    for (std::int64_t t = 0; t < times; ++t)
      for (std::int64_t i = 0; i < count; ++i)
        items.push_back(static_cast<typename std::decay_t<decltype(items)>::value_type>(base + i));
  };
  if (base + count <= std::int64_t{1} << 32)
    fill(narrow_);
  else
    fill(wide_);
}

void IndexList::shuffle(LegacyRandom& random, std::int64_t begin, std::int64_t end) {
  const auto first = static_cast<std::size_t>(begin), count = static_cast<std::size_t>(end - begin);
  if (!narrow_.empty())
    random.shuffle(std::span(narrow_).subspan(first, count));
  else
    random.shuffle(std::span(wide_).subspan(first, count));
}

}  // namespace sherd::data
