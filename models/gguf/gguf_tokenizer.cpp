#include "models/gguf/gguf_tokenizer.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "base/error.h"
#include "base/log.h"
#include "base/text/excerpt.h"
#include "models/gguf/gguf_specials.h"
#include "models/gguf/gguf_vocabulary.h"
#include "models/gguf/sentencepiece_file.h"

namespace sherd::models {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view written_space = "\u2581";  // as SentencePiece has it

/// Kinds of tokens, by files' numbers.
struct GgufTokenType {
  static constexpr std::int32_t normal = 1, unknown = 2, control = 3, user_defined = 4, unused = 5, byte = 6;
};

[[noreturn]] void refuse_tokenizer(const std::string& what) {
  fail(ErrorKind::config, "the model's tokenizer has no form in GGUF: ", what,
       ". llama.cpp would find other ids; export without --format gguf, for transformers");
}

/// The parts of a Sequence, or of what is one part alone; none of null.
std::vector<Json> steps_of(const Json& file, const char* part, const char* list) {
  if (!file.contains(part) || file[part].is_null()) return {};
  const Json& there = file[part];
  if (there.value("type", "") != "Sequence") return {there};
  return there[list].get<std::vector<Json>>();
}

std::string type_of(const Json& step) {
  return step.value("type", "");
}

/// The tokens of a file, by id.
class GgufVocabulary {
 public:
  explicit GgufVocabulary(std::int64_t ids) : tokens_(static_cast<std::size_t>(ids)) {}

  void set(std::int64_t id, std::string text, std::int32_t type, double score = 0) {
    if (id < 0 || id >= std::ssize(tokens_)) {
      ++left_out_;
      return;
    }
    tokens_[static_cast<std::size_t>(id)] = {std::move(text), type, static_cast<float>(score)};
  }
  std::int32_t type(std::int64_t id) const { return tokens_.at(static_cast<std::size_t>(id)).type; }
  void write(GgufMetadata& to, bool scored) {
    std::vector<std::string> texts;
    std::vector<std::int32_t> types;
    std::vector<float> scores;
    std::unordered_set<std::string> there;
    for (std::size_t id = 0; id < tokens_.size(); ++id) {
      Token& token = tokens_[id];
      if (token.type == 0) token = {cat("[PAD", id, "]"), GgufTokenType::unused, -1000};  // a row of no token
      if (!there.insert(token.text).second)
        refuse_tokenizer(cat("two of its ids are '", excerpt(token.text), "'"));
      texts.push_back(token.text), types.push_back(token.type), scores.push_back(token.score);
    }
    if (left_out_ > 0)
      log_warning("the tokenizer has ", left_out_,
                  " tokens for which the model has no rows: the file leaves them out");
    to.set("tokenizer.ggml.tokens", std::move(texts));
    if (scored) to.set("tokenizer.ggml.scores", std::move(scores));
    to.set("tokenizer.ggml.token_type", std::move(types));
  }

