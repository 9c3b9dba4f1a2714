#include "data/hugging_face/tokenizer_file.h"

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/text/excerpt.h"
#include "base/text/utf8.h"
#include "data/hugging_face/unicode.h"

namespace sherd::data {
namespace {

using nlohmann::json;

constexpr const char* gpt2_expression =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

/// An object of the file, whose keys are all known.
class Fields {
 public:
  Fields(const json& object, std::string where, const std::vector<std::string>& known)
      : object_(object), where_(std::move(where)) {
    if (!object.is_object()) fail(ErrorKind::data, where_, " is no object");
    for (const auto& [key, value] : object.items())
      if (key != "type" && std::find(known.begin(), known.end(), key) == known.end())
        fail(ErrorKind::data, where_, " has a key '", excerpt(key), "', which is not known here");
  }

  const std::string& where() const { return where_; }
  bool has(const char* key) const { return object_.contains(key) && !object_[key].is_null(); }
  const json& value(const char* key) const {
    if (!has(key)) fail(ErrorKind::data, where_, " has no '", key, "'");
    return object_[key];
  }
  std::string text(const char* key, const char* absent = nullptr) const {
    if (absent && !has(key)) return absent;
    if (!value(key).is_string()) fail(ErrorKind::data, where_, ".", key, " is no string");
    return value(key).get<std::string>();
  }
  bool flag(const char* key, bool absent) const {
    if (!has(key)) return absent;
    if (!value(key).is_boolean()) fail(ErrorKind::data, where_, ".", key, " is neither true nor false");
    return value(key).get<bool>();
  }
  std::int64_t integer(const char* key) const {
    if (!value(key).is_number_integer()) fail(ErrorKind::data, where_, ".", key, " is no integer");
    return value(key).get<std::int64_t>();
  }
  const json& list(const char* key) const {
    if (!value(key).is_array()) fail(ErrorKind::data, where_, ".", key, " is no list");
    return value(key);
  }

