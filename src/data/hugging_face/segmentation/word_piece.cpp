#include "data/hugging_face/segmentation/word_piece.h"

#include <algorithm>

#include "base/error.h"
#include "base/text/excerpt.h"
#include "base/text/utf8.h"
#include "data/hugging_face/steps/unicode.h"

namespace sherd::data {
namespace {

class WordPiece final : public WordModel {
 public:
  WordPiece(const BpeParts& parts, const WordPieceOptions& options)
      : WordModel(Vocabulary(parts.vocabulary)), options_(options) {
    const std::optional<std::int32_t> unknown = vocabulary_.id(parts.unknown);
    if (!unknown)
      fail(ErrorKind::data, "the unknown token '", excerpt(parts.unknown), "' is not in the vocabulary");
    unknown_ = *unknown;
    for (const auto& [token, id] : parts.vocabulary) most_ = std::max(most_, token.size());
  }

 private:
  void encode_word(std::string_view word, BpeSpace& space) const override {
    space.ids.clear();
    const std::ptrdiff_t characters = std::count_if(
        word.begin(), word.end(), [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; });
    if (characters > options_.longest) return void(space.ids.push_back(unknown_));
    std::string& written = space.written;
    for (std::size_t begin = 0; begin < word.size();) {
      const std::string_view prefix = begin > 0 ? std::string_view(options_.prefix) : std::string_view();
      std::size_t end = std::min(word.size(), begin + most_);
      while (end < word.size() && (static_cast<unsigned char>(word[end]) & 0xC0) == 0x80) --end;
      std::optional<std::int32_t> id;
      for (; end > begin; end -= last_length(word.substr(begin, end - begin))) {
        written.assign(prefix).append(word.substr(begin, end - begin));
        if ((id = vocabulary_.id(written))) break;
      }
      if (!id) {
        space.ids.assign(1, unknown_);
        return;
      }
      space.ids.push_back(*id);
      begin = end;
    }
  }

  WordPieceOptions options_;
  std::int32_t unknown_ = 0;
  std::size_t most_ = 0;  // bytes of the longest token
};

}  // namespace

std::unique_ptr<const WordModel> make_word_piece(const BpeParts& parts, const WordPieceOptions& options) {
  return std::make_unique<WordPiece>(parts, options);
}

std::unique_ptr<const WordModel> make_bpe(const BpeParts& parts) {
  return std::make_unique<Bpe>(parts);
}

}  // namespace sherd::data
