#include "data/hugging_face/model_of_file.h"

#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/text/excerpt.h"
#include "data/hugging_face/json_fields.h"

namespace sherd::data {
namespace {

using nlohmann::json;
using Fields = JsonFields<json>;

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

void read_word_piece(const json& model, TokenizerFile& out) {
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

void read_unigram(const json& model, TokenizerFile& out) {
  const Fields fields(model, "model", {"unk_id", "byte_fallback", "vocab"});
  UnigramOptions& options = out.unigram.emplace();
  std::int64_t id = 0;
  for (const json& piece : fields.list("vocab")) {
    if (!piece.is_array() || piece.size() != 2 || !piece[0].is_string() || !piece[1].is_number())
      fail(ErrorKind::data, "model.vocab has ", excerpt(piece.dump()), ", which is no piece and its score");
    const std::string text = piece[0].get<std::string>();
    out.model.vocabulary.emplace_back(text, checked_id(id++, text));
    options.scores.push_back(piece[1].get<double>());
  }
  out.model.byte_fallback = fields.flag("byte_fallback", false);
  if (!fields.has("unk_id")) return;
  const std::int64_t unknown = fields.integer("unk_id");
  if (unknown < 0 || unknown >= id)
    fail(ErrorKind::data, "model.unk_id is ", unknown, ", and the vocabulary has ", id, " pieces");
  options.unknown = static_cast<std::int32_t>(unknown);
}

/// Older files do not name it: Unigram has a list of pieces, and WordPiece no merges.
std::string type_of_model(const json& model) {
  if (!model.is_object() || model.contains("type")) return type_of(model, "model");
  if (model.contains("merges")) return "BPE";
  return model.contains("vocab") && model["vocab"].is_array() ? "Unigram" : "WordPiece";
}

}  // namespace

template <class Json>
void read_model(const Json& model, TokenizerFile& out) {
  const std::string type = type_of_model(model);
  if (type == "BPE") return void(out.model = bpe_of(model));
  if (type == "WordPiece") return read_word_piece(model, out);
  if (type == "Unigram") return read_unigram(model, out);
  refuse_step("model", type, "BPE, WordPiece and Unigram");
}

template void read_model(const nlohmann::json&, TokenizerFile&);

}  // namespace sherd::data
