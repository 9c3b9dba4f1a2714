#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "data/text/random_access_file.h"

namespace sherd::data {

/// Element types of a Megatron indexed dataset, with the codes that its index stores.
enum class TokenType : std::uint8_t { u8 = 1, i8 = 2, i16 = 3, i32 = 4, i64 = 5, u16 = 8 };

std::size_t size_of(TokenType type);
std::string_view name_of(TokenType type);  ///< "uint8", "int32", …

/// The type that holds every id below `vocab_size`: u16 when it is below 65,500, else i32.
TokenType token_type_for(std::int64_t vocab_size);

/// PREFIX.bin, PREFIX.idx, PREFIX.json, PREFIX.mask and PREFIX.model.
std::filesystem::path bin_path(const std::string& prefix);
std::filesystem::path index_path(const std::string& prefix);
std::filesystem::path info_path(const std::string& prefix);
std::filesystem::path mask_path(const std::string& prefix);
std::filesystem::path model_path(const std::string& prefix);      // SentencePiece's
std::filesystem::path tokenizer_path(const std::string& prefix);  // a tokenizer.json

/// The fixed part of PREFIX.idx, little-endian: 9 bytes of magic, u64 version, u8 type code, u64 sequences,
/// u64 documents + 1. Then int32 lengths, int64 byte pointers, int64 document bounds, optional int8 modes.
inline constexpr std::string_view index_magic{"MMIDIDX\0\0", 9};
inline constexpr std::uint64_t index_version = 1;
inline constexpr std::size_t index_header_bytes = 34;

/// A dataset of token sequences in Megatron's indexed format, whose tokens are read from the file when they
/// are asked for. A document is one or more consecutive sequences. Immutable and safe to share between ranks
/// and threads.
class IndexedDataset {
 public:
  /// Opens PREFIX.bin and PREFIX.idx and checks everything but the token ids: magic, version, type, sizes,
  /// lengths, pointers and document bounds. Sequences must follow each other in the .bin and fill it, and
  /// where there is a PREFIX.json it must agree about tokens, sequences, documents and type. Throws Error{io}
  /// when a file is missing, Error{data} when it is damaged; both name the file, the cause and the next step.
  static std::shared_ptr<const IndexedDataset> open(const std::string& prefix);

  const std::string& prefix() const { return prefix_; }
  const std::filesystem::path& bin() const { return tokens_file_.path(); }
  TokenType type() const { return type_; }
  std::int64_t sequences() const { return sequences_; }
  std::int64_t documents() const { return documents_; }
  /// Over all sequences.
  std::int64_t tokens() const { return starts_.back(); }

  /// Tokens in a sequence.
  std::int32_t length(std::int64_t sequence) const {
    const auto i = static_cast<std::size_t>(sequence);
    return static_cast<std::int32_t>(starts_[i + 1] - starts_[i]);
  }
  /// First sequence of a document; document_begin(documents()) is sequences(). Read from the .idx.
  std::int64_t document_begin(std::int64_t document) const;

  /// Reads tokens [offset, offset + out.size()) of a sequence. Throws Error{usage} when they are not all in
  /// it; Error{data} for an int64 id that no int32 holds, or when the .bin was cut since it was opened;
  /// Error{io} when it cannot be read.
  void read(std::int64_t sequence, std::int64_t offset, std::span<std::int32_t> out) const;

  /// Some tokens are no targets of the loss: PREFIX.json says so, and PREFIX.mask which.
  bool has_mask() const { return mask_file_.has_value(); }
  /// Reads for tokens [offset, offset + out.size()) of a sequence whether each is a target: 1, else 0. All
  /// are without a mask. Throws as read() does.
  void read_mask(std::int64_t sequence, std::int64_t offset, std::span<std::uint8_t> out) const;

  /// Asks the kernel to read these tokens ahead.
  void will_need(std::int64_t sequence, std::int64_t offset, std::int64_t count) const;

  /// Throws Error{data} naming file, position and id unless every id in `tokens`, which were read from
  /// `offset` of `sequence`, is in [0, vocab_size).
  void check_ids(std::span<const std::int32_t> tokens, std::int64_t sequence, std::int64_t offset,
                 std::int64_t vocab_size) const;

  /// CRC-32C of the first and the last MiB of PREFIX.bin, and of PREFIX.mask: tells datasets of equal size
  /// apart at little cost.
  std::uint32_t fingerprint() const;

  /// Reads the whole dataset and checks every id against the vocabulary.
  void check_all_ids(std::int64_t vocab_size) const;

 private:
  explicit IndexedDataset(const std::string& prefix);
  void read_header();
  void read_sequences();
  void check_documents() const;
  void check_info();
  void check_range(std::int64_t sequence, std::int64_t offset, std::int64_t count) const;
  std::uint64_t byte_of(std::int64_t sequence, std::int64_t offset) const;
  void decode(const std::byte* from, std::span<std::int32_t> out, std::int64_t sequence,
              std::int64_t offset) const;

  std::string prefix_;
  RandomAccessFile index_file_, tokens_file_;
  std::optional<RandomAccessFile> mask_file_;
  TokenType type_ = TokenType::i32;
  std::int64_t sequences_ = 0, documents_ = 0;
  std::uint64_t documents_at_ = 0;    // byte of the .idx at which the document bounds begin
  std::vector<std::int64_t> starts_;  // the token of the .bin at which each sequence begins, and their end
};

}  // namespace sherd::data
