#include "data/hugging_face/segmentation/unigram.h"

#include <algorithm>
#include <limits>

#include "base/error.h"
#include "base/text/excerpt.h"
#include "base/text/utf8.h"
#include "data/hugging_face/segmentation/byte_trie.h"
#include "data/hugging_face/steps/unicode.h"

namespace sherd::data {
namespace {

using PathEnd = BpeSpace::PathEnd;

constexpr double unknown_penalty = 10;

ByteTrie trie_of(const BpeParts& parts, const Vocabulary& vocabulary) {
  std::vector<std::pair<std::string_view, std::int32_t>> pieces;
  for (const auto& [piece, id] : parts.vocabulary) pieces.emplace_back(piece, *vocabulary.id(piece));
  return ByteTrie(std::move(pieces));
}

class Unigram final : public WordModel {
 public:
  Unigram(const BpeParts& parts, const UnigramOptions& options)
      : WordModel(Vocabulary(parts.vocabulary, Vocabulary::Repeats::last_counts)),
        trie_(trie_of(parts, vocabulary_)),
        scores_(options.scores),
        unknown_(options.unknown.value_or(-1)),
        byte_level_(parts.byte_level),
        bytes_(parts.byte_fallback ? fallback_tokens(vocabulary_) : std::array<std::int32_t, 256>()) {
    if (!parts.byte_fallback) bytes_.fill(-1);
    double least = std::numeric_limits<double>::infinity();
    for (const double score : scores_) least = std::min(least, score);
    unknown_score_ = least - unknown_penalty;
  }

 private:
  void encode_word(std::string_view word, BpeSpace& space) const override {
    const std::string_view piece = byte_level_ ? written_bytes(word, space.written) : word;
    find_best(piece, space.ends);
    take_path(piece, space);
  }

  /// The best way to each place between two characters. Sums are made from left to right, and of equal ones
  /// the one whose last piece is the longest counts: the package's ids hang on both.
  void find_best(std::string_view text, std::vector<PathEnd>& ends) const {
    ends.assign(text.size() + 1, {});
    for (std::size_t begin = 0, character = 0; begin < text.size(); begin += character) {
      character = utf8_length(text.substr(begin));
      const double before = ends[begin].score;
      const auto offer = [&](std::size_t length, double score, std::int32_t id) {
        PathEnd& end = ends[begin + length];
        score += before;
        if (end.begin != PathEnd::none && score <= end.score) return;
        if (id < 0)
          fail(ErrorKind::data, "'", excerpt(text.substr(begin, length)),
               "' is in no piece of the vocabulary, and the model has no unk_id: give it one in "
               "tokenizer.json, or "
               "take that out of the text");
        end = {score, static_cast<std::uint32_t>(begin), id};
      };
      bool alone = false;
      trie_.for_each_prefix(text.substr(begin), [&](std::size_t length, std::int32_t id) {
        offer(length, scores_[static_cast<std::size_t>(id)], id);
        alone = alone || length == character;
      });
      if (!alone) offer(character, unknown_score_, unknown_);
    }
  }

  /// The ids of the best way to the end of the text, into space.ids.
  void take_path(std::string_view text, BpeSpace& space) const {
    std::vector<std::int32_t>& ids = space.ids;
    ids.clear();
    for (std::size_t end = text.size(); end > 0;) {
      std::size_t begin = space.ends[end].begin;
      const std::int32_t id = space.ends[end].id;
      if (id != unknown_) {
        ids.push_back(id);
      } else {
        while (begin > 0 && space.ends[begin].id == unknown_) begin = space.ends[begin].begin;
        add_unknown(text.substr(begin, end - begin), ids);
      }
      end = begin;
    }
    std::reverse(ids.begin(), ids.end());
  }

  /// The last id first.
  void add_unknown(std::string_view run, std::vector<std::int32_t>& ids) const {
    const auto id_of = [&](char byte) { return bytes_[static_cast<unsigned char>(byte)]; };
    // Characters that are none may be a piece together, where another way had the larger sum.
    if (const std::optional<std::int32_t> id = vocabulary_.id(run))
      ids.push_back(*id);
    else if (std::all_of(run.begin(), run.end(), [&](char byte) { return id_of(byte) >= 0; }))
      std::transform(run.rbegin(), run.rend(), std::back_inserter(ids), id_of);
    else
      ids.push_back(unknown_);
  }

  ByteTrie trie_;
  std::vector<double> scores_;
  double unknown_score_ = 0;
  std::int32_t unknown_;
  bool byte_level_;
  std::array<std::int32_t, 256> bytes_;  // of each byte "<0x..>", or -1
};

}  // namespace

std::unique_ptr<const WordModel> make_unigram(const BpeParts& parts, const UnigramOptions& options) {
  return std::make_unique<Unigram>(parts, options);
}

}  // namespace sherd::data
