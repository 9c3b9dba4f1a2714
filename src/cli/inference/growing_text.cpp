#include "cli/inference/growing_text.h"

#include <algorithm>
#include <utility>

namespace sherd::cli {
namespace {

/// Ids that are decoded again with each new one; as many stay when the window has become twice as long.
constexpr std::size_t window_ids = 16;

/// The end of `text`, less a UTF-8 sequence that is cut off there, or the U+FFFD that a tokenizer gives for
/// one.
std::size_t complete_end(std::string_view text) {
  if (text.ends_with("\xef\xbf\xbd")) return text.size() - 3;
  const std::size_t end = text.size();
  std::size_t start = end;
  while (start > 0 && end - start < 3 && (static_cast<unsigned char>(text[start - 1]) & 0xc0) == 0x80)
    --start;
  if (start == 0) return end;
  const auto lead = static_cast<unsigned char>(text[start - 1]);
  const std::size_t length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : lead >= 0xc0 ? 2 : 1;
  return start - 1 + length > end ? start - 1 : end;
}

}  // namespace

GrowingText::GrowingText(const data::Tokenizer& tokenizer, const std::vector<std::int32_t>& prompt,
                         std::vector<std::string> stops, std::string drop)
    : tokenizer_(tokenizer), stops_(std::move(stops)), drop_(std::move(drop)) {
  const std::size_t ids = std::min(prompt.size(), window_ids);
  window_.assign(prompt.end() - static_cast<std::ptrdiff_t>(ids), prompt.end());
  settled_ = complete_end(tokenizer_.decode(window_));
  std::erase(stops_, std::string());
}

bool GrowingText::add(std::int32_t id) {
  window_.push_back(id);
  const std::string all = tokenizer_.decode(window_);
  // A character that never comes to its end must not hold back what follows: it shows once others follow it.
  const std::size_t end = complete_end(all), from = text_.size();
  if (end > settled_) {
    text_.append(all, settled_, end - settled_);
    drop();
    settled_ = end;
  }
  if (window_.size() >= 2 * window_ids && end == all.size()) {
    window_.erase(window_.begin(), window_.end() - static_cast<std::ptrdiff_t>(window_ids));
    settled_ = tokenizer_.decode(window_).size();
  }
  look_for_stops(from);
  return !stopped_;
}

/// A continuation that is shorter than what may go is not looked at yet.
void GrowingText::drop() {
  if (drop_.empty() || text_.size() < drop_.size()) return;
  if (text_.starts_with(drop_)) text_.erase(0, drop_.size());
  drop_.clear();
}

void GrowingText::look_for_stops(std::size_t from) {
  std::size_t first = std::string::npos;
  for (const std::string& stop : stops_)
    first = std::min(first, text_.find(stop, from - std::min(from, stop.size() - 1)));
  if (first == std::string::npos) return;
  text_.resize(first);
  stopped_ = true;
}

/// Bytes at the end that some stop string begins with.
std::size_t GrowingText::held() const {
  std::size_t most = 0;
  for (const std::string& stop : stops_)
    for (std::size_t n = std::min(stop.size() - 1, text_.size() - taken_); n > most; --n)
      if (std::string_view(text_).ends_with(std::string_view(stop).substr(0, n))) most = n;
  return most;
}

std::string_view GrowingText::take(bool all) {
  const std::size_t end = text_.size() - (all || stopped_ ? 0 : held()), begin = std::exchange(taken_, end);
  return std::string_view(text_).substr(begin, end - begin);
}

}  // namespace sherd::cli
