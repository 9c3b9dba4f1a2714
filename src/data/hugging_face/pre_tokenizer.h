#pragma once

#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "data/hugging_face/pattern.h"
#include "data/tokenizer.h"

namespace sherd::data {

/// The fate of the parts of a text that a pattern matches: each is dropped, a piece of its own, joined to
/// the one before or behind; contiguous: neighbours are one piece.
enum class SplitBehavior { removed, isolated, merged_with_previous, merged_with_next, contiguous };

enum class PreTokenizerKind { split, byte_level, metaspace };
struct PreTokenizerStep {
  enum class Prepend { always, first, never };
  PreTokenizerKind kind = PreTokenizerKind::split;
  /// The pattern of a split; byte_level's is GPT-2's, or null: the pieces stay as they are.
  std::shared_ptr<const Pattern> pattern = nullptr;
  SplitBehavior behavior = SplitBehavior::isolated;
  bool invert = false;           ///< split: the texts between matches are taken for the matches
  bool prefix_space = false;     ///< byte_level: a space in front of each piece without one
  std::string replacement = {};  ///< metaspace: it is written for a space
  Prepend prepend = Prepend::always;
  bool splits = true;  ///< metaspace: each replacement begins a piece
};

/// A part of a text that the model reads by itself (the tokenizers package's pre-token).
struct PreToken {
  std::string_view text;
  EncodeOptions::Behind behind = EncodeOptions::Behind::token;  ///< a cut between pieces counts as a token
  /// Bytes at its front that were made of the first character of the whole text; 0 behind those.
  std::size_t of_first = 0;

  /// A part of it from `begin` on.
  PreToken part(std::size_t begin, std::size_t size = std::string_view::npos) const {
    return {text.substr(begin, size), begin == 0 ? behind : EncodeOptions::Behind::token,
            of_first > begin ? of_first - begin : 0};
  }
};

/// A cutting thread's own memory; pieces lie in what was cut, or in `written`.
struct PreTokenSpace {
  MatchSpace& matches;
  std::vector<PreToken> pieces = {};
  std::vector<PreToken> next = {};
  std::deque<std::string> written = {};

  struct MatchRange {
    std::size_t begin, end;
    bool matched;
  };
  std::vector<MatchRange> ranges = {};
};

/// Cuts a text into pieces, step by step. Pieces of byte_level stay bytes: the model knows how it writes
/// them.
class PreTokenizer {
 public:
  explicit PreTokenizer(std::vector<PreTokenizerStep> steps) : steps_(std::move(steps)) {}

  /// Into space.pieces, none of which is empty.
  void split(PreToken text, PreTokenSpace& space) const;

 private:
  std::vector<PreTokenizerStep> steps_;
};

}  // namespace sherd::data
