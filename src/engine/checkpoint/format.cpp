#include "engine/checkpoint/format.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/crc32c.h"
#include "base/text/check_json.h"
#include "base/text/excerpt.h"
#include "tensor/formats/stored_format.h"

namespace sherd::engine {
namespace {

using nlohmann::json;
using tensor::Range;
using tensor::Shape;
using tensor::Slice;

const json& member(const json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end()) fail(ErrorKind::data, "it has no ", key);
  return *found;
}

const json& list_of(const json& value, const char* what) {
  if (!value.is_array()) fail(ErrorKind::data, what, " is not a list");
  return value;
}

std::int64_t number_of(const json& value, const char* what) {
  if (!value.is_number_unsigned() || value.get<std::uint64_t>() > INT64_MAX)
    fail(ErrorKind::data, what, " is ", excerpt(value.dump(), 40), ", not a whole number");
  return value.get<std::int64_t>();
}

Slice slice_of(const json& value, const Shape& shape) {
  Slice::Blocks blocks;
  for (const json& dimension : list_of(value, "slice")) {
    blocks.emplace_back();
    for (const json& range : list_of(dimension, "a dimension of slice")) {
      if (list_of(range, "a block of slice").size() != 2) fail(ErrorKind::data, "a block is not two numbers");
      blocks.back().push_back({number_of(range[0], "a block's begin"), number_of(range[1], "a block's end")});
    }
  }
  return Slice(shape, std::move(blocks));
}

PieceRecord read_record(const std::string& text, const Shape& shape) {
  check_json(text);
  const json root = json::parse(text);
  if (!root.is_object()) fail(ErrorKind::data, "it is not an object");
  std::vector<std::int64_t> extents;
  for (const json& extent : list_of(member(root, "shape"), "shape"))
    extents.push_back(number_of(extent, "an extent"));
  if (!std::ranges::equal(extents, shape.dims()))
    fail(ErrorKind::data, "its shape is not ", shape.str(), " as in the manifest");
  PieceRecord out{slice_of(member(root, "slice"), shape), {number_of(member(root, "begin"), "begin"), 0}};
  if (const auto found = root.find("format"); found != root.end()) {
    const auto format = found->is_string() ? tensor::parse_stored_format(found->get<std::string>())
                                           : std::optional<StoredFormat>();
    if (!format) fail(ErrorKind::data, "its format, ", excerpt(found->dump()), ", is none that Sherd knows");
    out.format = *format;
  }
  return out;
}

}  // namespace

namespace {

std::string of_rank(int rank, const char* ending) {
  const std::string digits = std::to_string(rank);
  return "rank_" + std::string(5 - std::min<std::size_t>(5, digits.size()), '0') + digits + ending;
}

}  // namespace

static constexpr const char* frozen_ending = ".frozen.safetensors";

std::string rank_file(int rank) {
  return of_rank(rank, ".safetensors");
}

std::string frozen_file(int rank) {
  return of_rank(rank, frozen_ending);
}

bool is_frozen_file(const std::string& name) {
  return name.ends_with(frozen_ending);
}

FileChecksum checksum_file(const std::filesystem::path& path) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) fail(ErrorKind::io, "cannot open '", path.string(), "': ", std::strerror(errno));
  ::posix_fadvise(descriptor, 0, 0, POSIX_FADV_SEQUENTIAL);
  std::vector<std::byte> buffer(1 << 20);
  FileChecksum sum;
  for (;;) {
    const ssize_t got = ::read(descriptor, buffer.data(), buffer.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      const int error = errno;
      ::close(descriptor);
      fail(ErrorKind::io, "cannot read '", path.string(), "': ", std::strerror(error));
    }
    if (got == 0) break;
    sum.bytes += static_cast<std::uint64_t>(got);
    sum.crc32c = crc32c(buffer.data(), static_cast<std::size_t>(got), sum.crc32c);
  }
  ::close(descriptor);
  return sum;
}

std::string PieceRecord::to_json() const {
  auto blocks = json::array();
  for (const std::vector<Range>& ranges : slice.blocks()) {
    blocks.push_back(json::array());
    for (const Range& range : ranges) blocks.back().push_back({range.begin, range.end});
  }
  nlohmann::ordered_json root;
  root["shape"] = slice.logical().dims();
  root["slice"] = std::move(blocks);
  root["begin"] = elements.begin;
  if (format != StoredFormat::compute && format != StoredFormat::int8)
    root["format"] = tensor::name_of(format);
  return root.dump();
}

namespace {

/// Elements behind `begin` of a slice of `all`, of which a tensor holds so many bytes of blocks.
std::int64_t elements_in(StoredFormat format, std::int64_t bytes, std::int64_t begin, std::int64_t all) {
  const tensor::BlockSize size = tensor::block_size(format);
  if (bytes % size.bytes != 0 || begin % size.elements != 0)
    fail(ErrorKind::data, bytes, " bytes from element ", begin, " on are no blocks of ",
         tensor::name_of(format));
  const std::int64_t most = bytes / size.bytes * size.elements, left = all - begin;
  return most - left >= size.elements ? most : std::min(most, left);  // the last block may be shorter
}

}  // namespace

PieceRecord PieceRecord::parse(const std::string& text, const Manifest& manifest,
                               const std::string& parameter, std::int64_t numel, std::optional<DType> dtype) {
  const auto shape = manifest.shapes.find(parameter);
  if (shape == manifest.shapes.end()) fail(ErrorKind::data, "the manifest knows no parameter of that name");
  PieceRecord out = [&] {
    try {
      return read_record(text, Shape(shape->second));
    } catch (const Error& error) {
      fail(ErrorKind::data, error.what());
    }
  }();
  if (dtype == DType::u8) {
    if (out.format == StoredFormat::compute) out.format = StoredFormat::int8;
    numel = elements_in(out.format, numel, out.elements.begin, out.slice.numel());
  }
  if (out.elements.begin > out.slice.numel() - numel)
    fail(ErrorKind::data, numel, " elements from ", out.elements.begin, " on are more than its slice, ",
         out.slice.str(), ", has");
  out.elements.end = out.elements.begin + numel;
  return out;
}

}  // namespace sherd::engine
