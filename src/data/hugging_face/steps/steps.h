#pragma once

#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "data/hugging_face/steps/charsmap.h"
#include "data/hugging_face/steps/pattern.h"
#include "data/tokenizer.h"

// The steps of a tokenizer.json, before a model of byte-pair encoding and behind it: a text is normalized,
// cut into pre-tokens, and tokens are decoded.

namespace sherd::data {

enum class NormalizerKind {
  nfc,
  nfd,
  nfkc,
  nfkd,
  replace,
  prepend,
  lowercase,
  strip,
  precompiled,       ///< SentencePiece's table of replacements
  nmt,               ///< SentencePiece's: control characters go, white space and some others become spaces
  strip_accents,     ///< marks go
  strip_nonspacing,  ///< BERT's: nonspacing marks go
  clean,             ///< BERT's: control characters go, white space becomes spaces
  space_cjk          ///< BERT's: spaces around each Chinese character
};
struct NormalizerStep {
  NormalizerKind kind = NormalizerKind::nfc;
  std::shared_ptr<const Pattern> pattern = nullptr;  ///< replace: the texts that go
  std::string content = {};          ///< replace: the text that comes; prepend: the one in front of others
  bool left = false, right = false;  ///< strip: White_Space at which ends
  std::shared_ptr<const Charsmap> charsmap = nullptr;  ///< precompiled
};

/// Changes a text before it is cut, step by step. NFC and its kin are ICU's.
class Normalizer {
 public:
  explicit Normalizer(std::vector<NormalizerStep> steps) : steps_(std::move(steps)) {}

  /// Takes valid UTF-8, and gives `text` itself where nothing changes, else a view of `storage`. `goes_on`:
  /// more of the same text lies before it, so that nothing is put in front, nor space dropped there.
  /// `of_first`, where given: the bytes of the first character at the front, and then those that were made of
  /// them.
  std::string_view apply(std::string_view text, std::string& storage, MatchSpace& space, bool goes_on = false,
                         std::size_t* of_first = nullptr) const;

 private:
  std::vector<NormalizerStep> steps_;
};

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

/// A cutting thread's own memory; pre-tokens lie in the text that was cut, or in `written`.
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

enum class DecoderKind { byte_level, replace, byte_fallback, fuse, strip, metaspace, word_piece };
struct DecoderStep {
  DecoderKind kind = DecoderKind::fuse;
  std::shared_ptr<const Pattern> pattern = nullptr;  ///< replace: the texts that go
  /// replace: the text that comes; strip: the character; metaspace: the mark; word_piece: the prefix.
  std::string content = {};
  std::size_t start = 0, stop = 0;  ///< strip: at most so many at the ends of a token
  bool prefix = false;              ///< metaspace: marks of the first token stand for nothing
  bool cleanup = false;             ///< word_piece: no space before punctuation
};

/// Tokens as they are written in the vocabulary, turned into text step by step. Bytes of byte_level and
/// byte_fallback stay what they are: text of tokens that are no whole characters is not UTF-8.
class Decoder {
 public:
  explicit Decoder(std::vector<DecoderStep> steps) : steps_(std::move(steps)) {}
  std::string decode(std::vector<std::string> tokens) const;

 private:
  std::vector<DecoderStep> steps_;
};

}  // namespace sherd::data
