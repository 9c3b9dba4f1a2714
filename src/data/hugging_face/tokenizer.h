#pragma once

#include <memory>
#include <string>

#include "data/tokenizer.h"

namespace sherd::data {

/// The parts of "hf:PATH?eod=TOKEN&bos=TOKEN".
struct HuggingFaceSpec {
  std::string path;
  std::optional<std::string> end, begin;  ///< nullopt: not given; an empty `begin`: none

  static HuggingFaceSpec parse(const std::string& spec);
  std::string text() const;
};

/// A tokenizer of the bytes of a tokenizer.json. The files beside its path and the post-processor say what
/// `spec` leaves open. Throws Error{data} naming the path and what is not supported, Error{config} where
/// nobody says how a document ends, or a token that is named is none.
std::shared_ptr<const Tokenizer> make_hugging_face(const std::string& bytes, HuggingFaceSpec spec);

}  // namespace sherd::data
