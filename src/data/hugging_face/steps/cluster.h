#pragma once

#include <cstddef>
#include <string_view>

namespace sherd::data {

/// Bytes of the grapheme cluster at the front of valid UTF-8 that is not empty: what a reader takes for one
/// character (Unicode Standard Annex 29, extended clusters, of revision 43 or later: conjuncts of Indic
/// scripts are one). In front of `text` no cluster goes on.
std::size_t cluster_length(std::string_view text);

/// A quick test by a character's first byte: two neighbours that pass it are never of one cluster. Those
/// below U+0300 do, but for the carriage return.
inline bool is_plain_in_clusters(char lead) {
  return static_cast<unsigned char>(lead) < 0xCC && lead != '\r';
}

}  // namespace sherd::data
