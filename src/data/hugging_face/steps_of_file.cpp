#include "data/hugging_face/steps_of_file.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/text/excerpt.h"
#include "base/text/utf8.h"
#include "data/hugging_face/json_fields.h"
#include "data/hugging_face/steps/unicode.h"

namespace sherd::data {
namespace {

using nlohmann::json;
using Fields = JsonFields<json>;

constexpr const char* gpt2_expression =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

std::shared_ptr<const Pattern> pattern_of(const Fields& step) {
  const Fields pattern(step.value("pattern"), step.where() + ".pattern", {"String", "Regex"});
  if (pattern.has("Regex")) return Pattern::expression(pattern.text("Regex"));
  const std::string text = pattern.text("String");
  if (text.empty()) fail(ErrorKind::data, pattern.where(), " is empty");
  return Pattern::literal(text);
}

using NormalizerSteps = std::vector<NormalizerStep>;

NormalizerSteps bert_normalizer(const Fields& fields) {
  const bool lowers = fields.flag("lowercase", true);
  NormalizerSteps out;
  if (fields.flag("clean_text", true)) out.push_back({NormalizerKind::clean});
  if (fields.flag("handle_chinese_chars", true)) out.push_back({NormalizerKind::space_cjk});
  if (fields.flag("strip_accents", lowers))
    out.insert(out.end(), {{NormalizerKind::nfd}, {NormalizerKind::strip_nonspacing}});
  if (lowers) out.push_back({NormalizerKind::lowercase});
  return out;
}

NormalizerSteps normalizers_of(const json& step, const std::string& type, const std::string& where) {
  using Kind = NormalizerKind;
  if (type == "BertNormalizer")
    return bert_normalizer(
        Fields(step, where, {"clean_text", "handle_chinese_chars", "strip_accents", "lowercase"}));
  if (type == "Replace") {
    const Fields fields(step, where, {"pattern", "content"});
    return {{Kind::replace, pattern_of(fields), fields.text("content")}};
  }
  if (type == "Precompiled") {
    const std::string charsmap = Fields(step, where, {"precompiled_charsmap"}).text("precompiled_charsmap");
    return {{.kind = Kind::precompiled, .charsmap = std::make_shared<Charsmap>(charsmap)}};
  }
  if (type == "Prepend") return {{Kind::prepend, nullptr, Fields(step, where, {"prepend"}).text("prepend")}};
  if (type == "Strip") {
    const Fields fields(step, where, {"strip_left", "strip_right"});
    return {{Kind::strip, nullptr, "", fields.flag("strip_left", false), fields.flag("strip_right", false)}};
  }
  for (const auto& [name, kind] :
       {std::pair{"NFC", Kind::nfc}, std::pair{"NFD", Kind::nfd}, std::pair{"NFKC", Kind::nfkc},
        std::pair{"NFKD", Kind::nfkd}, std::pair{"Lowercase", Kind::lowercase},
        std::pair{"StripAccents", Kind::strip_accents}, std::pair{"Nmt", Kind::nmt}})
    if (type == name) {
      const Fields none(step, where, {});
      return {{kind}};
    }
  refuse_step(where, type,
              "Sequence, NFC, NFD, NFKC, NFKD, Precompiled, Nmt, Replace, Prepend, Lowercase, Strip, "
              "StripAccents and "
              "BertNormalizer");
}

SplitBehavior behavior_of(const Fields& step) {
  const std::string name = step.text("behavior", "Isolated");
  if (name == "Removed") return SplitBehavior::removed;
  if (name == "Isolated") return SplitBehavior::isolated;
  if (name == "MergedWithPrevious") return SplitBehavior::merged_with_previous;
  if (name == "MergedWithNext") return SplitBehavior::merged_with_next;
  if (name == "Contiguous") return SplitBehavior::contiguous;
  fail(ErrorKind::data, step.where(), ".behavior is '", excerpt(name), "', which is not known");
}

PreTokenizerStep metaspace_step(const json& step, const std::string& where) {
  const Fields fields(step, where, {"replacement", "add_prefix_space", "prepend_scheme", "split", "str_rep"});
  PreTokenizerStep out{PreTokenizerKind::metaspace};
  out.replacement = fields.text("replacement");
  if (out.replacement.empty() || utf8_length(out.replacement) != out.replacement.size())
    fail(ErrorKind::data, where, ".replacement is not one character");
  const std::string scheme =
      fields.text("prepend_scheme", fields.flag("add_prefix_space", true) ? "always" : "never");
  using Prepend = PreTokenizerStep::Prepend;
  out.prepend = scheme == "never" ? Prepend::never : scheme == "first" ? Prepend::first : Prepend::always;
  if (scheme != "never" && scheme != "first" && scheme != "always")
    fail(ErrorKind::data, where, ".prepend_scheme is '", excerpt(scheme), "', which is not known");
  out.splits = fields.flag("split", true);
  return out;
}

PreTokenizerStep without_spaces() {
  return {.pattern = Pattern::expression("\\s+"), .behavior = SplitBehavior::removed};
}

PreTokenizerStep punctuation() {
  return {.pattern = Pattern::expression(without_late_punctuation() + "[\\p{P}$+<=>^`|~\u166D\U000111C9]")};
}

PreTokenizerStep pre_tokenizer_of(const json& step, const std::string& type, const std::string& where) {
  PreTokenizerStep out;
  if (type == "Metaspace") return metaspace_step(step, where);
  if (type == "Whitespace" || type == "WhitespaceSplit") {
    const Fields none(step, where, {});
    if (type == "WhitespaceSplit") return without_spaces();
    const std::string word =
        "\\p{L}\\p{M}\\p{Nd}\\p{Nl}\\p{Pc}\u200C\u200D\u24B6-\u24E9\U0001F130-\U0001F149\U0001F150-\U0001F169"
        "\U0001F170-\U0001F189";  // as is_word(): PCRE2's own \\w has other numbers
    return {.pattern = Pattern::expression("[" + word + "]+|[^\\s" + word + "]+"),
            .behavior = SplitBehavior::removed,
            .invert = true};
  }
  if (type == "Split") {
    const Fields fields(step, where, {"pattern", "behavior", "invert"});
    out.pattern = pattern_of(fields);
    out.behavior = behavior_of(fields);
    out.invert = fields.flag("invert", false);
  } else if (type == "ByteLevel") {
    const Fields fields(step, where, {"add_prefix_space", "trim_offsets", "use_regex"});
    out.kind = PreTokenizerKind::byte_level;
    out.prefix_space = fields.flag("add_prefix_space", true);
    if (fields.flag("use_regex", true)) out.pattern = Pattern::expression(gpt2_expression);
  } else if (type == "Digits") {
    out.pattern = Pattern::expression("\\p{N}");
    if (!Fields(step, where, {"individual_digits"}).flag("individual_digits", false))
      out.behavior = SplitBehavior::contiguous;
  } else if (type == "Punctuation") {
    out = punctuation();
    out.behavior = behavior_of(Fields(step, where, {"behavior"}));
  } else {
    refuse_step(where, type,
                "Sequence, Split, ByteLevel, Metaspace, Digits, Punctuation, Whitespace, WhitespaceSplit and "
                "BertPreTokenizer");
  }
  return out;
}

DecoderStep decoder_of(const json& step, const std::string& type, const std::string& where) {
  using Kind = DecoderKind;
  DecoderStep out;
  if (type == "Replace") {
    const Fields fields(step, where, {"pattern", "content"});
    return {Kind::replace, pattern_of(fields), fields.text("content")};
  }
  if (type == "Strip") {
    const Fields fields(step, where, {"content", "start", "stop"});
    const auto count = [&](const char* key) {
      return static_cast<std::size_t>(std::max<std::int64_t>(0, fields.integer(key)));
    };
    out = {Kind::strip, nullptr, fields.text("content"), count("start"), count("stop")};
    if (out.content.empty()) fail(ErrorKind::data, where, ".content is empty");
    return out;
  }
  if (type == "Metaspace") {
    const PreTokenizerStep same = metaspace_step(step, where);
    out = {Kind::metaspace, nullptr, same.replacement};
    out.prefix = same.prepend != PreTokenizerStep::Prepend::never;
    return out;
  }
  if (type == "WordPiece") {
    const Fields fields(step, where, {"prefix", "cleanup"});
    out = {Kind::word_piece, nullptr, fields.text("prefix", "##")};
    out.cleanup = fields.flag("cleanup", true);
    return out;
  }
  for (const auto& [name, kind] :
       {std::pair{"ByteLevel", Kind::byte_level}, std::pair{"ByteFallback", Kind::byte_fallback},
        std::pair{"Fuse", Kind::fuse}})
    if (type == name) {
      const Fields known(step, where, {"add_prefix_space", "trim_offsets", "use_regex"});
      return {kind};
    }
  refuse_step(where, type,
              "Sequence, ByteLevel, Replace, ByteFallback, Fuse, Strip, Metaspace and WordPiece");
}

}  // namespace

template <class Json>
std::vector<NormalizerStep> normalizer_steps(const Json& part) {
  NormalizerSteps out;
  each_step(part, "normalizer", "normalizers", [&](const auto&... step) {
    for (NormalizerStep& each : normalizers_of(step...)) out.push_back(std::move(each));
  });
  return out;
}

template <class Json>
std::vector<PreTokenizerStep> pre_tokenizer_steps(const Json& part) {
  std::vector<PreTokenizerStep> out;
  const auto add = [&](const json& step, const std::string& type, const std::string& where) {
    if (!out.empty() && out.back().kind == PreTokenizerKind::byte_level)
      fail(ErrorKind::data, where, " comes behind ByteLevel, which must be last");
    if (type == "BertPreTokenizer") {
      const Fields none(step, where, {});
      out.push_back(without_spaces()), out.push_back(punctuation());
      return;
    }
    out.push_back(pre_tokenizer_of(step, type, where));
  };
  each_step(part, "pre_tokenizer", "pretokenizers", add);
  return out;
}

template <class Json>
std::vector<DecoderStep> decoder_steps(const Json& part) {
  std::vector<DecoderStep> out;
  each_step(part, "decoder", "decoders", [&](const auto&... step) { out.push_back(decoder_of(step...)); });
  return out;
}

template std::vector<NormalizerStep> normalizer_steps(const nlohmann::json&);
template std::vector<PreTokenizerStep> pre_tokenizer_steps(const nlohmann::json&);
template std::vector<DecoderStep> decoder_steps(const nlohmann::json&);

}  // namespace sherd::data
