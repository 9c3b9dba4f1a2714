#include "data/dataset_builder.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "base/error.h"

namespace sherd::data {
namespace fs = std::filesystem;
namespace {

constexpr std::size_t write_buffer_bytes = std::size_t{4} << 20;
constexpr std::size_t buffer_lengths = std::size_t{1} << 16;

fs::path output_folder_of(const std::string& prefix) {
  const fs::path path(prefix);
  return path.has_parent_path() ? path.parent_path() : fs::path(".");
}

const std::string& checked(const std::string& prefix) {
  check_output_prefix(prefix);
  return prefix;
}

FileDescriptor open_unnamed(const std::string& prefix) {
  std::string pattern = prefix + ".lengths.XXXXXX";
  FileDescriptor file(::mkostemp(pattern.data(), O_CLOEXEC));
  if (!file)
    fail(ErrorKind::io, "cannot create a file beside '", prefix, "': ", std::strerror(errno),
         "; choose a folder that this user may write");
  ::unlink(pattern.c_str());
  return file;
}

/// Collects small writes for an AtomicFile.
class Buffered {
 public:
  explicit Buffered(AtomicFile& file) : file_(file) { buffer_.reserve(write_buffer_bytes); }
  template <class T>
  void put(T value) {
    const auto* bytes = reinterpret_cast<const std::byte*>(&value);
    buffer_.insert(buffer_.end(), bytes, bytes + sizeof value);
    if (buffer_.size() + 16 > write_buffer_bytes) flush();
  }
  void flush() {
    file_.write(buffer_.data(), buffer_.size());
    buffer_.clear();
  }

 private:
  AtomicFile& file_;
  std::vector<std::byte> buffer_;
};

}  // namespace

void check_output_prefix(const std::string& prefix) {
  const fs::path folder = output_folder_of(prefix);
  if (prefix.empty() || fs::path(prefix).filename().empty())
    fail(ErrorKind::usage, "the output prefix '", prefix, "' names no file; give one such as data/corpus");
  std::error_code error;
  fs::create_directories(folder, error);
  if (error || !fs::is_directory(folder))
    fail(ErrorKind::io, "cannot write the dataset '", prefix, "': the folder '", folder.string(),
         "' cannot be made (", error ? error.message() : "a file is in its place",
         "); choose another prefix");
}

DatasetBuilder::DatasetBuilder(const std::string& prefix, std::int64_t vocab_size)
    : prefix_(checked(prefix)),
      vocab_size_(vocab_size),
      type_(token_type_for(vocab_size)),
      tokens_file_(bin_path(prefix)),
      index_file_(index_path(prefix)) {
  require(vocab_size > 0 && vocab_size <= std::numeric_limits<std::int32_t>::max(), "a vocabulary of ",
          vocab_size);
  token_buffer_.reserve(write_buffer_bytes);
  length_buffer_.reserve(buffer_lengths);
  lengths_file_ = open_unnamed(prefix);
}

void DatasetBuilder::add(std::span<const std::int32_t> tokens, bool last,
                         std::span<const std::uint8_t> learned) {
  require(learned.empty() || learned.size() == tokens.size(), learned.size(), " marks for ", tokens.size(),
          " tokens");
  require(tokens.size() <= static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max()),
          "a sequence of ", tokens.size(), " tokens; the format holds fewer than 2^31 in one: split it");
  const std::size_t width = size_of(type_);
  for (std::size_t done = 0; done < tokens.size();) {
    const std::size_t count =
        std::min(tokens.size() - done, (write_buffer_bytes - token_buffer_.size()) / width);
    const std::size_t at = token_buffer_.size();
    token_buffer_.resize(at + count * width);
    for (std::size_t i = 0; i < count; ++i) {
      const std::int32_t id = tokens[done + i];
      if (id < 0 || id >= vocab_size_)
        fail(ErrorKind::data, "cannot add token ", id, " to '", prefix_, "': its vocabulary has ",
             vocab_size_, " ids");
      if (width == 2) {
        const auto narrow = static_cast<std::uint16_t>(id);
        std::memcpy(token_buffer_.data() + at + i * 2, &narrow, 2);
      } else {
        std::memcpy(token_buffer_.data() + at + i * 4, &id, 4);
      }
    }
    done += count;
    if (token_buffer_.size() + width > write_buffer_bytes) flush_tokens();
  }
  const auto length = static_cast<std::int32_t>(tokens.size());
  length_buffer_.push_back(last ? ~length : length);
  if (length_buffer_.size() == buffer_lengths) flush_lengths();
  document_open_ = !last;
  counts_.masked += std::count(learned.begin(), learned.end(), std::uint8_t{0});
  if (mask_file_ || counts_.masked > 0) add_mask(learned);
  counts_.tokens += length, ++counts_.sequences, counts_.documents += last;
}

