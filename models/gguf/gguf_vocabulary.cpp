#include "models/gguf/gguf_vocabulary.h"

#include <algorithm>

#include "base/error.h"
#include "base/text/utf8.h"

namespace sherd::models {
namespace {

// The patterns of public tokenizers, by which llama.cpp names what it does.
constexpr const char* llama3_pattern =
    R"(split (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3})"
    R"(| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* qwen2_pattern =
    R"(split (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*)"
    R"(|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* qwen35_pattern =
    R"(split (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N})"
    R"(| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* o200k_pattern =
    R"(split [^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t)"
    R"(|'re|'ve|'m|'ll|'d)?)"
    R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re)"
    R"(|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* tekken_pattern =
    R"(split [^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+)"
    R"(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N})"
    R"(| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr const char* deepseek3_pattern =
    R"(split [!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+)"
    R"(| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

struct KnownCuts {
  std::vector<std::string> steps;
  GgufPreTokenizer pre;
};
const std::vector<KnownCuts>& known_cuts() {
  static const std::vector<KnownCuts> all{
      {{"words"}, {"gpt-2", false}},
      {{"digits", "words"}, {"smollm", false}},
      {{llama3_pattern}, {"dbrx", false}},
      {{llama3_pattern}, {"llama-bpe", true}},
      {{qwen2_pattern}, {"qwen2", false}},
      {{qwen35_pattern}, {"qwen35", false}},
      {{o200k_pattern}, {"gpt-4o", false}},
      {{tekken_pattern}, {"tekken", true}},
      {{R"(split \p{N}{1,3})", "split [一-龥぀-ゟ゠-ヿ]+", deepseek3_pattern}, {"deepseek-v3", false}}};
  return all;
}

std::vector<std::string> letters_of(const std::string& text) {
  std::vector<std::string> out;
  for (std::string_view rest = text; !rest.empty();) {
    const std::size_t length = std::max<std::size_t>(1, utf8_length(rest));
    out.emplace_back(rest.substr(0, length));
    rest.remove_prefix(length);
  }
  return out;
}

std::string pair_of(std::string_view left, std::string_view right) {
  return cat(left, '\0', right);
}

}  // namespace

const GgufPreTokenizer* pre_tokenizer_of(const std::vector<std::string>& steps, bool ignores_merges) {
  const GgufPreTokenizer* out = nullptr;
  for (const KnownCuts& each : known_cuts())
    if (each.steps == steps && (!out || each.pre.ignores_merges == ignores_merges)) out = &each.pre;
  return out;
}

std::string token_beyond_merges(const TokenIds& ids, const TokenMerges& merges,
                                const std::unordered_set<std::string>& added) {
  TokenIds ranks;
  for (const auto& [left, right] : merges) ranks.emplace(pair_of(left, right), std::ssize(ranks));
  for (const auto& [token, id] : ids) {
    if (added.contains(token)) continue;
    std::vector<std::string> parts = letters_of(token);
    while (parts.size() > 1) {
      std::size_t best = 0;
      std::int64_t rank = -1;
      for (std::size_t i = 0; i + 1 < parts.size(); ++i)
        if (const auto found = ranks.find(pair_of(parts[i], parts[i + 1]));
            found != ranks.end() && (rank < 0 || found->second < rank))
          rank = found->second, best = i;
      if (rank < 0) return token;
      parts[best] += parts[best + 1];
      parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(best) + 1);
    }
  }
  return {};
}

std::optional<TokenIds> ranks_of_pieces(const TokenIds& ids, const TokenMerges& merges,
                                        const std::unordered_set<std::string>& added, std::string& odd) {
  TokenIds ranks;
  std::unordered_set<std::string> pairs;
  for (const auto& [left, right] : merges) {
    pairs.insert(pair_of(left, right));
    const auto [at, fresh] = ranks.emplace(left + right, std::ssize(ranks));
    if (fresh || at->second + 1 == std::ssize(ranks)) continue;
    odd = left + right;  // another token's merges come between its own
    return std::nullopt;
  }
  const auto is_part = [&](const std::string& text) {
    return utf8_length(text) == text.size() || (ids.contains(text) && !added.contains(text));
  };
  for (const auto& [token, id] : ids) {
    if (added.contains(token)) continue;
    const std::vector<std::string> letters = letters_of(token);
    std::size_t cut = 0;
    for (std::size_t i = 0; i + 1 < letters.size(); ++i) {
      cut += letters[i].size();
      const std::string left = token.substr(0, cut), right = token.substr(cut);
      if (!is_part(left) || !is_part(right) || pairs.contains(pair_of(left, right))) continue;
      odd = token;  // would be made of these two, too
      return std::nullopt;
    }
  }
  return ranks;
}

std::string letter_of(int byte) {
  const auto stands_for_itself = [](int b) {
    return (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || (b >= 174 && b <= 255);
  };
  int code = byte;
  if (!stands_for_itself(byte)) {
    code = 256;
    for (int other = 0; other < byte; ++other) code += stands_for_itself(other) ? 0 : 1;
  }
  if (code < 128) return {static_cast<char>(code)};
  return {static_cast<char>(0xC0 | code >> 6), static_cast<char>(0x80 | (code & 63))};
}

std::vector<std::uint8_t> bytes_of_base64(std::string_view text) {
  constexpr std::string_view digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  while (text.ends_with('=')) text.remove_suffix(1);
  std::vector<std::uint8_t> out;
  std::uint32_t held = 0;
  int bits = 0;
  for (const char c : text) {
    const std::size_t digit = digits.find(c);
    if (digit == std::string_view::npos)
      fail(ErrorKind::data,
           "the tokenizer's precompiled_charsmap is no base64: take the file as it was published");
    held = held << 6 | static_cast<std::uint32_t>(digit);
    if ((bits += 6) < 8) continue;
    bits -= 8;
    out.push_back(static_cast<std::uint8_t>(held >> bits));
  }
  return out;
}

}  // namespace sherd::models
