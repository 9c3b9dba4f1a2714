#include <sentencepiece_processor.h>

#include <algorithm>
#include <array>

#include "base/error.h"
#include "base/text/utf8.h"
#include "data/hugging_face/added_tokens.h"
#include "data/hugging_face/segmentation/word_cache.h"
#include "data/tokenizer.h"

namespace sherd::data {
namespace {

constexpr std::string_view replacement = "\xef\xbf\xbd";  // U+FFFD

class SentencePieceTokenizer final : public Tokenizer {
 public:
  SentencePieceTokenizer(const std::string& path, const std::string& bytes) : spec_("spm:" + path) {
    const auto status = model_.LoadFromSerializedProto(bytes);
    if (!status.ok() || model_.GetPieceSize() <= 0)
      fail(ErrorKind::data, "'", path,
           "' is no SentencePiece model; give a .model file as spm:MODEL, or train one ",
           "with 'sherd prepare --tokenizer spm-train:VOCAB'");
    pieces_ = model_.GetPieceSize();
    end_of_document_ = model_.eos_id() >= 0 ? model_.eos_id() : static_cast<std::int32_t>(pieces_);
    find_byte_pieces();
    find_controls();
    probe();
  }

  using Tokenizer::encode;
  void encode(std::string_view text, const EncodeOptions& how,
              std::vector<std::int32_t>& ids) const override {
    // The model puts a space in front of all that it is given: it stands for the one that is there.
    if (how.behind != EncodeOptions::Behind::nothing && dummy_prefix_ && text.starts_with(' '))
      text.remove_prefix(1);
    // SentencePiece would turn bytes that are no UTF-8 into U+FFFD, and a written U+2581 into a space: these
    // go into byte pieces one by one, what lies between goes to the model.
    std::size_t begin = 0;
    std::unique_ptr<WordCache> words = words_.take();
    const auto pass = [&](std::size_t end) {
      if (end > begin) encode_clean(text.substr(begin, end - begin), *words, ids);
    };
    for (std::size_t at = 0; at < text.size();) {
      const unsigned char lead = static_cast<unsigned char>(text[at]);
      if (lead < 0x80) {
        ++at;
        continue;
      }
      const std::size_t length = utf8_length(text.substr(at));
      const bool mark = has_bytes_ && length == 3 && text.substr(at, 3) == space_mark;
      if (length != 0 && !mark) {
        at += length;
        continue;
      }
      pass(at);
      const std::size_t count = mark ? 3 : 1;
      if (has_bytes_)
        for (std::size_t i = 0; i < count; ++i)
          ids.push_back(byte_ids_[static_cast<unsigned char>(text[at + i])]);
      else
        encode_clean(replacement, *words, ids);
      begin = at += count;
    }
    pass(text.size());
    words_.give_back(std::move(words));
  }

  std::string decode(std::span<const std::int32_t> ids) const override {
    std::string text;
    for (const std::int32_t id : ids) {
      require(id >= 0 && id < vocab_size(), "token ", id, " is outside the vocabulary of ", vocab_size(),
              " of ", spec_);
      if (is_special(id)) continue;
      if (model_.IsUnknown(id))
        text += replacement;
      else if (byte_values_[static_cast<std::size_t>(id)] >= 0)
        text.push_back(static_cast<char>(byte_values_[static_cast<std::size_t>(id)]));
      else
        append_piece(model_.IdToPiece(id), text);
    }
    if (dummy_prefix_ && text.starts_with(' ')) text.erase(0, 1);
    return text;
  }

  std::int64_t vocab_size() const override { return std::max<std::int64_t>(pieces_, end_of_document_ + 1); }
  std::int32_t end_of_document() const override { return end_of_document_; }
  std::optional<std::int32_t> token_id(std::string_view token) const override {
    // The unknown one for a token that there is not.
    const int id = model_.PieceToId({token.data(), token.size()});
    if (id < 0 || id >= pieces_ || model_.IdToPiece(id) != token) return std::nullopt;
    return id;
  }
  std::string token(std::int32_t id) const override {
    return id >= 0 && id < pieces_ ? model_.IdToPiece(id) : std::string();
  }
  std::vector<Spelled> special_tokens_in(std::string_view text) const override {
    std::vector<AddedTokens::Found> found;
    controls_->find(text, false, true, found);
    std::vector<Spelled> out;
    for (const AddedTokens::Found& each : found) out.push_back({each.token->id, each.begin, each.end});
    return out;
  }
  bool is_special(std::int32_t id) const override {
    return id == end_of_document_ || (id < pieces_ && model_.IsControl(id));
  }
  bool lossless() const override { return lossless_; }
  const std::string& spec() const override { return spec_; }

