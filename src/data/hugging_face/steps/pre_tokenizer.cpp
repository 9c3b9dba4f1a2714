#include "data/hugging_face/steps/steps.h"

#include <algorithm>

namespace sherd::data {
namespace {

using Prepend = PreTokenizerStep::Prepend;
using MatchRange = PreTokenSpace::MatchRange;
using Behind = EncodeOptions::Behind;

void push(PreTokenSpace& space, const PreToken& of, std::size_t begin, std::size_t end) {
  if (end > begin) space.next.push_back(of.part(begin, end - begin));
}

/// All of a piece, in parts that match and parts that do not.
void find_ranges(const PreTokenizerStep& step, std::string_view text, PreTokenSpace& space) {
  space.ranges.clear();
  std::size_t done = 0;
  step.pattern->for_each(text, space.matches, [&](std::size_t begin, std::size_t end) {
    if (begin > done) space.ranges.push_back({done, begin, step.invert});
    space.ranges.push_back({begin, end, !step.invert});
    done = end;
  });
  if (done < text.size()) space.ranges.push_back({done, text.size(), step.invert});
}

/// Joins a range to the one before it where `joins(range, the range before matched)`.
template <class F>
void join(std::vector<MatchRange>& ranges, const F& joins) {
  std::size_t kept = 0;
  bool previous = false;
  for (const MatchRange range : ranges) {
    if (kept > 0 && joins(range.matched, previous)) {
      ranges[kept - 1].begin = std::min(ranges[kept - 1].begin, range.begin);
      ranges[kept - 1].end = std::max(ranges[kept - 1].end, range.end);
    } else {
      ranges[kept++] = range;
    }
    previous = range.matched;
  }
  ranges.resize(kept);
}

void split_by_pattern(const PreTokenizerStep& step, const PreToken& piece, PreTokenSpace& space) {
  if (step.behavior == SplitBehavior::isolated) {
    std::size_t done = 0;
    step.pattern->for_each(piece.text, space.matches, [&](std::size_t begin, std::size_t end) {
      push(space, piece, done, begin);
      push(space, piece, begin, end);
      done = end;
    });
    return push(space, piece, done, piece.text.size());
  }
  find_ranges(step, piece.text, space);
  std::vector<MatchRange>& ranges = space.ranges;
  const auto after_other = [](bool matched, bool previous) { return matched && !previous; };
  if (step.behavior == SplitBehavior::contiguous)
    join(ranges, [](bool matched, bool previous) { return matched == previous; });
  if (step.behavior == SplitBehavior::merged_with_previous) join(ranges, after_other);
  if (step.behavior == SplitBehavior::merged_with_next) {
    std::reverse(ranges.begin(), ranges.end());
    join(ranges, after_other);
    std::reverse(ranges.begin(), ranges.end());
  }
  for (const MatchRange& range : ranges)
    if (step.behavior != SplitBehavior::removed || !range.matched) push(space, piece, range.begin, range.end);
}

PreToken with_prefix(const std::string& prefix, const PreToken& piece, PreTokenSpace& space) {
  std::string& written = space.written.emplace_back(prefix);
  written.append(piece.text);
  return {written, piece.behind, piece.of_first > 0 ? piece.of_first + prefix.size() : 0};
}

void split_byte_level(const PreTokenizerStep& step, PreToken piece, PreTokenSpace& space) {
  if (step.prefix_space && piece.behind != Behind::text && !piece.text.starts_with(' '))
    piece = with_prefix(" ", piece, space);
  if (!step.pattern) return space.next.push_back(piece);
  split_by_pattern(step, piece, space);
}

void split_metaspace(const PreTokenizerStep& step, const PreToken& piece, PreTokenSpace& space) {
  std::string& text = space.written.emplace_back();
  const bool begins = piece.text.starts_with(' ') || piece.text.starts_with(step.replacement);
  const bool always = step.prepend == Prepend::always && piece.behind != Behind::text;
  if (!begins && (always || (step.prepend == Prepend::first && piece.of_first > 0))) text = step.replacement;
  std::size_t copied = 0, of_first = piece.of_first > 0 ? piece.of_first + text.size() : 0;
  for (std::size_t at; (at = piece.text.find(' ', copied)) != std::string_view::npos; copied = at + 1) {
    text.append(piece.text.substr(copied, at - copied)) += step.replacement;
    if (at < piece.of_first) of_first += step.replacement.size() - 1;
  }
  text.append(piece.text.substr(copied));
  const PreToken whole{text, piece.behind, of_first};
  std::size_t begin = 0;
  while (step.splits) {
    const std::size_t end = text.find(step.replacement, begin + 1);
    if (end == std::string::npos) break;
    push(space, whole, begin, end);
    begin = end;
  }
  push(space, whole, begin, text.size());
}

}  // namespace

void PreTokenizer::split(PreToken text, PreTokenSpace& space) const {
  space.pieces.clear();
  space.written.clear();
  if (!text.text.empty()) space.pieces.push_back(text);
  for (const PreTokenizerStep& step : steps_) {
    space.next.clear();
    for (const PreToken& piece : space.pieces) {
      if (step.kind == PreTokenizerKind::split) split_by_pattern(step, piece, space);
      if (step.kind == PreTokenizerKind::byte_level) split_byte_level(step, piece, space);
      if (step.kind == PreTokenizerKind::metaspace) split_metaspace(step, piece, space);
    }
    space.pieces.swap(space.next);
  }
}

}  // namespace sherd::data
