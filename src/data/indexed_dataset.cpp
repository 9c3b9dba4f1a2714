#include "data/indexed_dataset.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <vector>

#include "base/crc32c.h"
#include "base/error.h"
#include "base/log.h"

namespace sherd::data {
namespace fs = std::filesystem;
namespace {

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

template <class T>
T load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class T>
void widen(const std::byte* from, std::span<std::int32_t> out) {
  for (std::size_t i = 0; i < out.size(); ++i)
    out[i] = static_cast<std::int32_t>(load<T>(from + i * sizeof(T)));
}

constexpr const char* rebuild = "; copy the pair again, or rebuild it with 'sherd prepare'";

constexpr const char* prefix_of =
    "data.path is the prefix that `sherd prepare --output PREFIX` wrote, without .bin or .idx";

[[noreturn]] void fail_missing(const fs::path& path) {
  const fs::path folder = path.has_parent_path() ? path.parent_path() : fs::path(".");
  if (!fs::is_directory(folder))
    fail(ErrorKind::io, "dataset file '", path.string(), "' is missing: the folder '", folder.string(),
         "' does not exist; ", prefix_of);
  fail(ErrorKind::io, "dataset file '", path.string(), "' does not exist; ", prefix_of);
}

const fs::path& existing(const fs::path& path) {
  std::error_code ignored;
  if (!fs::exists(path, ignored)) fail_missing(path);
  return path;
}

}  // namespace

std::size_t size_of(TokenType type) {
  switch (type) {
    case TokenType::u8:
    case TokenType::i8:
      return 1;
    case TokenType::i16:
    case TokenType::u16:
      return 2;
    case TokenType::i32:
      return 4;
    case TokenType::i64:
      return 8;
  }
  fail(ErrorKind::usage, "no token type has the code ", static_cast<int>(type));
}

std::string_view name_of(TokenType type) {
  switch (type) {
    case TokenType::u8:
      return "uint8";
    case TokenType::i8:
      return "int8";
    case TokenType::i16:
      return "int16";
    case TokenType::u16:
      return "uint16";
    case TokenType::i32:
      return "int32";
    case TokenType::i64:
      return "int64";
  }
  fail(ErrorKind::usage, "no token type has the code ", static_cast<int>(type));
}

TokenType token_type_for(std::int64_t vocab_size) {
  return vocab_size < 65500 ? TokenType::u16 : TokenType::i32;
}

fs::path bin_path(const std::string& prefix) {
  return prefix + ".bin";
}
fs::path index_path(const std::string& prefix) {
  return prefix + ".idx";
}
fs::path info_path(const std::string& prefix) {
  return prefix + ".json";
}
fs::path model_path(const std::string& prefix) {
  return prefix + ".model";
}

IndexedDataset::IndexedDataset(const std::string& prefix)
    : prefix_(prefix),
      index_file_(existing(index_path(prefix)), MappedFile::Access::sequential),
      tokens_file_(existing(bin_path(prefix)), MappedFile::Access::random) {}

std::shared_ptr<const IndexedDataset> IndexedDataset::open(const std::string& prefix) {
  std::shared_ptr<IndexedDataset> dataset(new IndexedDataset(prefix));
  dataset->read_header();
  dataset->check_sequences();
  dataset->check_documents();
  return dataset;
}

void IndexedDataset::read_header() {
  const std::string name = index_file_.path().string();
  const std::byte* at = index_file_.bytes().data();
  const std::uint64_t size = index_file_.size();
  if (size < index_header_bytes)
    fail(ErrorKind::data, "'", name, "' has ", size, " bytes, fewer than the ", index_header_bytes,
         " of a dataset index's header", rebuild);
  if (std::memcmp(at, index_magic.data(), index_magic.size()) != 0)
    fail(ErrorKind::data, "'", name,
         "' is no indexed dataset: it does not begin with MMIDIDX; give the prefix of a "
         "dataset that 'sherd prepare' or Megatron wrote");
  if (const auto version = load<std::uint64_t>(at + 9); version != index_version)
    fail(ErrorKind::data, "'", name, "' has format version ", version, "; this program reads version ",
         index_version, ": rebuild it with 'sherd prepare'");
  const int code = load<std::uint8_t>(at + 17);
  if (code < 1 || code > 8 || code == 6 || code == 7)
    fail(ErrorKind::data, "'", name, "' has the dtype code ", code,
         code == 6 || code == 7 ? " (floating point)" : "", "; token ids are integers: codes 1 to 5 and 8",
         rebuild);
  type_ = static_cast<TokenType>(code);
  const auto sequences = load<std::uint64_t>(at + 18), bounds = load<std::uint64_t>(at + 26);
  const std::uint64_t room = size - index_header_bytes;
  const bool sane = bounds >= 1 && sequences <= room / 12 && bounds <= room / 8;
  const std::uint64_t expected = sane ? sequences * 12 + bounds * 8 : 0;
  if (!sane || (room != expected && room != expected + sequences))
    fail(ErrorKind::data, "'", name, "' has ", size, " bytes, which does not fit the ", sequences,
         " sequences and ", bounds, " document bounds that its header announces: it is truncated or damaged",
         rebuild);
  sequences_ = static_cast<std::int64_t>(sequences);
  documents_ = static_cast<std::int64_t>(bounds) - 1;
  lengths_ = at + index_header_bytes;
  pointers_ = lengths_ + sequences * 4;
  documents_at_ = pointers_ + sequences * 8;
}

void IndexedDataset::check_sequences() {
  const std::uint64_t width = size_of(type_), size = tokens_file_.size();
  std::uint64_t total = 0;
  for (std::int64_t i = 0; i < sequences_; ++i) {
    const std::int32_t count = length(i);
    const std::uint64_t at = pointer(i);
    if (count < 0)
      fail(ErrorKind::data, "'", index_file_.path().string(), "': sequence ", i, " has the length ", count,
           rebuild);
    const std::uint64_t bytes = static_cast<std::uint64_t>(count) * width;
    if (at > size || bytes > size - at)
      fail(ErrorKind::data, "'", bin().string(), "' has ", size, " bytes, but sequence ", i, " of ",
           sequences_, " lies at byte ", static_cast<std::int64_t>(at), " and has ", bytes,
           ": the file is truncated, or it belongs to another index", rebuild);
    if (at % width != 0)
      fail(ErrorKind::data, "'", index_file_.path().string(), "': sequence ", i, " begins at byte ", at,
           ", inside a token of ", width, " bytes", rebuild);
    total += static_cast<std::uint64_t>(count);
  }
  if (total * width < size)
    log_warning("'", bin().string(), "' has ", size - total * width,
                " bytes that no sequence of its index refers to; they are ignored");
  tokens_ = static_cast<std::int64_t>(total);
}

void IndexedDataset::check_documents() const {
  std::int64_t previous = 0;
  for (std::int64_t d = 0; d <= documents_; ++d) {
    const std::int64_t begin = document_begin(d);
    if (d == 0 ? begin != 0 : begin < previous)
      fail(ErrorKind::data, "'", index_file_.path().string(), "': document ", d, " begins at sequence ",
           begin, d == 0 ? ", not at 0" : cat(", before the one in front of it (", previous, ")"), rebuild);
    previous = begin;
  }
  if (previous != sequences_)
    fail(ErrorKind::data, "'", index_file_.path().string(), "': the documents end at sequence ", previous,
         " of ", sequences_, rebuild);
}

std::int32_t IndexedDataset::length(std::int64_t sequence) const {
  return load<std::int32_t>(lengths_ + sequence * 4);
}

std::uint64_t IndexedDataset::pointer(std::int64_t sequence) const {
  return load<std::uint64_t>(pointers_ + sequence * 8);
}

std::int64_t IndexedDataset::document_begin(std::int64_t document) const {
  return load<std::int64_t>(documents_at_ + document * 8);
}

void IndexedDataset::read(std::int64_t sequence, std::int64_t offset, std::span<std::int32_t> out) const {
  require(sequence >= 0 && sequence < sequences_, "sequence ", sequence, " of ", sequences_);
  const auto count = static_cast<std::int64_t>(out.size());
  require(offset >= 0 && offset + count <= length(sequence), "tokens ", offset, " to ", offset + count,
          " of a sequence of ", length(sequence));
  const std::byte* from =
      tokens_file_.bytes().data() + pointer(sequence) + static_cast<std::uint64_t>(offset) * size_of(type_);
  switch (type_) {
    case TokenType::u8:
      return widen<std::uint8_t>(from, out);
    case TokenType::i8:
      return widen<std::int8_t>(from, out);
    case TokenType::i16:
      return widen<std::int16_t>(from, out);
    case TokenType::u16:
      return widen<std::uint16_t>(from, out);
    case TokenType::i32:
      return widen<std::int32_t>(from, out);
    case TokenType::i64:
      break;
  }
  for (std::size_t i = 0; i < out.size(); ++i) {
    const auto id = load<std::int64_t>(from + i * 8);
    if (id < 0 || id > std::numeric_limits<std::int32_t>::max())
      fail(ErrorKind::data, "'", bin().string(), "': token ", offset + static_cast<std::int64_t>(i),
           " of sequence ", sequence, " is ", id, ", which is no token id", rebuild);
    out[i] = static_cast<std::int32_t>(id);
  }
}

void IndexedDataset::will_need(std::int64_t sequence, std::int64_t offset, std::int64_t count) const {
  const std::uint64_t width = size_of(type_);
  tokens_file_.will_need(pointer(sequence) + static_cast<std::uint64_t>(offset) * width,
                         static_cast<std::uint64_t>(count) * width);
}

void IndexedDataset::check_ids(std::span<const std::int32_t> tokens, std::int64_t sequence,
                               std::int64_t offset, std::int64_t vocab_size) const {
  // As unsigned, a negative id is a large one; the maximum vectorises, the search runs only on failure.
  std::uint32_t largest = 0;
  for (const std::int32_t id : tokens) largest = std::max(largest, static_cast<std::uint32_t>(id));
  if (largest < vocab_size) return;
  const auto bad = std::find_if(tokens.begin(), tokens.end(), [&](std::int32_t id) {
    return static_cast<std::uint32_t>(id) >= vocab_size;
  });
  if (bad == tokens.end()) return;
  fail(ErrorKind::data, "'", bin().string(), "': token ", offset + (bad - tokens.begin()), " of sequence ",
       sequence, " is ", *bad, ", beyond the vocabulary of ", vocab_size,
       "; set model.vocab_size to the tokenizer's size, or prepare the text again with the right tokenizer");
}

std::uint32_t IndexedDataset::fingerprint() const {
  const std::span<const std::byte> bytes = tokens_file_.bytes();
  const std::size_t part = std::min<std::size_t>(bytes.size(), 1 << 20);
  return crc32c(bytes.last(part).data(), part, crc32c(bytes.data(), part));
}

void IndexedDataset::check_all_ids(std::int64_t vocab_size) const {
  std::vector<std::int32_t> block(1 << 16);
  for (std::int64_t sequence = 0; sequence < sequences_; ++sequence)
    for (std::int64_t offset = 0, count = length(sequence); offset < count;
         offset += static_cast<std::int64_t>(block.size())) {
      const std::span part =
          std::span(block).first(static_cast<std::size_t>(std::min<std::int64_t>(count - offset, 1 << 16)));
      read(sequence, offset, part);
      check_ids(part, sequence, offset, vocab_size);
    }
}

}  // namespace sherd::data
