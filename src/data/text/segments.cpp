#include "data/text/segments.h"

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/text/excerpt.h"

namespace sherd::data {
namespace {

std::optional<std::int32_t> id_of(const Tokenizer& tokenizer, const TextSegment& segment) {
  switch (segment.kind) {
    case SegmentKind::control:
      return tokenizer.token_id(segment.text);
    case SegmentKind::end:
    case SegmentKind::apart:
      return tokenizer.end_of_document();
    case SegmentKind::text:
      break;
  }
  return std::nullopt;
}

/// Encodes texts of segments. Special tokens that a conversation spells out are text; a vocabulary may match
/// the template's own without calling them special, and those are kept from matching by a cut inside.
class TextEncoder {
 public:
  TextEncoder(const Tokenizer& tokenizer, std::span<const TextSegment> segments, SpelledTokens spelled)
      : tokenizer_(tokenizer), spelled_(spelled) {
    if (spelled == SpelledTokens::tokens) return;
    for (const TextSegment& segment : segments)
      if (segment.kind == SegmentKind::control) add_control(tokenizer.token_id(segment.text));
    add_control(tokenizer.begin_of_document());
    add_control(tokenizer.end_of_document());
  }

  void encode(std::string_view text, EncodeOptions::Behind behind, std::vector<std::int32_t>& ids) const {
    const std::size_t first = ids.size();
    const bool special = spelled_ == SpelledTokens::tokens;
    tokenizer_.encode(text, {behind, special}, ids);
    if (!has_control(ids, first)) return;
    ids.resize(first);
    for (std::size_t at = 0; at < text.size(); behind = EncodeOptions::Behind::text) {
      const std::size_t end = inside_control(text, at);
      tokenizer_.encode(text.substr(at, end - at), {behind, special}, ids);
      at = end;
    }
    if (has_control(ids, first))
      fail(ErrorKind::data, "a message's text becomes a token that ends a turn or a text, or begins one: '",
           excerpt(text), "'; take that out of the message");
  }

  /// How many of the first tokens, at least `least`, stand for `text` exactly; nothing: one crosses its end.
  std::optional<std::size_t> tokens_of(std::span<const std::int32_t> ids, std::string_view text,
                                       std::size_t least) const {
    std::size_t most = ids.size();
    while (least < most) {
      const std::size_t middle = least + (most - least) / 2;
      if (tokenizer_.decode(ids.first(middle)).size() < text.size())
        least = middle + 1;
      else
        most = middle;
    }
    if (tokenizer_.decode(ids.first(least)) != text) return std::nullopt;
    return least;
  }

 private:
  void add_control(std::optional<std::int32_t> id) {
    if (!id) return;
    if (std::string written = tokenizer_.token(*id); !written.empty())
      controls_.emplace(std::move(written), *id);
  }
  bool has_control(const std::vector<std::int32_t>& ids, std::size_t first) const {
    return std::any_of(ids.begin() + static_cast<std::ptrdiff_t>(first), ids.end(), [&](std::int32_t id) {
      return std::any_of(controls_.begin(), controls_.end(), [&](const auto& c) { return c.second == id; });
    });
  }
  /// The first place behind `at` that lies behind the first byte of a control token's text, else the end.
  std::size_t inside_control(std::string_view text, std::size_t at) const {
    std::size_t first = text.size();
    for (const auto& [control, id] : controls_)
      first = std::min(first, std::min(text.find(control, at), text.size() - 1) + 1);
    return first;
  }

  const Tokenizer& tokenizer_;
  SpelledTokens spelled_;
  std::map<std::string, std::int32_t> controls_;
};

/// Text between two tokens of the template, with the places at which what is learned changes.
struct TextRun {
  std::string text;
  std::vector<std::pair<std::size_t, bool>> parts;  // where each ends, whether it is learned

  void append(const TextSegment& segment) {
    text += segment.text;
    if (!parts.empty() && parts.back().second == segment.learned)
      parts.back().first = text.size();
    else
      parts.emplace_back(text.size(), segment.learned);
  }

  void encode(const TextEncoder& encoder, EncodeOptions::Behind behind, std::vector<std::int32_t>& ids,
              std::vector<std::uint8_t>& learned) {
    if (text.empty()) return;
    const std::size_t first = ids.size();
    encoder.encode(text, behind, ids);
    const std::span<const std::int32_t> all = std::span(ids).subspan(first);
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const bool last = i + 1 == parts.size();
      const std::size_t end = last ? all.size() : border(encoder, behind, all, parts[i]);
      learned.resize(std::max(learned.size(), first + end), parts[i].second ? 1 : 0);
    }
    text.clear(), parts.clear();
  }

 private:
  /// Tokens of `all` up to the end of a part, with the one that crosses it where the part is learned.
  std::size_t border(const TextEncoder& encoder, EncodeOptions::Behind behind,
                     std::span<const std::int32_t> all, std::pair<std::size_t, bool> part) const {
    std::vector<std::int32_t> side;
    encoder.encode(std::string_view(text).substr(0, part.first), behind, side);
    const auto same = static_cast<std::size_t>(
        std::mismatch(side.begin(), side.end(), all.begin(), all.end()).first - side.begin());
    if (same == side.size()) return same;
    // Alone it is cut otherwise; a token may end there all the same.
    if (const auto exact = encoder.tokens_of(all, std::string_view(text).substr(0, part.first), same))
      return *exact;
    if (!part.second) return same;
    side.clear();  // those that are the next part's alone are the last
    encoder.encode(std::string_view(text).substr(part.first), EncodeOptions::Behind::text, side);
    const auto rest = static_cast<std::size_t>(
        std::mismatch(side.rbegin(), side.rend(), all.rbegin(), all.rend()).first - side.rbegin());
    return std::max(same, all.size() - rest);
  }
};

}  // namespace

void encode_segments(const Tokenizer& tokenizer, std::span<const TextSegment> segments, SpelledTokens spelled,
                     std::vector<std::int32_t>& ids, std::vector<std::uint8_t>& learned) {
  using Behind = EncodeOptions::Behind;
  const TextEncoder encoder(tokenizer, segments, spelled);
  TextRun run;
  Behind behind = Behind::nothing;
  for (const TextSegment& segment : segments) {
    const std::optional<std::int32_t> id = id_of(tokenizer, segment);
    if (!id) {
      run.append(segment);
      continue;
    }
    run.encode(encoder, behind, ids, learned);
    behind = segment.kind == SegmentKind::apart ? Behind::nothing : Behind::token;
    ids.push_back(*id);
    learned.push_back(segment.learned);
  }
  run.encode(encoder, behind, ids, learned);
}

}  // namespace sherd::data
