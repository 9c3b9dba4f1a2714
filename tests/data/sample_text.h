#pragma once

#include <cstddef>
#include <random>
#include <string>

namespace sherd::data {

/// At least `bytes` bytes of made-up prose: sentences of words made of syllables, common words more often,
/// paragraphs with blank lines between. The same for the same arguments.
inline std::string sample_text(std::size_t bytes, unsigned seed = 1) {
  const std::string syllables[] = {"ka", "ro", "mi",  "ten", "sal", "vor",
                                   "e",  "ul", "dra", "po",  "shi", "gan"};
  std::mt19937 random(seed);
  std::string words[400];
  for (std::string& word : words)
    for (unsigned parts = 1 + random() % 4; parts > 0; --parts) word += syllables[random() % 12];
  std::string text;
  while (text.size() < bytes) {
    for (unsigned sentences = 1 + random() % 6; sentences > 0; --sentences) {
      for (unsigned count = 3 + random() % 12; count > 0; --count) {
        const unsigned a = random() % 400, b = random() % 400;
        text += words[a * b / 400];
        text += count > 1 ? (random() % 9 ? " " : ", ") : ". ";
      }
    }
    text.back() = '\n';
    if (random() % 3 == 0) text += '\n';
  }
  return text;
}

}  // namespace sherd::data
