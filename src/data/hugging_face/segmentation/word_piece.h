#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "data/hugging_face/segmentation/bpe.h"

namespace sherd::data {

/// How WordPiece writes words (Schuster and Nakajima 2012; Devlin et al. 2019).
struct WordPieceOptions {
  std::string prefix = "##";   ///< in front of tokens that go on with a word
  std::int64_t longest = 100;  ///< characters of a word; one with more is unknown
};

/// WordPiece with the vocabulary and the unknown token of `parts`: a word is the longest token that it begins
/// with, then the longest that goes on, and so forth; a word that ends otherwise is the unknown token. Throws
/// Error{data} where that is none.
std::unique_ptr<const WordModel> make_word_piece(const BpeParts& parts, const WordPieceOptions& options);
std::unique_ptr<const WordModel> make_bpe(const BpeParts& parts);

}  // namespace sherd::data
