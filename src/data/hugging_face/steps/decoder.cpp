#include "data/hugging_face/steps/steps.h"

#include <charconv>
#include <numeric>

#include "base/text/utf8.h"
#include "data/hugging_face/steps/unicode.h"

namespace sherd::data {
namespace {

/// A token with a character that stands for no byte is text.
std::string bytes_of(const std::string& token) {
  std::string out;
  for (std::string_view rest = token; !rest.empty(); rest.remove_prefix(utf8_length(rest))) {
    if (utf8_length(rest) == 0) return token;
    const int byte = byte_written(first_character(rest));
    if (byte < 0) return token;
    out.push_back(static_cast<char>(byte));
  }
  return out;
}

std::string fallback_bytes(const std::string& token) {
  if (token.size() != 6 || !token.starts_with("<0x") || !token.ends_with('>')) return token;
  unsigned value = 0;
  const auto [end, error] = std::from_chars(token.data() + 3, token.data() + 5, value, 16);
  if (error != std::errc() || end != token.data() + 5) return token;
  return std::string(1, static_cast<char>(value));
}

std::string replaced(const DecoderStep& step, const std::string& bytes, MatchSpace& space) {
  std::string out, storage;
  std::size_t done = 0;
  const std::string_view token = valid_utf8(bytes, storage);  // behind byte_fallback it may be none
  step.pattern->for_each(token, space, [&](std::size_t begin, std::size_t end) {
    out.append(token.substr(done, begin - done)).append(step.content);
    done = end;
  });
  return out.append(token.substr(done));
}

std::string stripped(const DecoderStep& step, std::string_view token) {
  for (std::size_t i = 0; i < step.start && token.starts_with(step.content); ++i)
    token.remove_prefix(step.content.size());
  for (std::size_t i = 0; i < step.stop && token.ends_with(step.content); ++i)
    token.remove_suffix(step.content.size());
  return std::string(token);
}

std::string without_marks(const DecoderStep& step, const std::string& token, bool first) {
  std::string out;
  std::size_t done = 0;
  for (std::size_t at; (at = token.find(step.content, done)) != std::string::npos;
       done = at + step.content.size()) {
    out.append(token, done, at - done);
    if (!first || !step.prefix) out += ' ';
  }
  return out.append(token, done);
}

/// A token behind others, or the first one. (transformers' clean_up_tokenization.)
std::string word_part(const DecoderStep& step, std::string token, bool first) {
  if (!first && token.starts_with(step.content))
    token.erase(0, step.content.size());
  else if (!first)
    token.insert(0, 1, ' ');
  if (!step.cleanup) return token;
  for (const auto& [from, to] : {std::pair<std::string_view, std::string_view>{" .", "."},
                                 {" ?", "?"},
                                 {" !", "!"},
                                 {" ,", ","},
                                 {" ' ", "'"},
                                 {" n't", "n't"},
                                 {" 'm", "'m"},
                                 {" do not", " don't"},
                                 {" 's", "'s"},
                                 {" 've", "'ve"},
                                 {" 're", "'re"}})
    for (std::size_t at = 0; (at = token.find(from, at)) != std::string::npos; at += to.size())
      token.replace(at, from.size(), to);
  return token;
}

std::string joined(const std::vector<std::string>& tokens) {
  return std::accumulate(tokens.begin(), tokens.end(), std::string());
}

}  // namespace

std::string Decoder::decode(std::vector<std::string> tokens) const {
  MatchSpace space;
  for (const DecoderStep& step : steps_) {
    if (step.kind == DecoderKind::fuse) {
      tokens = {joined(tokens)};
      continue;
    }
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      std::string& token = tokens[i];
      if (step.kind == DecoderKind::byte_level) token = bytes_of(token);
      if (step.kind == DecoderKind::byte_fallback) token = fallback_bytes(token);
      if (step.kind == DecoderKind::replace) token = replaced(step, token, space);
      if (step.kind == DecoderKind::strip) token = stripped(step, token);
      if (step.kind == DecoderKind::word_piece) token = word_part(step, std::move(token), i == 0);
      if (step.kind == DecoderKind::metaspace) token = without_marks(step, token, i == 0);
    }
  }
  return joined(tokens);
}

}  // namespace sherd::data
