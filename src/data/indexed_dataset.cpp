#include "data/indexed_dataset.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <vector>

#include "base/crc32c.h"
#include "base/error.h"
#include "data/dataset_info.h"

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

constexpr std::size_t index_block_bytes = std::size_t{1} << 20;
constexpr std::size_t token_block_bytes = std::size_t{32} << 10;

/// Calls visit(i, value) for each of `count` numbers that lie in `file` from byte `offset` on.
template <class T, class Visit>
void for_each_number(const RandomAccessFile& file, std::uint64_t offset, std::int64_t count, Visit&& visit) {
  std::vector<std::byte> block(
      std::min<std::size_t>(index_block_bytes, static_cast<std::size_t>(count) * sizeof(T)));
  for (std::int64_t done = 0; done < count;) {
    const std::int64_t part =
        std::min(count - done, static_cast<std::int64_t>(index_block_bytes / sizeof(T)));
    const std::span bytes = std::span(block).first(static_cast<std::size_t>(part) * sizeof(T));
    file.read(offset + static_cast<std::uint64_t>(done) * sizeof(T), bytes);
    for (std::int64_t i = 0; i < part; ++i)
      visit(done + i, load<T>(bytes.data() + static_cast<std::size_t>(i) * sizeof(T)));
    done += part;
  }
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

struct TokenTypeDescription {
  TokenType type;
  std::size_t bytes;
  std::string_view name;
};
constexpr TokenTypeDescription token_types[] = {{TokenType::u8, 1, "uint8"},   {TokenType::i8, 1, "int8"},
                                                {TokenType::i16, 2, "int16"},  {TokenType::i32, 4, "int32"},
                                                {TokenType::u16, 2, "uint16"}, {TokenType::i64, 8, "int64"}};

const TokenTypeDescription& description_of(TokenType type) {
  for (const TokenTypeDescription& known : token_types)
    if (known.type == type) return known;
  fail(ErrorKind::usage, "no token type has the code ", static_cast<int>(type));
}

}  // namespace

std::size_t size_of(TokenType type) {
  return description_of(type).bytes;
}

