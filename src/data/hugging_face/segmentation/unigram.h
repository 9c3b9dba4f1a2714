#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "data/hugging_face/segmentation/word_piece.h"

namespace sherd::data {

/// The parts of a unigram language model (Kudo 2018) that others do not have.
struct UnigramOptions {
  std::vector<double> scores = {};                     ///< by id: the logarithm of a piece's probability
  std::optional<std::int32_t> unknown = std::nullopt;  ///< the piece for characters that have none
};

/// A unigram model with the vocabulary and the byte fallback of `parts`: of all ways to write a text as
/// pieces it takes the one whose scores have the largest sum. A character that is no piece counts 10 less
/// than the least score; neighbours of that kind become one unknown piece, or their bytes. Encoding throws
/// Error{data} where such a character is met and nothing is `unknown`.
std::unique_ptr<const WordModel> make_unigram(const BpeParts& parts, const UnigramOptions& options);

}  // namespace sherd::data
