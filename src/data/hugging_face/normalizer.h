#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "data/hugging_face/pattern.h"

namespace sherd::data {

enum class NormalizerKind { nfc, nfd, nfkc, nfkd, replace, prepend, lowercase, strip };
struct NormalizerStep {
  NormalizerKind kind = NormalizerKind::nfc;
  std::shared_ptr<const Pattern> pattern = nullptr;  ///< replace: the texts that go
  std::string content =
      {};  ///< replace: the text that comes; prepend: the one in front of texts that are not empty
  bool left = false, right = false;  ///< strip: White_Space at which ends
};

/// Changes a text before it is cut, step by step. NFC and its kin are ICU's.
class Normalizer {
 public:
  explicit Normalizer(std::vector<NormalizerStep> steps) : steps_(std::move(steps)) {}

  /// Takes valid UTF-8, and gives `text` itself where nothing changes, else what lies in `storage` then.
  /// `goes_on`: more of the same text lies before it, so that nothing is put in front, nor space dropped
  /// there. `of_first`, where given: the bytes at the front that are, and then those that were made of, its
  /// first character.
  std::string_view apply(std::string_view text, std::string& storage, MatchSpace& space, bool goes_on = false,
                         std::size_t* of_first = nullptr) const;

 private:
  std::vector<NormalizerStep> steps_;
};

}  // namespace sherd::data
