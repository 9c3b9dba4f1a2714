#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>
#include <unordered_map>
#include <utility>

#include "base/error.h"
#include "base/excerpt.h"
#include "engine/safetensors.h"
#include "engine/safetensors_types.h"

namespace sherd::engine {
namespace fs = std::filesystem;
using nlohmann::json;

static_assert(std::endian::native == std::endian::little, "safetensors elements are little endian");

struct SafetensorsFile::Mapping {
  explicit Mapping(fs::path file);
  ~Mapping() {
    if (data) ::munmap(const_cast<std::byte*>(data), size);
  }
  template <class... Args>
  [[noreturn]] void bad(const Args&... args) const {
    fail(ErrorKind::data, "'", path.string(), "' is not a valid safetensors file: ", args...);
  }
  void read_header();
  json parse_header(std::string_view text) const;
  SafetensorsEntry parse_entry(const std::string& name, const json& value) const;
  void check_layout();

  fs::path path;
  const std::byte* data = nullptr;
  std::size_t size = 0;
  std::uint64_t payload = 0;  ///< where the elements begin
  std::vector<SafetensorsEntry> entries;
  std::unordered_map<std::string_view, std::size_t> index;  ///< keys point into `entries`
  std::map<std::string, std::string> metadata;
};

SafetensorsFile::Mapping::Mapping(fs::path file) : path(std::move(file)) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  struct stat status {};
  int error = 0;
  if (descriptor < 0 || ::fstat(descriptor, &status) != 0) error = errno;
  if (!error && S_ISDIR(status.st_mode)) error = EISDIR;
  if (!error && status.st_size > 0) {
    void* mapped =
        ::mmap(nullptr, static_cast<std::size_t>(status.st_size), PROT_READ, MAP_PRIVATE, descriptor, 0);
    if (mapped == MAP_FAILED)
      error = errno;
    else
      data = static_cast<const std::byte*>(mapped), size = static_cast<std::size_t>(status.st_size);
  }
  if (descriptor >= 0) ::close(descriptor);
  if (error) fail(ErrorKind::io, "cannot open '", path.string(), "': ", std::strerror(error));
}

void SafetensorsFile::Mapping::read_header() {
  if (size < 8) bad("it has ", size, " bytes, fewer than the 8 of the header's length");
  std::uint64_t length = 0;
  std::memcpy(&length, data, 8);
  if (length > safetensors_header_limit)
    bad("its header would have ", length, " bytes, over the format's limit of ", safetensors_header_limit);
  if (length > size - 8) bad("its header of ", length, " bytes does not fit into the file's ", size);
  payload = 8 + length;
  const json header =
      parse_header({reinterpret_cast<const char*>(data) + 8, static_cast<std::size_t>(length)});
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

json SafetensorsFile::Mapping::parse_header(std::string_view text) const {
  if (!text.starts_with('{')) bad("its header does not begin with '{'");
  std::vector<std::set<std::string>> seen;  // keys of the objects that are open
  std::string repeated;
  const auto watch = [&](int, json::parse_event_t event, json& value) {
    if (event == json::parse_event_t::object_start) seen.emplace_back();
    if (event == json::parse_event_t::object_end) seen.pop_back();
    if (event == json::parse_event_t::key && !seen.back().insert(value.get<std::string>()).second)
      repeated = value.get<std::string>();
    return true;
  };
  json header;
  try {
    header = json::parse(text, watch);
  } catch (const json::exception& error) {
    bad("its header is not JSON (", error.what(), ")");
  }
  if (!repeated.empty()) bad("'", repeated, "' appears twice in its header");
  return header;
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

SafetensorsEntry SafetensorsFile::Mapping::parse_entry(const std::string& name, const json& value) const {
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

void SafetensorsFile::Mapping::check_layout() {
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

SafetensorsFile::SafetensorsFile(fs::path path) : mapping_(std::make_unique<Mapping>(std::move(path))) {
  mapping_->read_header();
}
SafetensorsFile::~SafetensorsFile() = default;
SafetensorsFile::SafetensorsFile(SafetensorsFile&&) noexcept = default;
SafetensorsFile& SafetensorsFile::operator=(SafetensorsFile&&) noexcept = default;

const std::vector<SafetensorsEntry>& SafetensorsFile::entries() const {
  return mapping_->entries;
}
const std::map<std::string, std::string>& SafetensorsFile::metadata() const {
  return mapping_->metadata;
}
const fs::path& SafetensorsFile::path() const {
  return mapping_->path;
}

const SafetensorsEntry* SafetensorsFile::find(std::string_view name) const {
  const auto found = mapping_->index.find(name);
  return found == mapping_->index.end() ? nullptr : &mapping_->entries[found->second];
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

std::span<const std::byte> SafetensorsFile::bytes(const SafetensorsEntry& entry) const {
  return {mapping_->data + mapping_->payload + entry.offset, static_cast<std::size_t>(entry.bytes)};
}

void SafetensorsFile::read(std::string_view name, std::int64_t first, const tensor::Tensor& to) const {
  const SafetensorsEntry& entry = at(name);
  if (entry.dtype != to.dtype())
    fail(ErrorKind::data, "tensor '", name, "' in '", path().string(), "' holds ", entry.dtype_name, ", not ",
         name_of(to.dtype()));
  if (first < 0 || first > entry.numel() - to.numel())
    fail(ErrorKind::data, "tensor '", name, "' in '", path().string(), "' has ", entry.numel(),
         " elements; [", first, ", ", first + to.numel(), ") reaches outside");
  if (to.numel() == 0) return;
  std::memcpy(to.raw(), bytes(entry).data() + static_cast<std::size_t>(first) * size_of(to.dtype()),
              to.bytes());
}

}  // namespace sherd::engine
