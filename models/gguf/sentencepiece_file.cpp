#include "models/gguf/sentencepiece_file.h"

#include <cstring>
#include <string_view>

#include "base/error.h"

namespace sherd::models {
namespace {

/// The fields of a message of a protocol buffer, one after the other.
class Fields {
 public:
  explicit Fields(std::string_view bytes) : rest_(bytes) {}

  int number = 0;             ///< of the field at hand
  std::uint64_t integer = 0;  ///< its value
  std::string_view bytes;     ///< or this

  bool next() {
    if (rest_.empty()) return false;
    const std::uint64_t key = varint();
    number = static_cast<int>(key >> 3);
    switch (key & 7) {
      case 0:
        integer = varint();
        break;
      case 1:
        bytes = take(8);
        break;
      case 2:
        bytes = take(varint());
        break;
      case 5:
        bytes = take(4);
        break;
      default:
        broken();
    }
    return true;
  }
  float real() const {
    float out = 0;
    if (bytes.size() != sizeof(out)) broken();
    std::memcpy(&out, bytes.data(), sizeof(out));
    return out;
  }

 private:
  [[noreturn]] static void broken() {
    fail(ErrorKind::data, "the tokenizer's file is no SentencePiece model: take the one that was published");
  }
  std::uint64_t varint() {
    std::uint64_t out = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      const auto byte = static_cast<std::uint8_t>(take(1)[0]);
      out |= static_cast<std::uint64_t>(byte & 127) << shift;
      if (byte < 128) return out;
    }
    broken();
  }
  std::string_view take(std::uint64_t count) {
    if (count > rest_.size()) broken();
    const std::string_view out = rest_.substr(0, count);
    rest_.remove_prefix(count);
    return out;
  }

  std::string_view rest_;
};

}  // namespace

SentencePieceFile SentencePieceFile::parse(const std::string& bytes) {
  SentencePieceFile out;
  std::uint64_t algorithm = 1;
  for (Fields file(bytes); file.next();) {
    Fields fields(file.bytes);
    if (file.number == 1) {
      Piece& piece = out.pieces.emplace_back();
      while (fields.next()) {
        if (fields.number == 1) piece.text = fields.bytes;
        if (fields.number == 2) piece.score = fields.real();
        if (fields.number == 3) piece.type = static_cast<std::int32_t>(fields.integer);
      }
    } else if (file.number == 2) {  // how it was trained
      while (fields.next())
        if (fields.number == 3) algorithm = fields.integer;
    } else if (file.number == 3) {  // how texts are normalised
      while (fields.next()) {
        if (fields.number == 2) out.charsmap = fields.bytes;
        if (fields.number == 3) out.prefix_space = fields.integer != 0;
        if (fields.number == 4) out.removes_spaces = fields.integer != 0;
        if (fields.number == 5) out.escapes_spaces = fields.integer != 0;
      }
    }
  }
  if (algorithm != 1 && algorithm != 2)
    fail(ErrorKind::data,
         "a SentencePiece model of words or characters has no form in GGUF: BPE's and unigram "
         "models have one");
  out.bpe = algorithm == 2;
  return out;
}

}  // namespace sherd::models
