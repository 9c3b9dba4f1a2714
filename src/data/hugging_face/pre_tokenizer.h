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

struct PreTokenizerStep {
  enum class Kind { split, byte_level, metaspace };
  enum class Prepend { always, first, never };
  Kind kind = Kind::split;
  /// For split; for byte_level it is GPT-2's, or null: as the pieces are.
  std::shared_ptr<const Pattern> pattern = nullptr;
  SplitBehavior behavior = SplitBehavior::isolated;
  bool invert = false;           ///< split: what does not match is taken for what does
  bool prefix_space = false;     ///< byte_level: a space in front of each piece without one
  std::string replacement = {};  ///< metaspace: what is written for a space
  Prepend prepend = Prepend::always;
  bool splits = true;  ///< metaspace: each replacement begins a piece
};

/// A part of a text that the model reads by itself.
struct Piece {
  std::string_view text;
  EncodeOptions::Behind behind = EncodeOptions::Behind::token;  ///< which a cut between pieces is, too
  /// Bytes at its front that were made of the first character of the whole text; 0 behind those.
  std::size_t of_first = 0;

  /// A part of it from `begin` on.
  Piece part(std::size_t begin, std::size_t size = std::string_view::npos) const {
    return {text.substr(begin, size), begin == 0 ? behind : EncodeOptions::Behind::token,
            of_first > begin ? of_first - begin : 0};
  }
};

/// A cutting thread's own memory; pieces lie in what was cut, or in `written`.
struct PieceSpace {
  MatchSpace& matches;
  std::vector<Piece> pieces = {};
  std::vector<Piece> next = {};
  std::deque<std::string> written = {};

  struct Range {
    std::size_t begin, end;
    bool matched;
  };
  std::vector<Range> ranges = {};
};

/// Cuts a text into pieces, step by step. Pieces of byte_level stay bytes: the model knows how it writes
/// them.
class PreTokenizer {
 public:
  explicit PreTokenizer(std::vector<PreTokenizerStep> steps) : steps_(std::move(steps)) {}

  /// Into space.pieces, none of which is empty.
  void split(Piece text, PieceSpace& space) const;

 private:
  std::vector<PreTokenizerStep> steps_;
};

}  // namespace sherd::data
