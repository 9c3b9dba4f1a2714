#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <unordered_map>
#include <utility>

#include "base/error.h"
#include "base/text/check_json.h"
#include "base/text/excerpt.h"
#include "tensor/safetensors/safetensors.h"

namespace sherd::tensor {
namespace fs = std::filesystem;
using nlohmann::json;

static_assert(std::endian::native == std::endian::little, "safetensors elements are little endian");

namespace {

/// A file open for reading; closed with the object. Throws Error{io} naming it.
class OpenFile {
 public:
  explicit OpenFile(const fs::path& path)
      : path_(path), descriptor_(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
    if (descriptor_ < 0) fail_errno("open", errno);
    if (::fstat(descriptor_, &status_) == 0 && S_ISREG(status_.st_mode)) return;
    const int error = S_ISDIR(status_.st_mode) ? EISDIR : EINVAL;
    ::close(descriptor_);
    fail_errno("open", error);
  }
  ~OpenFile() { ::close(descriptor_); }
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;

  const struct stat& status() const { return status_; }
  /// Fills `to` from byte `at` on; false when the file ends before.
  bool read(std::uint64_t at, std::span<std::byte> to) const {
    while (!to.empty()) {
      const ssize_t got = ::pread(descriptor_, to.data(), to.size(), static_cast<off_t>(at));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) fail_errno("read", errno);
      if (got == 0) return false;
      at += static_cast<std::uint64_t>(got), to = to.subspan(static_cast<std::size_t>(got));
    }
    return true;
  }

 private:
  [[noreturn]] void fail_errno(const char* action, int error) const {
    fail(ErrorKind::io, "cannot ", action, " '", path_.string(), "': ", std::strerror(error));
  }
  const fs::path& path_;
  int descriptor_;
  struct stat status_ {};
};

}  // namespace

struct SafetensorsFile::Content {
  explicit Content(fs::path file) : path(std::move(file)) {}
  template <class... Args>
  [[noreturn]] void bad(const Args&... args) const {
    fail(ErrorKind::data, "'", path.string(),
         "' is not a valid safetensors file: ", excerpt(cat(args...), 400));
  }
  void read_header();
  json parse_header(std::string_view text) const;
  SafetensorsEntry parse_entry(const std::string& name, const json& value) const;
  void check_layout();

  void read(std::uint64_t at, std::span<std::byte> to) const;

  fs::path path;
  dev_t device = 0;  ///< with `inode` and `size` what the path must name at each read
  ino_t inode = 0;
  std::uint64_t size = 0;
  std::uint64_t payload = 0;  ///< where the elements begin
  std::vector<SafetensorsEntry> entries;
  std::unordered_map<std::string_view, std::size_t> index;  ///< keys point into `entries`
  std::map<std::string, std::string> metadata;
};

void SafetensorsFile::Content::read(std::uint64_t at, std::span<std::byte> to) const {
  const OpenFile file(path);
  const struct stat& now = file.status();
  if (now.st_dev != device || now.st_ino != inode || static_cast<std::uint64_t>(now.st_size) != size ||
      !file.read(at, to))
    fail(ErrorKind::data, "'", path.string(),
         "' was cut or replaced while it was read: keep others from changing it, and try again");
}

