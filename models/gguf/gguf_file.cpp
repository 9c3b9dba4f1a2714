#include "models/gguf/gguf_file.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

#include "base/error.h"

namespace sherd::models {
namespace {

static_assert(std::endian::native == std::endian::little, "files are little-endian");

constexpr std::uint64_t alignment = 32;  // what readers take where general.alignment is not there

std::uint64_t aligned(std::uint64_t bytes) {
  return (bytes + alignment - 1) / alignment * alignment;
}

/// The number by which files name the type of a value, or of an array's elements.
template <class T>
constexpr std::uint32_t number_of() {
  if constexpr (std::is_same_v<T, std::uint8_t>) return 0;
  if constexpr (std::is_same_v<T, std::uint32_t>) return 4;
  if constexpr (std::is_same_v<T, std::int32_t>) return 5;
  if constexpr (std::is_same_v<T, float>) return 6;
  if constexpr (std::is_same_v<T, bool>) return 7;
  if constexpr (std::is_same_v<T, std::string>) return 8;
}

/// The bytes of a file in front of its tensors' values.
class Header {
 public:
  template <class T>
  void put(T value) {
    if constexpr (std::is_same_v<T, std::string>) {
      put(static_cast<std::uint64_t>(value.size()));
      bytes_ += value;
    } else {
      static_assert(std::is_arithmetic_v<T>);
      bytes_.append(reinterpret_cast<const char*>(&value), sizeof(value));
    }
  }
  void put_value(const GgufValue& value) {
    std::visit(
        [&]<class T>(const T& held) {
          if constexpr (requires { typename T::allocator_type; } && !std::is_same_v<T, std::string>) {
            using Element = typename T::value_type;
            put(std::uint32_t{9});
            put(number_of<Element>());
            put(static_cast<std::uint64_t>(held.size()));
            for (const Element& element : held) put<Element>(element);
          } else {
            put(number_of<T>());
            put(held);
          }
        },
        value);
  }
  void pad() { bytes_.resize(aligned(bytes_.size())); }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_ = "GGUF";
};

}  // namespace

void GgufMetadata::set(std::string key, GgufValue value) {
  for (const auto& [there, held] : values_) require(there != key, "metadata has two values of ", key);
  values_.emplace_back(std::move(key), std::move(value));
}

GgufWriter::GgufWriter(std::filesystem::path path, const GgufMetadata& metadata,
                       const std::vector<GgufSpec>& tensors)
    : file_(std::move(path)) {
  Header header;
  header.put(std::uint32_t{3});
  header.put(static_cast<std::uint64_t>(tensors.size()));
  header.put(static_cast<std::uint64_t>(metadata.values().size()));
  for (const auto& [key, value] : metadata.values()) {
    header.put(key);
    header.put_value(value);
  }
  for (const GgufSpec& tensor : tensors) {
    const std::int64_t columns = tensor.shape.back();
    std::uint64_t rows = 1;
    header.put(tensor.name);
    header.put(static_cast<std::uint32_t>(tensor.shape.size()));
    for (auto extent = tensor.shape.rbegin(); extent != tensor.shape.rend(); ++extent)
      header.put(static_cast<std::uint64_t>(*extent));
    for (auto extent = tensor.shape.begin(); extent + 1 != tensor.shape.end(); ++extent)
      rows *= static_cast<std::uint64_t>(*extent);
    header.put(static_cast<std::uint32_t>(tensor.type));
    header.put(end_);
    const std::uint64_t row_bytes = bytes_of_row(tensor.type, columns);
    const bool fresh = places_.emplace(tensor.name, Place{end_, row_bytes, rows * row_bytes}).second;
    require(fresh, "two tensors are named ", tensor.name);
    end_ = aligned(end_ + rows * row_bytes);
  }
  header.pad();
  for (auto& [name, place] : places_) place.begin += header.bytes().size();
  end_ += header.bytes().size();
  file_.reserve(end_);
  file_.write_at(0, header.bytes().data(), header.bytes().size());
}

void GgufWriter::write(std::string_view tensor, std::int64_t first, std::span<const std::byte> rows) {
  const auto found = places_.find(tensor);
  require(found != places_.end(), "the file has no tensor ", tensor);
  Place& place = found->second;
  const std::uint64_t at = static_cast<std::uint64_t>(first) * place.row_bytes;
  require(rows.size() % place.row_bytes == 0 && at + rows.size() <= place.bytes, tensor,
          " does not have these rows");
  file_.write_at(place.begin + at, rows.data(), rows.size());
  place.written += rows.size();
}

std::uint64_t GgufWriter::finish() {
  for (const auto& [name, place] : places_)
    require(place.written == place.bytes, name, " has ", place.written, " bytes of ", place.bytes);
  file_.commit();
  return end_;
}

}  // namespace sherd::models
