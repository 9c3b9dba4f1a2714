#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "data/tokenizer.h"

namespace sherd::cli {

/// The text that tokens add to a prompt: bytes of a character that is still incomplete wait for the next
/// token, and the text ends before the first of some strings, wherever tokens cut it.
class GrowingText {
 public:
  /// `tokenizer` must outlive it. Empty strings of `stops` are not looked for. `drop` is taken off the front
  /// of the continuation where it begins with that.
  GrowingText(const data::Tokenizer& tokenizer, const std::vector<std::int32_t>& prompt,
              std::vector<std::string> stops, std::string drop = "");

  /// False where a stop string has come: the text is complete.
  bool add(std::int32_t id);
  /// The continuation so far, less what stops it.
  const std::string& text() const { return text_; }
  bool stopped() const { return stopped_; }
  /// The text that has come since the last call, but for an end that may turn out to begin a stop string;
  /// `all`: with it, as no more tokens come.
  std::string_view take(bool all = false);

 private:
  std::size_t held() const;
  void drop();
  void look_for_stops(std::size_t from);

  const data::Tokenizer& tokenizer_;
  std::vector<std::int32_t> window_;  ///< the last ids: how a token reads may depend on those before it
  std::size_t settled_ = 0;           ///< bytes of the window's text that are known
  std::vector<std::string> stops_;
  std::string drop_;  ///< the part of it that may still come
  std::string text_;
  std::size_t taken_ = 0;
  bool stopped_ = false;
};

}  // namespace sherd::cli