 private:
  const json& object_;
  std::string where_;
};

std::string type_of(const json& object, const std::string& where) {
  if (!object.is_object() || !object.contains("type") || !object["type"].is_string())
    fail(ErrorKind::data, where, " has no 'type'");
  return object["type"].get<std::string>();
}

[[noreturn]] void refuse(const std::string& where, const std::string& type, const char* known) {
  fail(ErrorKind::data, where, " is of the type '", excerpt(type), "', which is not supported; known are ",
       known);
}

/// Calls `one` with each step of a part: of a Sequence those in its list `key`.
void each_step(const json& part, const std::string& where, const char* key,
               const std::function<void(const json&, const std::string&, const std::string&)>& one) {
  if (part.is_null()) return;
  const std::string type = type_of(part, where);
  if (type != "Sequence") return one(part, type, where);
  const Fields fields(part, where, {key});
  std::size_t index = 0;
  for (const json& step : fields.list(key))
    each_step(step, cat(where, ".", key, "[", index++, "]"), key, one);
}

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
    out.insert(out.end(), {{NormalizerKind::nfd}, {NormalizerKind::strip_accents}});
  if (lowers) out.push_back({NormalizerKind::lowercase});
  return out;
}

NormalizerSteps normalizer_steps(const json& step, const std::string& type, const std::string& where) {
  using Kind = NormalizerKind;
  if (type == "BertNormalizer")
    return bert_normalizer(
        Fields(step, where, {"clean_text", "handle_chinese_chars", "strip_accents", "lowercase"}));
  if (type == "Replace") {
    const Fields fields(step, where, {"pattern", "content"});
    return {{Kind::replace, pattern_of(fields), fields.text("content")}};
  }
  if (type == "Prepend") return {{Kind::prepend, nullptr, Fields(step, where, {"prepend"}).text("prepend")}};
  if (type == "Strip") {
    const Fields fields(step, where, {"strip_left", "strip_right"});
    return {{Kind::strip, nullptr, "", fields.flag("strip_left", false), fields.flag("strip_right", false)}};
  }
  for (const auto& [name, kind] :
       {std::pair{"NFC", Kind::nfc}, std::pair{"NFD", Kind::nfd}, std::pair{"NFKC", Kind::nfkc},
        std::pair{"NFKD", Kind::nfkd}, std::pair{"Lowercase", Kind::lowercase},
        std::pair{"StripAccents", Kind::strip_accents}})
    if (type == name) {
      const Fields none(step, where, {});
      return {{kind}};
    }
  refuse(
      where, type,
      "Sequence, NFC, NFD, NFKC, NFKD, Replace, Prepend, Lowercase, Strip, StripAccents and BertNormalizer");
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

PreTokenizerStep pre_tokenizer_step(const json& step, const std::string& type, const std::string& where) {
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
    refuse(where, type,
           "Sequence, Split, ByteLevel, Metaspace, Digits, Punctuation, Whitespace, WhitespaceSplit and "
           "BertPreTokenizer");
  }
  return out;
}

DecoderStep decoder_step(const json& step, const std::string& type, const std::string& where) {
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
  refuse(where, type, "Sequence, ByteLevel, Replace, ByteFallback, Fuse, Strip, Metaspace and WordPiece");
}

/// The one id of a token in a TemplateProcessing's own table.
std::int64_t id_of_special(const Fields& step, const std::string& token) {
  const json& table = step.value("special_tokens");
  if (!table.is_object() || !table.contains(token))
    fail(ErrorKind::data, step.where(), ".special_tokens does not have '", excerpt(token), "'");
  const Fields fields(table[token], step.where() + ".special_tokens", {"id", "ids", "tokens"});
  const json& ids = fields.list("ids");
  if (ids.size() != 1 || !ids.front().is_number_integer())
    fail(ErrorKind::data, step.where(), " puts ", ids.size(), " tokens in front of a text for '",
         excerpt(token), "'; one is supported");
  return ids.front().get<std::int64_t>();
}

/// A token at an end of a text, and the id that the step itself gives it; an empty one: nothing.
struct EndToken {
  std::string token;
  std::int64_t id = 0;
};
struct EndTokens {
  EndToken begin, end;
};

/// [CLS] and [SEP], as pairs of a token and its id.
EndTokens bert_ends(const Fields& step) {
  const auto token = [&](const char* key) {
    const json& pair = step.list(key);
    if (pair.size() != 2 || !pair[0].is_string() || !pair[1].is_number_integer())
      fail(ErrorKind::data, step.where(), ".", key, " is no token and its id");
    return EndToken{pair[0].get<std::string>(), pair[1].get<std::int64_t>()};
  };
  return {token("cls"), token("sep")};
}

EndTokens ends_of(const json& step, const std::string& type, const std::string& where) {
  if (type == "ByteLevel") return {};  // it changes offsets alone
  if (type == "BertProcessing" || type == "RobertaProcessing")
    return bert_ends(Fields(step, where, {"cls", "sep", "trim_offsets", "add_prefix_space"}));
  if (type != "TemplateProcessing")
    refuse(where, type, "Sequence, ByteLevel, TemplateProcessing, BertProcessing and RobertaProcessing");
  const Fields fields(step, where, {"single", "pair", "special_tokens"});
  std::vector<std::string> before, behind;
  bool text = false;
  for (const json& part : fields.list("single")) {
    if (part.is_object() && part.contains("Sequence")) {
      text = true;
      continue;
    }
    const Fields token(part, where + ".single", {"SpecialToken"});
    (text ? behind : before)
        .push_back(Fields(token.value("SpecialToken"), where + ".single", {"id", "type_id"}).text("id"));
  }
  if (!text) fail(ErrorKind::data, where, ".single has no place for the text");
  if (before.size() > 1) fail(ErrorKind::data, where, " puts more than one token in front of a text");
  EndTokens out;
  if (!before.empty()) out.begin = {before[0], id_of_special(fields, before[0])};
  if (behind.size() == 1) out.end = {behind[0], id_of_special(fields, behind[0])};
  return out;
}

std::pair<std::string, std::string> merge_of(const json& merge) {
  if (merge.is_string()) {
    const std::string& text = merge.get_ref<const std::string&>();
    const std::size_t space = text.find(' ');
    if (space != std::string::npos && text.find(' ', space + 1) == std::string::npos)
      return {text.substr(0, space), text.substr(space + 1)};
  } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
    return {merge[0].get<std::string>(), merge[1].get<std::string>()};
  }
  fail(ErrorKind::data, "model.merges has ", excerpt(merge.dump()), ", which is no pair of tokens");
}