/// Bit i of the mask, the lowest of a byte first, is that of token i.
void DatasetBuilder::put_mask(bool learned) {
  if (masked_ % 8 == 0) {
    if (mask_buffer_.size() == write_buffer_bytes) {
      mask_file_->write(mask_buffer_.data(), mask_buffer_.size());
      mask_buffer_.clear();
    }
    mask_buffer_.push_back(std::byte{0});
  }
  if (learned) mask_buffer_.back() |= std::byte{1} << (masked_ % 8);
  ++masked_;
}

/// The marks of what add() has just been given, and of what came before the first that is no target.
void DatasetBuilder::add_mask(std::span<const std::uint8_t> learned) {
  if (!mask_file_) mask_file_.emplace(mask_path(prefix_));
  while (masked_ < counts_.tokens) put_mask(true);
  for (const std::uint8_t mark : learned) put_mask(mark != 0);
}

void DatasetBuilder::finish_mask() {
  if (!mask_file_) {
    std::error_code ignored;  // an older one that stays is not read: PREFIX.json says that there is none
    fs::remove(mask_path(prefix_), ignored);
    return;
  }
  while (masked_ < counts_.tokens) put_mask(true);
  mask_file_->write(mask_buffer_.data(), mask_buffer_.size());
  mask_file_->commit();
}

void DatasetBuilder::flush_tokens() {
  tokens_file_.write(token_buffer_.data(), token_buffer_.size());
  token_buffer_.clear();
}

void DatasetBuilder::flush_lengths() {
  const char* from = reinterpret_cast<const char*>(length_buffer_.data());
  for (std::size_t left = length_buffer_.size() * 4; left > 0;) {
    const ssize_t done = ::write(lengths_file_.get(), from, left);
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0)
      fail(ErrorKind::io, "cannot write beside '", prefix_, "': ", std::strerror(done < 0 ? errno : ENOSPC),
           "; free space there, or choose another folder");
    from += done, left -= static_cast<std::size_t>(done);
  }
  length_buffer_.clear();
}

/// Calls visit(length, ends_document) for every sequence, from the unnamed file.
template <class Visit>
void DatasetBuilder::for_each_length(Visit&& visit) {
  std::vector<std::int32_t> block(buffer_lengths);
  for (off_t at = 0;;) {
    const ssize_t got = ::pread(lengths_file_.get(), block.data(), block.size() * 4, at);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail(ErrorKind::io, "cannot read back beside '", prefix_, "': ", std::strerror(errno));
    if (got == 0) return;
    const auto count = static_cast<std::size_t>(got) / 4;
    for (std::size_t i = 0; i < count; ++i) visit(block[i] < 0 ? ~block[i] : block[i], block[i] < 0);
    at += static_cast<off_t>(count * 4);
  }
}

void DatasetBuilder::finish_tokens() {
  require(!document_open_, "the dataset '", prefix_, "' cannot be finished inside a document");
  flush_tokens();
  flush_lengths();
  // Between the two renames the old index would describe the new tokens.
  if (::unlink(index_path(prefix_).c_str()) != 0 && errno != ENOENT)
    fail(ErrorKind::io, "cannot replace '", index_path(prefix_).string(), "': ", std::strerror(errno));
  tokens_file_.commit();
  finish_mask();
}

void DatasetBuilder::finish_index() {
  Buffered out(index_file_);
  for (const char c : index_magic) out.put(c);
  out.put(index_version);
  out.put(static_cast<std::uint8_t>(type_));
  out.put(static_cast<std::uint64_t>(counts_.sequences));
  out.put(static_cast<std::uint64_t>(counts_.documents + 1));
  for_each_length([&](std::int32_t length, bool) { out.put(length); });
  std::int64_t pointer = 0, sequence = 0;
  const auto width = static_cast<std::int64_t>(size_of(type_));
  for_each_length([&](std::int32_t length, bool) { out.put(pointer), pointer += length * width; });
  out.put(std::int64_t{0});
  for_each_length([&](std::int32_t, bool last) {
    ++sequence;
    if (last) out.put(sequence);
  });
  out.flush();
  index_file_.commit();
}

}  // namespace sherd::data
