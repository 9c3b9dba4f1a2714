#include "data/hugging_face/segmentation/byte_trie.h"

#include <algorithm>

namespace sherd::data {

ByteTrie::ByteTrie(std::vector<std::pair<std::string_view, std::int32_t>> texts) {
  std::stable_sort(texts.begin(), texts.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  struct Below {
    std::size_t begin, end, depth;  // the texts below a node, which have its first bytes in common
  };
  std::vector<Below> below{{0, texts.size(), 0}};
  labels_.push_back(0);
  for (std::size_t node = 0; node < below.size(); ++node) {
    auto [begin, end, depth] = below[node];
    nodes_.push_back({static_cast<std::uint32_t>(below.size()), -1});
    if (begin < end && texts[begin].first.size() == depth) nodes_.back().number = texts[begin].second;
    while (begin < end && texts[begin].first.size() == depth) ++begin;
    while (begin < end) {
      const char label = texts[begin].first[depth];
      std::size_t last = begin;
      while (last < end && texts[last].first[depth] == label) ++last;
      if (node == 0) of_root_[static_cast<unsigned char>(label)] = static_cast<std::uint32_t>(below.size());
      labels_.push_back(label);
      below.push_back({begin, last, depth + 1});
      begin = last;
    }
  }
  nodes_.push_back({static_cast<std::uint32_t>(below.size()), -1});
}

}  // namespace sherd::data