std::string_view name_of(TokenType type) {
  return description_of(type).name;
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
fs::path mask_path(const std::string& prefix) {
  return prefix + ".mask";
}
fs::path model_path(const std::string& prefix) {
  return prefix + ".model";
}
fs::path tokenizer_path(const std::string& prefix) {
  return prefix + ".tokenizer.json";
}

IndexedDataset::IndexedDataset(const std::string& prefix)
    : prefix_(prefix),
      index_file_(existing(index_path(prefix)), RandomAccessFile::Access::sequential),
      tokens_file_(existing(bin_path(prefix)), RandomAccessFile::Access::random) {}

std::shared_ptr<const IndexedDataset> IndexedDataset::open(const std::string& prefix) {
  std::shared_ptr<IndexedDataset> dataset(new IndexedDataset(prefix));
  dataset->read_header();
  dataset->read_sequences();
  dataset->check_documents();
  dataset->check_info();
  return dataset;
}

void IndexedDataset::read_header() {
  const std::string name = index_file_.path().string();
  const std::uint64_t size = index_file_.size();
  if (size < index_header_bytes)
    fail(ErrorKind::data, "'", name, "' has ", size, " bytes, fewer than the ", index_header_bytes,
         " of a dataset index's header", rebuild);
  std::array<std::byte, index_header_bytes> header;
  index_file_.read(0, header);
  const std::byte* at = header.data();
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
  documents_at_ = index_header_bytes + sequences * 12;
}

void IndexedDataset::read_sequences() {
  const std::string index = index_file_.path().string();
  const std::uint64_t width = size_of(type_), size = tokens_file_.size();
  const std::uint64_t pointers_at = index_header_bytes + static_cast<std::uint64_t>(sequences_) * 4;
  starts_.reserve(static_cast<std::size_t>(sequences_) + 1);
  starts_.push_back(0);
  for_each_number<std::int32_t>(index_file_, index_header_bytes, sequences_, [&](auto i, auto length) {
    if (length < 0) fail(ErrorKind::data, "'", index, "': sequence ", i, " has the length ", length, rebuild);
    starts_.push_back(starts_.back() + length);
  });
  for_each_number<std::int64_t>(index_file_, pointers_at, sequences_, [&](auto i, auto pointer) {
    if (const auto end = static_cast<std::int64_t>(byte_of(i, 0)); pointer != end)
      fail(ErrorKind::data, "'", index, "': sequence ", i, " begins at byte ", pointer,
           ", but those before it end at byte ", end, ": they overlap or leave a gap", rebuild);
  });
  if (const std::uint64_t expected = static_cast<std::uint64_t>(tokens()) * width; size != expected)
    fail(ErrorKind::data, "'", bin().string(), "' has ", size, " bytes, but the ", sequences_,
         " sequences of '", index, "' take ", expected, " (", tokens(), " tokens of ", width,
         " bytes): it is ", size < expected ? "truncated" : "too long", ", or it belongs to another index",
         rebuild);
}

void IndexedDataset::check_documents() const {
  std::int64_t previous = 0;
  const auto check = [&](std::int64_t document, std::int64_t begin) {
    if (document == 0 ? begin != 0 : begin < previous)
      fail(ErrorKind::data, "'", index_file_.path().string(), "': document ", document,
           " begins at sequence ", begin,
           document == 0 ? ", not at 0" : cat(", before the one in front of it (", previous, ")"), rebuild);
    previous = begin;
  };
  for_each_number<std::int64_t>(index_file_, documents_at_, documents_ + 1, check);
  if (previous != sequences_)
    fail(ErrorKind::data, "'", index_file_.path().string(), "': the documents end at sequence ", previous,
         " of ", sequences_, rebuild);
}

void IndexedDataset::check_info() {
  const std::optional<DatasetInfo> info = read_dataset_info(prefix_);
  if (!info) {  // Megatron writes none
    std::error_code ignored;
    if (fs::exists(mask_path(prefix_), ignored))
      fail(ErrorKind::data, "'", mask_path(prefix_).string(), "' says which tokens are learned, and '",
           info_path(prefix_).string(), "', which belongs to it, is missing; copy all files of the dataset");
    return;
  }
  const auto compare = [&](const char* what, const auto& here, const auto& there) {
    if (here != there)
      fail(ErrorKind::data, "'", index_file_.path().string(), "' and '", info_path(prefix_).string(),
           "' belong to different datasets: ", here, " and ", there, " ", what,
           "; copy all files of the dataset again, or rebuild it with 'sherd prepare'");
  };
  compare("tokens", tokens(), info->tokens);
  compare("sequences", sequences_, info->sequences);
  compare("documents", documents_, info->documents);
  compare("as the type of tokens", name_of(type_), info->token_type);
  if (info->masked_tokens == 0) return;
  mask_file_.emplace(existing(mask_path(prefix_)), RandomAccessFile::Access::random);
  const std::uint64_t expected = (static_cast<std::uint64_t>(tokens()) + 7) / 8;
  if (mask_file_->size() != expected)
    fail(ErrorKind::data, "'", mask_file_->path().string(), "' has ", mask_file_->size(),
         " bytes, but a bit for each of ", tokens(), " tokens takes ", expected,
         ": it is damaged, or of another dataset", rebuild);
}

std::int64_t IndexedDataset::document_begin(std::int64_t document) const {
  require(document >= 0 && document <= documents_, "document ", document, " of ", documents_);
  std::int64_t begin = 0;
  index_file_.read(documents_at_ + static_cast<std::uint64_t>(document) * 8,
                   std::as_writable_bytes(std::span(&begin, 1)));
  return begin;
}

std::uint64_t IndexedDataset::byte_of(std::int64_t sequence, std::int64_t offset) const {
  return static_cast<std::uint64_t>(starts_[static_cast<std::size_t>(sequence)] + offset) * size_of(type_);
}

void IndexedDataset::check_range(std::int64_t sequence, std::int64_t offset, std::int64_t count) const {
  require(sequence >= 0 && sequence < sequences_, "sequence ", sequence, " of ", sequences_);
  require(offset >= 0 && offset + count <= length(sequence), "tokens ", offset, " to ", offset + count,
          " of a sequence of ", length(sequence));
}

void IndexedDataset::read(std::int64_t sequence, std::int64_t offset, std::span<std::int32_t> out) const {
  check_range(sequence, offset, std::ssize(out));
  const std::size_t width = size_of(type_);
  std::array<std::byte, token_block_bytes> block;
  while (!out.empty()) {
    const auto part = out.first(std::min(out.size(), block.size() / width));
    tokens_file_.read(byte_of(sequence, offset), std::span(block).first(part.size() * width));
    decode(block.data(), part, sequence, offset);
    out = out.subspan(part.size());
    offset += static_cast<std::int64_t>(part.size());
  }
}

/// Writes the tokens whose bytes are at `from`: those of `sequence` from `offset` on.
void IndexedDataset::decode(const std::byte* from, std::span<std::int32_t> out, std::int64_t sequence,
                            std::int64_t offset) const {
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

void IndexedDataset::read_mask(std::int64_t sequence, std::int64_t offset,
                               std::span<std::uint8_t> out) const {
  check_range(sequence, offset, std::ssize(out));
  if (!mask_file_) return void(std::fill(out.begin(), out.end(), std::uint8_t{1}));
  std::array<std::byte, token_block_bytes> block;
  auto bit = static_cast<std::uint64_t>(starts_[static_cast<std::size_t>(sequence)] + offset);
  while (!out.empty()) {
    const std::uint64_t first = bit / 8;
    const std::size_t part = std::min<std::uint64_t>(out.size(), block.size() * 8 - bit % 8);
    mask_file_->read(first, std::span(block).first((bit + part + 7) / 8 - first));
    for (std::size_t i = 0; i < part; ++i, ++bit)
      out[i] = static_cast<std::uint8_t>(std::to_integer<unsigned>(block[bit / 8 - first]) >> (bit % 8) & 1);
    out = out.subspan(part);
  }
}

void IndexedDataset::will_need(std::int64_t sequence, std::int64_t offset, std::int64_t count) const {
  tokens_file_.will_need(byte_of(sequence, offset), static_cast<std::uint64_t>(count) * size_of(type_));
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
       "; leave such texts out, prepare the text with the model's tokenizer, for tokens that the model is to "
       "learn raise model.vocab_size, or, of a model that begins from nothing, leave it to the tokenizer");
}

std::uint32_t IndexedDataset::fingerprint() const {
  std::uint32_t sum = 0;
  const auto add = [&](const RandomAccessFile& file) {
    std::vector<std::byte> part(std::min<std::uint64_t>(file.size(), 1 << 20));
    for (const std::uint64_t offset : {std::uint64_t{0}, file.size() - part.size()}) {
      file.read(offset, part);
      sum = crc32c(part.data(), part.size(), sum);
    }
  };
  add(tokens_file_);
  if (mask_file_) add(*mask_file_);
  return sum;
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
