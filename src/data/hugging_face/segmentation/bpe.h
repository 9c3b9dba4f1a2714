#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data/hugging_face/segmentation/vocabulary.h"
#include "data/hugging_face/segmentation/word_cache.h"

namespace sherd::data {

/// The parts of a model of byte-pair encoding (Sennrich et al. 2016).
struct BpeParts {
  std::vector<std::pair<std::string, std::int32_t>> vocabulary;
  std::vector<std::pair<std::string, std::string>> merges;  ///< the first is applied first
  std::string unknown = {};    ///< the token for characters that have none; empty: they vanish
  bool fuse_unknown = false;   ///< neighbours become one
  bool byte_fallback = false;  ///< before that, a character's bytes by the tokens "<0xE2>"
  bool ignore_merges = false;  ///< a piece that is a token is that token
  bool byte_level = false;     ///< a piece's bytes are written as written_byte() says
};

/// The memory of a thread that turns pieces into ids.
struct BpeSpace {
  struct Symbol {
    std::int32_t id, previous, next;
  };
  struct Candidate {
    std::uint32_t rank;
    std::int32_t at, left, right;
  };
  /// The best way of a unigram model to a place in the text: its score, where its last piece begins, and
  /// that.
  struct PathEnd {
    static constexpr std::uint32_t none = ~std::uint32_t{0};
    double score = 0;
    std::uint32_t begin = none;
    std::int32_t id = 0;
  };
  std::vector<Symbol> symbols = {};
  std::vector<Candidate> heap = {};
  std::vector<PathEnd> ends = {};  // by place: a unigram model's
  std::vector<std::int32_t> ids = {};
  std::vector<std::uint64_t> made = {};  ///< by pair: rank and new id, or none
  std::string written = {};
  WordCache cache = {};
};

/// The model that turns pre-tokens into ids: byte-pair encoding, WordPiece, or a unigram model. Immutable.
class WordModel {
 public:
  virtual ~WordModel() = default;
  /// Appends the ids of a piece of valid UTF-8; of one word, unless a model says otherwise.
  virtual void encode(std::string_view piece, BpeSpace& space, std::vector<std::int32_t>& ids) const;
  const Vocabulary& vocabulary() const { return vocabulary_; }

 protected:
  explicit WordModel(Vocabulary vocabulary) : vocabulary_(std::move(vocabulary)) {}
  /// Writes the ids of a word that was not met of late to space.ids.
  virtual void encode_word(std::string_view word, BpeSpace& space) const = 0;

  Vocabulary vocabulary_;
};

/// Byte-pair encoding: characters are tokens, and of all neighbours that merge those merge whose merge has
/// the lowest rank, of equal ones the left one, until none do. Immutable.
class Bpe final : public WordModel {
 public:
  /// Throws Error{data} for a merge whose parts or result are no tokens, an unknown token that is none.
  explicit Bpe(const BpeParts& parts);

  void encode(std::string_view piece, BpeSpace& space, std::vector<std::int32_t>& ids) const override;

 private:
  static constexpr std::uint64_t no_merge = ~std::uint64_t{0};
  struct Merge {
    std::uint64_t pair = no_merge;  // the ids
    std::uint64_t made = no_merge;  // rank, id
  };
  std::uint64_t merge_of(std::int32_t left, std::int32_t right) const;
  /// Returns whether a merge joins a space mark to the character before it.
  bool add_merges(const BpeParts& parts);
  void find_bytes(const BpeParts& parts);
  void encode_word(std::string_view word, BpeSpace& space) const override;
  void take_characters(std::string_view word, BpeSpace& space) const;
  void merge_short(BpeSpace& space) const;
  void merge_long(BpeSpace& space) const;

  std::vector<Merge> merges_;              // open addressing
  std::array<std::int32_t, 256> bytes_{};  // byte level: of each byte; byte fallback: of "<0x..>"; or -1
  std::int32_t unknown_ = -1;
  bool fuse_unknown_, byte_fallback_, ignore_merges_, byte_level_;
  bool all_bytes_ = false;
  bool by_words_ = false;  // no merge joins a space mark to the character before it
};

}  // namespace sherd::data
