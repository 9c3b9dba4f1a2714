#pragma once

#include <memory>
#include <string>
#include <vector>

#include "data/hugging_face/pattern.h"

namespace sherd::data {

enum class DecoderKind { byte_level, replace, byte_fallback, fuse, strip, metaspace };
struct DecoderStep {
  DecoderKind kind = DecoderKind::fuse;
  std::shared_ptr<const Pattern> pattern = nullptr;  ///< replace: the texts that go
  std::string content = {};  ///< replace: the text that comes; strip: the character; metaspace: the mark
  std::size_t start = 0, stop = 0;  ///< strip: at most so many at the ends of a token
  bool prefix = false;              ///< metaspace: marks of the first token stand for nothing
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
