#include "data/packing/samples.h"

#include <algorithm>
#include <numeric>

#include "base/error.h"

namespace sherd::data {

void write_text(const VirtualTokens& prompt, std::span<const std::int32_t> ids,
                std::span<const std::uint8_t> targets, std::span<std::int32_t> tokens,
                std::span<std::int32_t> labels) {
  const auto count = static_cast<std::size_t>(prompt.count);
  require(!ids.empty() && targets.size() == ids.size() && tokens.size() == count + ids.size() - 1 &&
              labels.size() == tokens.size(),
          "a text of ", ids.size(), " tokens behind ", count, " virtual ones in ", tokens.size(), " places");
  std::iota(tokens.begin(), tokens.begin() + prompt.count, static_cast<std::int32_t>(prompt.first));
  std::copy(ids.begin(), ids.end() - 1, tokens.begin() + prompt.count);
  std::fill(labels.begin(), labels.end(), no_label);
  for (std::size_t i = count > 0 ? 0 : 1; i < ids.size(); ++i)
    if (targets[i] != 0) labels[count + i - 1] = ids[i];
}

}  // namespace sherd::data