void SafetensorsFile::Content::read_header() {
  const OpenFile file(path);
  device = file.status().st_dev, inode = file.status().st_ino;
  size = static_cast<std::uint64_t>(file.status().st_size);
  if (size < 8) bad("it has ", size, " bytes, fewer than the 8 of the header's length");
  std::uint64_t length = 0;
  if (!file.read(0, std::as_writable_bytes(std::span(&length, 1)))) bad("it was cut while it was read");
  constexpr std::string_view pointer = "version https://git-lfs";
  if (std::memcmp(&length, pointer.data(), sizeof length) == 0)
    bad("it is a pointer of Git LFS, and the file itself was not fetched: run `git lfs pull` in its folder, "
        "or "
        "download it");
  if (length > safetensors_header_limit)
    bad("its header would have ", length, " bytes, over the format's limit of ", safetensors_header_limit);
  if (length > size - 8) bad("its header of ", length, " bytes does not fit into the file's ", size);
  payload = 8 + length;
  std::string header_text(static_cast<std::size_t>(length), '\0');
  if (!file.read(8, std::as_writable_bytes(std::span(header_text)))) bad("it was cut while it was read");
  const json header = parse_header(header_text);
  for (const auto& [name, value] : header.items()) {
    if (name != "__metadata__") {
      entries.push_back(parse_entry(name, value));
      continue;
    }
    if (!value.is_object()) bad("__metadata__ is not an object");
    for (const auto& [key, text] : value.items()) {
      if (!text.is_string()) bad("__metadata__ entry '", key, "' is not a string");
      metadata.emplace(key, text.get<std::string>());
    }
  }
  check_layout();
  for (std::size_t i = 0; i < entries.size(); ++i) index.emplace(entries[i].name, i);
}

json SafetensorsFile::Content::parse_header(std::string_view text) const {
  if (!text.starts_with('{')) bad("its header does not begin with '{'");
  try {
    check_json(text);
    return json::parse(text);
  } catch (const Error& error) {
    bad("its header is not JSON that can be read: ", error.what());
  }
}

namespace {

/// value[0], value[1], … as integers from 0 to the largest int64; nothing when it is anything else.
std::optional<std::vector<std::uint64_t>> unsigned_list(const json& value) {
  if (!value.is_array()) return std::nullopt;
  std::vector<std::uint64_t> out;
  for (const json& item : value) {
    if (!item.is_number_unsigned() || item.get<std::uint64_t>() > INT64_MAX) return std::nullopt;
    out.push_back(item.get<std::uint64_t>());
  }
  return out;
}

/// Bytes of a tensor; nothing when the count overflows or does not fill whole bytes.
std::optional<std::uint64_t> byte_count(const std::vector<std::uint64_t>& shape, std::uint32_t bits) {
  std::uint64_t total = bits;
  if (std::find(shape.begin(), shape.end(), 0u) != shape.end()) return 0;
  for (const std::uint64_t extent : shape)
    if (__builtin_mul_overflow(total, extent, &total)) return std::nullopt;
  if (total % 8) return std::nullopt;
  return total / 8;
}

}  // namespace

SafetensorsEntry SafetensorsFile::Content::parse_entry(const std::string& name, const json& value) const {
  if (!value.is_object()) bad("the entry of tensor '", name, "' is not an object");
  for (const char* key : {"dtype", "shape", "data_offsets"})
    if (!value.contains(key)) bad("tensor '", name, "' has no ", key);
  if (value.size() != 3) bad("tensor '", name, "' has keys besides dtype, shape and data_offsets");
  if (!value["dtype"].is_string()) bad("the dtype of tensor '", name, "' is not a string");

  SafetensorsEntry entry;
  entry.name = name;
  entry.dtype_name = value["dtype"].get<std::string>();
  const auto type =
      std::find_if(safetensors_types.begin(), safetensors_types.end(),
                   [&](const SafetensorsType& known) { return known.name == entry.dtype_name; });
  if (type == safetensors_types.end())
    bad("tensor '", name, "' has the unknown dtype '", entry.dtype_name, "'");
  entry.dtype = type->dtype;

  const auto shape = unsigned_list(value["shape"]);
  if (!shape) bad("the shape of tensor '", name, "' is not a list of extents");
  const auto offsets = unsigned_list(value["data_offsets"]);
  if (!offsets || offsets->size() != 2 || (*offsets)[0] > (*offsets)[1])
    bad("the data_offsets of tensor '", name, "' are not two ascending positions");
  entry.offset = (*offsets)[0], entry.bytes = (*offsets)[1] - (*offsets)[0];
  const auto needed = byte_count(*shape, type->bits);
  if (!needed) bad("tensor '", name, "' has an impossible shape");
  if (*needed != entry.bytes)
    bad("tensor '", name, "' has ", entry.bytes, " bytes where its shape and dtype need ", *needed);
  entry.shape.assign(shape->begin(), shape->end());
  return entry;
}

