#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sherd::models {

/// The contents of a SentencePiece model's file, as far as GGUF files have them.
struct SentencePieceFile {
  struct Piece {
    std::string text;
    float score = 0;
    /// 1 plain, 2 unknown, 3 control, 4 looked for in the text, 5 unused, 6 a byte: GGUF's numbers, too.
    std::int32_t type = 1;
  };
  std::vector<Piece> pieces;
  bool bpe = false;  ///< else unigram
  bool prefix_space = true, removes_spaces = true, escapes_spaces = true;
  std::string charsmap;  ///< how texts are normalised; empty: they stay

  /// Reads the protocol buffer. Throws Error{data} for bytes that are none, and for other algorithms.
  static SentencePieceFile parse(const std::string& bytes);
};

}  // namespace sherd::models