/// Ids index tables: one that is far beyond any vocabulary is a mistake of the file.
std::int32_t checked_id(std::int64_t id, const std::string& token) {
  constexpr std::int64_t most = std::int64_t{1} << 24;
  if (id < 0 || id >= most)
    fail(ErrorKind::data, "'", excerpt(token), "' has id ", id, ", and ids are 0 to ", most - 1);
  return static_cast<std::int32_t>(id);
}

void read_vocabulary(const Fields& model, BpeParts& out) {
  if (!model.value("vocab").is_object()) fail(ErrorKind::data, "model.vocab is no object");
  for (const auto& [token, id] : model.value("vocab").items()) {
    if (!id.is_number_integer())
      fail(ErrorKind::data, "model.vocab: '", excerpt(token), "' has no integer id");
    out.vocabulary.emplace_back(token, checked_id(id.get<std::int64_t>(), token));
  }
}

BpeParts bpe_of(const json& model) {
  const Fields fields(model, "model",
                      {"dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk",
                       "byte_fallback", "ignore_merges", "vocab", "merges"});
  if (fields.has("dropout") && fields.value("dropout") != 0)
    fail(ErrorKind::data, "model.dropout is set: a text has many encodings then; set it to null");
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"})
    if (!fields.text(key, "").empty())
      fail(ErrorKind::data, "model.", key, " is set, which is not supported");
  BpeParts out;
  out.unknown = fields.text("unk_token", "");
  out.fuse_unknown = fields.flag("fuse_unk", false);
  out.byte_fallback = fields.flag("byte_fallback", false);
  out.ignore_merges = fields.flag("ignore_merges", false);
  read_vocabulary(fields, out);
  for (const json& merge : fields.list("merges")) out.merges.push_back(merge_of(merge));
  return out;
}

void read_model(const json& model, TokenizerFile& out) {
  const bool named = model.is_object() && model.contains("type");
  // Older files do not name the type; those of WordPiece have no merges.
  const std::string type = named                                           ? type_of(model, "model")
                           : model.is_object() && model.contains("merges") ? "BPE"
                                                                           : "WordPiece";
  if (type == "BPE") return void(out.model = bpe_of(model));
  if (type != "WordPiece")
    fail(ErrorKind::data, "model is of the type '", excerpt(type),
         "', and BPE and WordPiece are read; where the model came with a SentencePiece file, give spm:MODEL");
  const Fields fields(model, "model",
                      {"unk_token", "continuing_subword_prefix", "max_input_chars_per_word", "vocab"});
  out.word_piece = {
      fields.text("continuing_subword_prefix", "##"),
      fields.has("max_input_chars_per_word") ? fields.integer("max_input_chars_per_word") : 100};
  if (out.word_piece->longest < 1)
    fail(ErrorKind::data, "model.max_input_chars_per_word is ", out.word_piece->longest,
         ", and must be 1 or more");
  out.model.unknown = fields.text("unk_token", "[UNK]");
  read_vocabulary(fields, out.model);
}

AddedToken added_token(const json& token, const std::string& where) {
  const Fields fields(token, where,
                      {"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"});
  const bool special = fields.flag("special", false);
  const std::string content = fields.text("content");
  return {checked_id(fields.integer("id"), content),
          content,
          fields.flag("single_word", false),
          fields.flag("lstrip", false),
          fields.flag("rstrip", false),
          fields.flag("normalized", !special),
          special};
}