void SafetensorsFile::Content::check_layout() {
  std::sort(entries.begin(), entries.end(), [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
    return std::tie(a.offset, a.bytes, a.name) < std::tie(b.offset, b.bytes, b.name);
  });
  std::uint64_t end = 0;
  for (const SafetensorsEntry& entry : entries) {
    if (entry.offset < end) bad("tensor '", entry.name, "' overlaps the one before it");
    if (entry.offset > end)
      bad("there is a gap of ", entry.offset - end, " bytes before tensor '", entry.name, "'");
    end += entry.bytes;
  }
  const std::uint64_t present = size - payload;
  if (end > present)
    bad("it is truncated: ", present, " of ", end, " bytes of elements are there. Copy it again");
  if (end < present) bad(present - end, " bytes follow the last tensor");
}

std::int64_t SafetensorsEntry::numel() const {
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;  // other extents may be huge
  std::int64_t count = 1;
  for (const std::int64_t extent : shape) count *= extent;
  return count;
}

SafetensorsFile::SafetensorsFile(fs::path path) : content_(std::make_unique<Content>(std::move(path))) {
  content_->read_header();
}
SafetensorsFile::~SafetensorsFile() = default;
SafetensorsFile::SafetensorsFile(SafetensorsFile&&) noexcept = default;
SafetensorsFile& SafetensorsFile::operator=(SafetensorsFile&&) noexcept = default;

const std::vector<SafetensorsEntry>& SafetensorsFile::entries() const {
  return content_->entries;
}
const std::map<std::string, std::string>& SafetensorsFile::metadata() const {
  return content_->metadata;
}
const fs::path& SafetensorsFile::path() const {
  return content_->path;
}

const SafetensorsEntry* SafetensorsFile::find(std::string_view name) const {
  const auto found = content_->index.find(name);
  return found == content_->index.end() ? nullptr : &content_->entries[found->second];
}

const SafetensorsEntry& SafetensorsFile::at(std::string_view name) const {
  if (const SafetensorsEntry* entry = find(name)) return *entry;
  std::vector<std::string> names;
  for (const SafetensorsEntry& entry : entries()) names.push_back(entry.name);
  const std::string close = nearest(name, names);
  fail(ErrorKind::data, "'", path().string(), "' has no tensor '", excerpt(name), "'",
       names.empty()   ? "; it is empty"
       : close.empty() ? cat("; none of its ", names.size(), " names is like it")
                       : cat("; the nearest name there is '", excerpt(close), "'"));
}

void SafetensorsFile::read_bytes(const SafetensorsEntry& entry, std::uint64_t first,
                                 std::span<std::byte> to) const {
  if (first > entry.bytes || to.size() > entry.bytes - first)
    fail(ErrorKind::data, "tensor '", excerpt(entry.name), "' in '", path().string(), "' has ", entry.bytes,
         " bytes; [", first, ", ", first + to.size(), ") reaches outside");
  if (!to.empty()) content_->read(content_->payload + entry.offset + first, to);
}

void SafetensorsFile::read(std::string_view name, std::int64_t first, const Tensor& to) const {
  const SafetensorsEntry& entry = at(name);
  if (entry.dtype != to.dtype())
    fail(ErrorKind::data, "tensor '", name, "' in '", path().string(), "' holds ", entry.dtype_name, ", not ",
         name_of(to.dtype()));
  if (first < 0 || first > entry.numel() - to.numel())
    fail(ErrorKind::data, "tensor '", name, "' in '", path().string(), "' has ", entry.numel(),
         " elements; [", first, ", ", first + to.numel(), ") reaches outside");
  if (to.numel() == 0) return;
  read_bytes(entry, static_cast<std::uint64_t>(first) * size_of(to.dtype()),
             {static_cast<std::byte*>(to.raw()), to.bytes()});
}

}  // namespace sherd::tensor
