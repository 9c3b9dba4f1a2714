#include "base/error.h"

#include <algorithm>
#include <cctype>
#include <limits>
#include <numeric>
#include <vector>

namespace sherd {
namespace {

constexpr std::size_t far = std::numeric_limits<std::size_t>::max();

bool same(char a, char b) {
  return std::tolower(static_cast<unsigned char>(a)) == std::tolower(static_cast<unsigned char>(b));
}

std::size_t slips(std::string_view a, std::string_view b) {
  std::vector<std::size_t> before(b.size() + 1), last(before), row(before);  // of a's letters i-2, i-1 and i
  std::iota(last.begin(), last.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({last[j - 1] + !same(a[i - 1], b[j - 1]), last[j] + 1, row[j - 1] + 1});
      if (i > 1 && j > 1 && same(a[i - 1], b[j - 2]) && same(a[i - 2], b[j - 1]))
        row[j] = std::min(row[j], before[j - 2] + 1);
    }
    before.swap(last);
    last.swap(row);
  }
  return last.back();
}

std::vector<std::string_view> words_of(std::string_view text) {
  std::vector<std::string_view> words;
  for (;;) {
    const auto end = text.find_first_of("_.");
    words.push_back(text.substr(0, end));
    if (end == text.npos) return words;
    text.remove_prefix(end + 1);
  }
}

/// Whether some word of the one stands for quite another in the other, as in eval_batch_size and
/// train_batch_size.
bool differ_by_a_word(std::string_view a, std::string_view b) {
  const auto of_a = words_of(a), of_b = words_of(b);
  if (of_a.size() != of_b.size() || of_a.size() == 1) return false;
  for (std::size_t i = 0; i < of_a.size(); ++i) {
    const std::size_t letters = std::max(of_a[i].size(), of_b[i].size());
    if (slips(of_a[i], of_b[i]) > std::max<std::size_t>(1, letters / 2)) return true;
  }
  return false;
}

}  // namespace

std::size_t edit_distance(std::string_view a, std::string_view b) {
  constexpr std::size_t longest = 1000;  // of what people type: the time grows with the square
  if (std::equal(a.begin(), a.end(), b.begin(), b.end(), same)) return 0;
  const std::size_t letters = std::max(a.size(), b.size()),
                    most = letters < 2 ? 0 : std::max<std::size_t>(1, letters / 3);
  if (letters > longest || letters - std::min(a.size(), b.size()) > most) return far;
  const std::size_t distance = slips(a, b);
  return distance > most || differ_by_a_word(a, b) ? far : distance;
}

void Problems::attempt(const std::function<void()>& check) {
  try {
    check();
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::config) throw;
    add(error.what());
  }
}

void Problems::for_each(const std::function<void(std::string&)>& change) {
  for (std::string& message : messages_) change(message);
}

void Problems::raise() const {
  if (messages_.empty()) return;
  if (size() == 1) fail(ErrorKind::config, messages_.front());
  std::string all;
  for (std::size_t i = 0; i < std::min(most, size()); ++i) all += "\n" + messages_[i];
  if (size() > most) all += cat("\nand ", size() - most, " more");
  fail(ErrorKind::config, "the configuration has ", size(), " problems:", all);
}

}  // namespace sherd
