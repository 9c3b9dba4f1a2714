#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <string>

namespace sherd::testing {

/// How often a fuzz test mutates its input: SHERD_FUZZ_ROUNDS, or `brief` where it is not set, as in CI.
inline int fuzz_rounds(int brief) {
  const char* asked = std::getenv("SHERD_FUZZ_ROUNDS");
  return asked ? std::atoi(asked) : brief;
}

/// Damages a file's content as disks, editors and wrong programs do: bits, bytes, ranges, numbers, and the
/// end. The same seed gives the same damages in every run.
class Mutator {
 public:
  explicit Mutator(std::uint64_t seed) : random_(seed) {}

  /// `text` with one to four damages; it may by chance be `text` itself.
  std::string mutate(std::string text) {
    for (std::size_t left = 1 + pick(4); left > 0; --left) damage(text);
    return text;
  }
  /// A number below `bound`; 0 where that is 0.
  std::size_t pick(std::size_t bound) { return bound == 0 ? 0 : random_() % bound; }

 private:
  void damage(std::string& text) {
    const std::size_t at = pick(text.size()), length = std::min(text.size() - at, pick(32));
    switch (pick(9)) {
      case 0:
        if (!text.empty()) text[at] = static_cast<char>(text[at] ^ (1 << pick(8)));
        return;
      case 1:
        if (!text.empty()) text[at] = static_cast<char>(pick(256));
        return;
      case 2:
        text.erase(at, length);
        return;
      case 3:
        text.insert(at, text.substr(at, length));
        return;
      case 4:
        text.insert(at, 1 + pick(8), "{}[]\",:-0\0\xff"[pick(12)]);
        return;
      case 5:
        text.resize(at);
        return;
      case 6:
        std::reverse(text.begin() + static_cast<std::ptrdiff_t>(at),
                     text.begin() + static_cast<std::ptrdiff_t>(at + length));
        return;
      case 7:
        replace_number(text, at);
        return;
      default:  // eight bytes, as a binary header's integer
        for (std::size_t i = 0; i < std::min<std::size_t>(8, text.size() - at); ++i)
          text[at + i] = pick(2) ? '\xff' : static_cast<char>(pick(256));
    }
  }
  /// The first decimal number from `at` on becomes one at the edge of what a type can hold.
  void replace_number(std::string& text, std::size_t at) {
    static constexpr std::array<const char*, 9> edges = {
        "-1",    "0",   "2147483648", "9223372036854775807", "-9223372036854775808", "18446744073709551615",
        "1e400", "0.5", "1e18"};
    const std::size_t begin = text.find_first_of("0123456789", at);
    if (begin == std::string::npos) return;
    const std::size_t end = std::min(text.find_first_not_of("0123456789", begin), text.size());
    text.replace(begin, end - begin, edges[pick(edges.size())]);
  }

  std::mt19937_64 random_;
};

}  // namespace sherd::testing
