#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

namespace sherd::data {

/// Texts with a number each, found where another text begins with them. Immutable.
class ByteTrie {
 public:
  ByteTrie() : ByteTrie(std::vector<std::pair<std::string_view, std::int32_t>>()) {}
  /// The first of equal texts counts; an empty one is never found. Numbers are not below 0.
  explicit ByteTrie(std::vector<std::pair<std::string_view, std::int32_t>> texts);

  bool empty() const { return labels_.size() == 1; }

  /// Calls on_found(bytes, number) for each text that is at the front of `text`, the shortest first.
  template <class F>
  void for_each_prefix(std::string_view text, const F& on_found) const {
    if (text.empty()) return;
    std::uint32_t node = of_root_[static_cast<unsigned char>(text[0])];
    for (std::size_t at = 1; node != 0; node = child(node, text[at++])) {
      if (nodes_[node].number >= 0) on_found(at, nodes_[node].number);
      if (at == text.size()) return;
    }
  }

 private:
  struct Node {
    std::uint32_t children;  // the first one's index; the next node's first one ends them
    std::int32_t number;
  };
  /// 0: none, as no node leads to the root.
  std::uint32_t child(std::uint32_t node, char byte) const {
    const std::uint32_t first = nodes_[node].children, count = nodes_[node + 1].children - first;
    if (count == 0) return 0;
    if (count == 1) return labels_[first] == byte ? first : 0;
    const char* labels = labels_.data() + first;
    const void* found = std::memchr(labels, static_cast<unsigned char>(byte), count);
    return found == nullptr ? 0
                            : first + static_cast<std::uint32_t>(static_cast<const char*>(found) - labels);
  }

  std::vector<Node> nodes_;   // breadth first, so that the children of one are neighbours
  std::vector<char> labels_;  // by node: the byte that leads to it
  std::array<std::uint32_t, 256> of_root_{};
};

}  // namespace sherd::data