/// The package numbers added tokens itself: as in the vocabulary, else behind it in the order of the file.
void check_ids(const TokenizerFile& file) {
  std::unordered_map<std::string, std::int32_t> ids(file.model.vocabulary.begin(),
                                                    file.model.vocabulary.end());
  auto next = static_cast<std::int32_t>(ids.size());
  for (const AddedToken& token : file.added) {
    const auto [known, fresh] = ids.try_emplace(token.content, next);
    next += fresh;
    if (known->second != token.id)
      fail(ErrorKind::data, "added token '", excerpt(token.content), "' has the id ", token.id,
           ", and the tokenizers package gives it ", known->second, "; load the file there and save it anew");
  }
}

void read_pre_tokenizer(const Fields& root, TokenizerFile& out) {
  const auto add = [&](const json& step, const std::string& type, const std::string& where) {
    if (out.model.byte_level) fail(ErrorKind::data, where, " comes behind ByteLevel, which must be last");
    if (type == "BertPreTokenizer") {
      const Fields none(step, where, {});
      out.pre_tokenizer.push_back(without_spaces()), out.pre_tokenizer.push_back(punctuation());
      return;
    }
    out.pre_tokenizer.push_back(pre_tokenizer_step(step, type, where));
    out.model.byte_level = type == "ByteLevel";
  };
  if (root.has("pre_tokenizer"))
    each_step(root.value("pre_tokenizer"), "pre_tokenizer", "pretokenizers", add);
}

TokenizerFile tokenizer_file_of(const json& object) {
  const Fields root(object, "the file",
                    {"version", "truncation", "padding", "added_tokens", "normalizer", "pre_tokenizer",
                     "post_processor", "decoder", "model"});
  if (root.text("version", "1.0") != "1.0")
    fail(ErrorKind::data, "the file is of version '", excerpt(root.text("version")), "', and 1.0 is read");
  TokenizerFile out;
  read_model(root.value("model"), out);
  if (root.has("added_tokens")) {
    std::size_t index = 0;
    for (const json& each : root.list("added_tokens"))
      // One without a text is none, to the package too.
      if (AddedToken token = added_token(each, cat("added_tokens[", index++, "]")); !token.content.empty())
        out.added.push_back(std::move(token));
  }
  check_ids(out);
  if (root.has("normalizer"))
    each_step(root.value("normalizer"), "normalizer", "normalizers", [&](const auto&... step) {
      for (NormalizerStep& each : normalizer_steps(step...)) out.normalizer.push_back(std::move(each));
    });
  read_pre_tokenizer(root, out);
  if (root.has("decoder")) {
    out.decoder.emplace();
    each_step(root.value("decoder"), "decoder", "decoders",
              [&](const auto&... step) { out.decoder->push_back(decoder_step(step...)); });
  }
  if (root.has("post_processor"))
    each_step(root.value("post_processor"), "post_processor", "processors", [&](const auto&... step) {
      const auto [begin, end] = ends_of(step...);
      // The step's table counts, as files that were trained anew have another there than the vocabulary.
      const auto known = [&](const EndToken& at, const char* place) {
        const std::string token = out.token_of(at.id);
        if (token.empty())
          fail(ErrorKind::data, "post_processor puts '", excerpt(at.token), "' with the id ", at.id, place,
               " a text, which no token has");
        return token;
      };
      if (!begin.token.empty()) out.begin = known(begin, " in front of");
      if (!end.token.empty()) out.end = known(end, " behind");
    });
  return out;
}

}  // namespace

std::string TokenizerFile::token_of(std::int64_t id) const {
  // The last of one id counts.
  for (auto token = added.rbegin(); token != added.rend(); ++token)
    if (token->id == id) return token->content;
  for (const auto& [token, of_token] : model.vocabulary)
    if (of_token == id) return token;
  return {};
}

TokenizerFile parse_tokenizer_file(const std::string& bytes) {
  try {
    return tokenizer_file_of(json::parse(bytes));
  } catch (const json::exception& error) {
    fail(ErrorKind::data, "the file is no JSON: ", excerpt(error.what(), 300));
  }
}

}  // namespace sherd::data