 private:
  void find_controls() {
    std::vector<AddedToken> controls;
    for (int id = 0; id < pieces_; ++id)
      if (is_special(id))
        controls.push_back({.id = id, .content = model_.IdToPiece(id), .normalized = false, .special = true});
    controls_.emplace(std::move(controls), nullptr);
  }
  void find_byte_pieces() {
    byte_values_.assign(static_cast<std::size_t>(pieces_), -1);
    int found = 0;
    for (int id = 0; id < pieces_; ++id) {
      if (!model_.IsByte(id)) continue;
      const int value = std::stoi(model_.IdToPiece(id).substr(3, 2), nullptr, 16);  // "<0x1F>"
      byte_values_[static_cast<std::size_t>(id)] = static_cast<std::int16_t>(value);
      byte_ids_[static_cast<std::size_t>(value)] = id;
      ++found;
    }
    has_bytes_ = found == 256;
  }

  /// Learns from the outside how the model treats spaces and characters; the model's own settings hide behind
  /// protocol-buffer headers that are not installed.
  void probe() {
    std::vector<std::string> pieces;
    check(model_.Encode("a", &pieces));
    dummy_prefix_ = !pieces.empty() && pieces.front().starts_with(space_mark);
    // Where a space can only begin a piece, and a newline stands alone, the best segmentation of a text is
    // that of its words.
    bool words = true;
    for (int id = 0; id < pieces_ && words; ++id) {
      const std::string& piece = model_.IdToPiece(id);
      const std::size_t mark = piece.rfind(space_mark);
      words = (mark == std::string::npos || mark == 0) &&
              (piece.find('\n') == std::string::npos || piece == "\n");
    }
    const std::string sample =
        "  a \t b\r\n\n\xef\xac\x81 \xe2\x84\xab e\xcc\x81 \xf0\x9f\x99\x82\xe3\x80\x80\xc2\xa0.  ";
    std::vector<std::int32_t> ids;
    encode(sample, ids);
    lossless_ = has_bytes_ && !dummy_prefix_ && decode(ids) == sample;
    by_words_ = words && lossless_;
  }

  void check(const sentencepiece::util::Status& status) const {
    if (!status.ok())
      fail(ErrorKind::data, "the SentencePiece model of '", spec_, "' fails: ", status.ToString());
  }

  void encode_clean(std::string_view text, WordCache& words, std::vector<std::int32_t>& ids) const {
    if (!by_words_) return encode_with_model(text, ids);
    while (!text.empty()) {
      std::size_t end = 1;  // a word owns the space in front of it
      while (end < text.size() && text[end] != ' ' && text[end] != '\n') ++end;
      encode_word(text.substr(0, end), words, ids);
      text.remove_prefix(end);
    }
  }

  void encode_word(std::string_view word, WordCache& words, std::vector<std::int32_t>& ids) const {
    if (words.find(word, ids)) return;
    const std::size_t before = ids.size();
    encode_with_model(word, ids);
    words.insert(word, std::span(ids).subspan(before));
  }

  void encode_with_model(std::string_view text, std::vector<std::int32_t>& ids) const {
    std::vector<int> found;
    check(model_.Encode({text.data(), text.size()}, &found));
    ids.insert(ids.end(), found.begin(), found.end());
  }

  static void append_piece(const std::string& piece, std::string& text) {
    for (std::size_t at = 0; at < piece.size();) {
      const std::size_t mark = piece.find(space_mark, at);
      text.append(piece, at, mark - at);
      if (mark == std::string::npos) return;
      text.push_back(' ');
      at = mark + space_mark.size();
    }
  }

  sentencepiece::SentencePieceProcessor model_;
  std::string spec_;
  std::optional<AddedTokens> controls_;
  int pieces_ = 0;
  std::int32_t end_of_document_ = 0;
  std::array<std::int32_t, 256> byte_ids_{};
  std::vector<std::int16_t> byte_values_;  // per piece: the byte that it stands for, or -1
  bool has_bytes_ = false, dummy_prefix_ = false, lossless_ = false, by_words_ = false;
  mutable SpacePool<WordCache> words_;
};

}  // namespace

std::shared_ptr<const Tokenizer> make_sentencepiece(const std::string& bytes, const std::string& model_path) {
  return std::make_shared<SentencePieceTokenizer>(model_path, bytes);
}

}  // namespace sherd::data