 private:
  struct Token {
    std::string text;
    std::int32_t type = 0;
    float score = 0;
  };
  std::vector<Token> tokens_;
  std::int64_t left_out_ = 0;
};

TokenIds ids_of(const Json& file) {
  TokenIds out;
  const Json& vocabulary = file.at("model").at("vocab");
  if (vocabulary.is_object())
    for (const auto& [token, id] : vocabulary.items()) out.emplace(token, id.get<std::int64_t>());
  else
    for (std::size_t id = 0; id < vocabulary.size(); ++id)
      out.emplace(vocabulary[id][0].get<std::string>(), static_cast<std::int64_t>(id));
  for (const Json& token : file.value("added_tokens", Json::array()))
    out.emplace(token.at("content").get<std::string>(), token.at("id").get<std::int64_t>());
  return out;
}

TokenMerges merges_of(const Json& model) {
  TokenMerges out;
  for (const Json& merge : model.at("merges")) {
    if (merge.is_array()) {
      out.emplace_back(merge[0].get<std::string>(), merge[1].get<std::string>());
      continue;
    }
    const std::string text = merge.get<std::string>();
    const std::size_t between = text.find(' ', 1);
    out.emplace_back(text.substr(0, between), text.substr(between + 1));
  }
  return out;
}

std::unordered_set<std::string> added_to(const Json& file) {
  std::unordered_set<std::string> out;
  for (const Json& token : file.value("added_tokens", Json::array()))
    out.insert(token.at("content").get<std::string>());
  return out;
}

/// How texts are cut into words, step by step, as pre_tokenizer_of() takes it.
std::vector<std::string> cuts_of(const Json& file) {
  std::vector<std::string> out;
  for (const Json& step : steps_of(file, "pre_tokenizer", "pretokenizers")) {
    const std::string type = type_of(step);
    if (type == "Split" && step.value("behavior", "") == "Isolated" && !step.value("invert", false) &&
        step.at("pattern").contains("Regex")) {
      std::string regex = "split ";
      for (const char c :
           step["pattern"]["Regex"].get<std::string>())  // some files have line ends themselves
        regex += c == '\r' ? "\\r" : c == '\n' ? "\\n" : std::string{c};
      out.push_back(std::move(regex));
    } else if (type == "Digits" && step.value("individual_digits", false)) {
      out.emplace_back("digits");
    } else if (type == "ByteLevel" && !step.value("add_prefix_space", true)) {
      if (step.value("use_regex", true)) out.emplace_back("words");
    } else {
      out.push_back(type);
    }
  }
  return out;
}

/// Tokens that are looked for in the text itself.
void set_added(GgufVocabulary& to, const Json& file) {
  std::vector<std::string> strips;
  for (const Json& token : file.value("added_tokens", Json::array())) {
    const std::string text = token.at("content").get<std::string>();
    if (token.value("single_word", false))
      refuse_tokenizer(cat("its token '", excerpt(text), "' is found at whole words alone"));
    if (token.value("lstrip", false) || token.value("rstrip", false)) strips.push_back(text);
    to.set(token.at("id").get<std::int64_t>(), text,
           token.value("special", false) ? GgufTokenType::control : GgufTokenType::user_defined);
  }
  if (!strips.empty())
    log_warning("llama.cpp leaves the white space beside '", excerpt(strips[0]), "'",
                strips.size() > 1 ? cat(" and ", strips.size() - 1, " more tokens") : "",
                ", which this tokenizer takes along: texts with such tokens have other ids there");
}

/// Byte-level BPE.
void describe_bytes(GgufMetadata& to, GgufVocabulary& tokens, const Json& file) {
  const Json& model = file.at("model");
  for (const Json& step : steps_of(file, "normalizer", "normalizers")) {
    if (type_of(step) != "NFC") refuse_tokenizer(cat("its normalizer ", type_of(step)));
    log_warning(
        "llama.cpp does not normalise texts (NFC), as this tokenizer does: the few that are not in that "
        "form already have other ids there");
  }
  const TokenIds ids = ids_of(file);
  const TokenMerges merges = merges_of(model);
  const std::vector<std::string> cuts = cuts_of(file);
  const bool ignores = model.value("ignore_merges", false);
  const GgufPreTokenizer* pre = pre_tokenizer_of(cuts, ignores);
  if (!pre) {
    std::string steps;
    for (const std::string& cut : cuts) steps += cat(steps.empty() ? "" : ", then ", cut);
    refuse_tokenizer(cat("no pre-tokenizer of llama.cpp does what its own does: ", excerpt(steps, 300)));
  }
  if (pre->ignores_merges != ignores)
    if (const std::string token = token_beyond_merges(ids, merges, added_to(file)); !token.empty())
      refuse_tokenizer(cat("its merges do not make its token '", excerpt(token),
                           "', and its ignore_merges is ", ignores ? "true" : "false"));
  to.set("tokenizer.ggml.model", "gpt2");
  to.set("tokenizer.ggml.pre", pre->name);
  for (const auto& [token, id] : ids) tokens.set(id, token, GgufTokenType::normal);
  set_added(tokens, file);
  tokens.write(to, false);
  std::vector<std::string> lines;
  for (const auto& [left, right] : merges) lines.push_back(cat(left, ' ', right));
  to.set("tokenizer.ggml.merges", std::move(lines));
}

/// Whether a text begins with a space that it does not have, and behind special tokens likewise.
bool prefixes_space(const Json& file) {
  bool normalizer = false;
  for (const Json& step : steps_of(file, "normalizer", "normalizers")) {
    const std::string type = type_of(step);
    const bool spaces = type == "Replace" && step.at("pattern").value("String", "") == " " &&
                        step.value("content", "") == written_space;
    const bool prepends = type == "Prepend" && step.value("prepend", "") == written_space;
    if (!spaces && !prepends) refuse_tokenizer(cat("its normalizer ", type));
    normalizer = normalizer || prepends;
  }
  std::string scheme;
  for (const Json& step : steps_of(file, "pre_tokenizer", "pretokenizers")) {
    if (type_of(step) == "Split" && step.at("pattern").value("String", "") == " ") continue;  // none is left
    if (type_of(step) != "Metaspace" || step.value("replacement", "") != written_space)
      refuse_tokenizer(cat("its pre-tokenizer ", type_of(step)));
    scheme = step.value("prepend_scheme", step.value("add_prefix_space", true) ? "always" : "never");
  }
  if (scheme == "first" || scheme == "always")
    log_warning(
        "llama.cpp puts a space in front of text behind special tokens, and of text that begins with one, "
        "where "
        "this tokenizer puts none: begin such text without a space there");
  return normalizer || scheme == "first" || scheme == "always";
}

/// BPE of SentencePiece's kind: whole texts, whose spaces are a letter, and bytes for what is not there.
void describe_pieces(GgufMetadata& to, GgufVocabulary& tokens, const Json& file) {
  const Json& model = file.at("model");
  if (!model.value("byte_fallback", false))
    refuse_tokenizer("BPE that is neither of bytes nor falls back to them");
  const TokenIds ids = ids_of(file);
  std::string odd;
  const std::optional<TokenIds> ranks = ranks_of_pieces(ids, merges_of(model), added_to(file), odd);
  if (!ranks)
    refuse_tokenizer(
        cat("its merges are not those of a SentencePiece model, which has all pairs of tokens that make '",
            excerpt(odd), "', one behind the other"));
  to.set("tokenizer.ggml.model", "llama");
  to.set("tokenizer.ggml.pre", "default");
  for (const auto& [token, id] : ids) {
    const bool is_byte = token.size() == 6 && token.starts_with("<0x") && token.back() == '>';
    const auto rank = ranks->find(token);
    tokens.set(id, token, is_byte ? GgufTokenType::byte : GgufTokenType::normal,
               rank == ranks->end() ? 0.0 : -1.0 - static_cast<double>(rank->second));
  }
  set_added(tokens, file);
  const std::string unk =
      model.value("unk_token", Json()).is_string() ? model["unk_token"].get<std::string>() : "";
  if (const auto found = ids.find(unk); found != ids.end()) {
    tokens.set(found->second, unk, GgufTokenType::unknown);
    to.set("tokenizer.ggml.unknown_token_id", found->second);
  }
  tokens.write(to, true);
  to.set("tokenizer.ggml.add_space_prefix", GgufValue(prefixes_space(file)));
}

void describe_unigram(GgufMetadata& to, GgufVocabulary& tokens, const Json& file) {
  const Json& model = file.at("model");
  if (model.value("byte_fallback", false)) refuse_tokenizer("a unigram model that falls back to bytes");
  std::string charsmap;
  for (const Json& step : steps_of(file, "normalizer", "normalizers")) {
    if (type_of(step) != "Precompiled" || !charsmap.empty())
      refuse_tokenizer(cat("its normalizer ", type_of(step)));
    charsmap = step.at("precompiled_charsmap").get<std::string>();
  }
  bool merges_spaces = false, metaspace = false;
  for (const Json& step : steps_of(file, "pre_tokenizer", "pretokenizers")) {
    if (type_of(step) == "WhitespaceSplit" && !metaspace) {
      merges_spaces = true;
      continue;
    }
    metaspace = type_of(step) == "Metaspace" && step.value("replacement", "") == written_space &&
                step.value("prepend_scheme", "always") != "never";
    if (!metaspace) refuse_tokenizer(cat("its pre-tokenizer ", type_of(step)));
  }
  if (!metaspace) refuse_tokenizer("a unigram model without Metaspace");
  if (!merges_spaces)
    log_warning(
        "llama.cpp puts a space in front of a text that begins with spaces, too, where this tokenizer does "
        "not");
  const Json& vocabulary = model.at("vocab");
  for (std::size_t id = 0; id < vocabulary.size(); ++id) {
    const std::string text = vocabulary[id][0].get<std::string>();
    if (text.find(written_space, 1) != std::string::npos && merges_spaces)
      refuse_tokenizer(cat("its token '", excerpt(text), "' has a space within"));
    tokens.set(static_cast<std::int64_t>(id), text, GgufTokenType::normal, vocabulary[id][1].get<double>());
  }
  set_added(tokens, file);
  if (const Json& unk = model.value("unk_id", Json()); unk.is_number()) {
    const auto id = unk.get<std::int64_t>();
    tokens.set(id, vocabulary.at(static_cast<std::size_t>(id))[0].get<std::string>(), GgufTokenType::unknown);
    to.set("tokenizer.ggml.unknown_token_id", id);
  }
  to.set("tokenizer.ggml.model", "t5");
  to.set("tokenizer.ggml.pre", "default");
  tokens.write(to, true);
  to.set("tokenizer.ggml.add_space_prefix", GgufValue(true));
  to.set("tokenizer.ggml.remove_extra_whitespaces", GgufValue(merges_spaces));
  if (!charsmap.empty()) to.set("tokenizer.ggml.precompiled_charsmap", bytes_of_base64(charsmap));
}

void describe_words(GgufMetadata& to, GgufVocabulary& tokens, const Json& file) {
  const Json& model = file.at("model");
  if (model.value("continuing_subword_prefix", "##") != "##")
    refuse_tokenizer("WordPiece with another prefix than ##");
  const auto pre = steps_of(file, "pre_tokenizer", "pretokenizers"),
             normalizer = steps_of(file, "normalizer", "normalizers");
  if (pre.size() != 1 || type_of(pre[0]) != "BertPreTokenizer")
    refuse_tokenizer("WordPiece without BertPreTokenizer");
  if (normalizer.size() != 1 || type_of(normalizer[0]) != "BertNormalizer" ||
      !normalizer[0].value("clean_text", true) || !normalizer[0].value("handle_chinese_chars", true))
    refuse_tokenizer("WordPiece without BertNormalizer's clean_text and handle_chinese_chars");
  const TokenIds ids = ids_of(file);
  for (const auto& [token, id] : ids)
    tokens.set(id, token.starts_with("##") ? token.substr(2) : cat(written_space, token),
               GgufTokenType::normal);
  set_added(tokens, file);
  to.set("tokenizer.ggml.model", "bert");
  to.set("tokenizer.ggml.pre", "default");
  tokens.write(to, false);
  const bool lower = normalizer[0].value("lowercase", true);
  log_warning(
      "llama.cpp takes marks of Indic scripts for accents, and has no longest word: texts with these have "
      "other ids "
      "there");
  const Json strip = normalizer[0].value("strip_accents", Json());
  to.set("tokenizer.ggml.normalizer.lowercase", GgufValue(lower));
  to.set("tokenizer.ggml.normalizer.strip_accents",
         GgufValue(strip.is_boolean() ? strip.get<bool>() : lower));
  if (const auto unk = ids.find(model.value("unk_token", "[UNK]")); unk != ids.end())
    to.set("tokenizer.ggml.unknown_token_id", unk->second);
}

/// The tokens that the post-processor puts around a text.
TextEnds tokens_around(const Json& file) {
  TextEnds out;
  for (const Json& step : steps_of(file, "post_processor", "processors")) {
    const std::string type = type_of(step);
    if (type == "BertProcessing" || type == "RobertaProcessing")
      out = {step.at("cls")[0].get<std::string>(), step.at("sep")[0].get<std::string>()};
    if (type != "TemplateProcessing") continue;
    bool text = false;
    for (const Json& item : step.at("single")) {
      if (!item.contains("SpecialToken")) {
        text = true;
        continue;
      }
      std::string& side = text ? out.end : out.begin;
      if (!side.empty()) refuse_tokenizer("it puts several tokens in front of a text, or behind it");
      side = item["SpecialToken"].at("id").get<std::string>();
    }
  }
  return out;
}

void describe_json(GgufMetadata& to, const GgufTokenizer& tokenizer) {
  const Json file = Json::parse(tokenizer.json);
  const std::string kind = file.at("model").value("type", "BPE");
  bool of_bytes = false;
  for (const Json& step : steps_of(file, "pre_tokenizer", "pretokenizers"))
    of_bytes = of_bytes || type_of(step) == "ByteLevel";
  GgufVocabulary tokens(tokenizer.ids);
  const bool words = kind == "WordPiece";
  if (kind == "Unigram")
    describe_unigram(to, tokens, file);
  else if (words)
    describe_words(to, tokens, file);
  else if (kind == "BPE")
    of_bytes ? describe_bytes(to, tokens, file) : describe_pieces(to, tokens, file);
  else
    refuse_tokenizer(cat("a model of type ", kind));
  const TextEnds side = tokens_around(file);
  if (words && (side.begin.empty() || side.end.empty()))
    refuse_tokenizer("WordPiece that puts no tokens around a text");
  describe_specials(to, tokenizer, ids_of(file), side, words);
}

void describe_sentencepiece(GgufMetadata& to, const GgufTokenizer& tokenizer) {
  const SentencePieceFile file = SentencePieceFile::parse(tokenizer.sentencepiece);
  if (!file.escapes_spaces) refuse_tokenizer("a SentencePiece model that keeps spaces as they are");
  if (file.bpe && (file.removes_spaces || !file.charsmap.empty()))
    refuse_tokenizer("a SentencePiece model of BPE that normalises texts, or takes spaces out of them");
  GgufVocabulary tokens(tokenizer.ids);
  TokenIds ids;
  for (std::size_t id = 0; id < file.pieces.size(); ++id) {
    const auto& piece = file.pieces[id];
    if (!file.bpe && piece.type == GgufTokenType::byte)
      refuse_tokenizer("a unigram model that falls back to bytes");
    tokens.set(static_cast<std::int64_t>(id), piece.text, piece.type, piece.score);
    ids.emplace(piece.text, static_cast<std::int64_t>(id));
    if (piece.type == GgufTokenType::unknown)
      to.set("tokenizer.ggml.unknown_token_id", static_cast<std::int64_t>(id));
  }
  if (!ids.contains("</s>") && tokenizer.ids > std::ssize(file.pieces))
    tokens.set(ids["</s>"] = std::ssize(file.pieces), "</s>",
               GgufTokenType::control);  // Sherd's end of a document
  to.set("tokenizer.ggml.model", file.bpe ? "llama" : "t5");
  to.set("tokenizer.ggml.pre", "default");
  tokens.write(to, true);
  to.set("tokenizer.ggml.add_space_prefix", GgufValue(file.prefix_space));
  if (!file.bpe) to.set("tokenizer.ggml.remove_extra_whitespaces", GgufValue(file.removes_spaces));
  if (!file.charsmap.empty())
    to.set("tokenizer.ggml.precompiled_charsmap",
           std::vector<std::uint8_t>(file.charsmap.begin(), file.charsmap.end()));
  // Nothing stands in front of a text, and behind it an end where an encoder reads it.
  describe_specials(to, tokenizer, ids, {"", tokenizer.of_encoder ? "</s>" : ""}, false, "</s>");
}

void describe_byte_ids(GgufMetadata& to, const GgufTokenizer& tokenizer) {
  GgufVocabulary tokens(tokenizer.ids);
  for (int value = 0; value < 256; ++value) tokens.set(value, letter_of(value), GgufTokenType::normal);
  tokens.set(256, "<|endoftext|>", GgufTokenType::control);
  to.set("tokenizer.ggml.model", "gpt2");
  to.set("tokenizer.ggml.pre", "gpt-2");  // where words end makes no difference
  tokens.write(to, false);
  to.set("tokenizer.ggml.merges", std::vector<std::string>());
  describe_specials(to, tokenizer, {{"<|endoftext|>", 256}}, {}, false, "<|endoftext|>");
}

}  // namespace

void describe_tokenizer(GgufMetadata& to, const GgufTokenizer& tokenizer) {
  try {
    if (!tokenizer.json.empty())
      describe_json(to, tokenizer);
    else if (!tokenizer.sentencepiece.empty())
      describe_sentencepiece(to, tokenizer);
    else if (tokenizer.bytes)
      describe_byte_ids(to, tokenizer);
    else
      refuse_tokenizer("there is neither a tokenizer.json nor a SentencePiece model");
  } catch (const Json::exception& e) {
    fail(ErrorKind::data,
         "the model's tokenizer.json is not as the tokenizers package writes it: ", e.what());
  }
  if (tokenizer.token_types > 0) to.set("tokenizer.ggml.token_type_count", tokenizer.token_types);
  describe_template(to, tokenizer);
}

}  // namespace sherd::models
