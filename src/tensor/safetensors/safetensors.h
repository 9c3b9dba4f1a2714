#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/crc32c.h"
#include "base/dtype.h"
#include "tensor/tensor.h"

namespace sherd::tensor {

// The safetensors format (https://github.com/huggingface/safetensors): eight bytes with the header's length,
// little endian; the header, a JSON object padded with spaces; then the elements, packed without gaps.

/// One element type of the safetensors format, in the order in which the reference writer sorts them.
struct SafetensorsType {
  std::string_view name;
  std::uint32_t bits;
  std::optional<DType> dtype;
};

inline constexpr std::array<SafetensorsType, 22> safetensors_types{{
    {"BOOL", 8, {}},         {"F4", 4, {}},           {"F6_E2M3", 6, {}},        {"F6_E3M2", 6, {}},
    {"U8", 8, DType::u8},    {"I8", 8, {}},           {"F8_E5M2", 8, {}},        {"F8_E4M3", 8, {}},
    {"F8_E8M0", 8, {}},      {"F8_E4M3FNUZ", 8, {}},  {"F8_E5M2FNUZ", 8, {}},    {"I16", 16, {}},
    {"U16", 16, DType::u16}, {"F16", 16, DType::f16}, {"BF16", 16, DType::bf16}, {"I32", 32, DType::i32},
    {"U32", 32, {}},         {"F32", 32, DType::f32}, {"C64", 64, {}},           {"F64", 64, DType::f64},
    {"I64", 64, DType::i64}, {"U64", 64, {}},
}};

/// Longest header the format allows.
inline constexpr std::uint64_t safetensors_header_limit = 100'000'000;

/// One tensor of a safetensors file.
struct SafetensorsEntry {
  std::string name;
  std::string dtype_name;  ///< as the file spells it: "F32", "BF16", "BOOL", "F8_E4M3", …
  /// Nothing for a type that Sherd does not compute with; its bytes can still be read.
  std::optional<DType> dtype;
  std::vector<std::int64_t> shape;
  std::uint64_t offset = 0;  ///< first byte, counted from the end of the header
  std::uint64_t bytes = 0;
  std::int64_t numel() const;
};

/// A safetensors file, checked whole when opened: length and syntax of the header, dtypes, shapes against
/// byte counts, no overlap, no gap, nothing missing or left over at the end, no name twice. Any fault throws
/// Error{data} naming the file and the fault; a file that cannot be opened or read throws Error{io}.
///
/// The file is opened for each read and not between them, so that one process can read a checkpoint of any
/// number of ranks; that it was replaced or cut meanwhile is Error{data}. Reading is safe from any thread.
class SafetensorsFile {
 public:
  explicit SafetensorsFile(std::filesystem::path path);
  ~SafetensorsFile();
  SafetensorsFile(SafetensorsFile&&) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&&) noexcept;

  /// All entries, in the order of their bytes.
  const std::vector<SafetensorsEntry>& entries() const;
  /// The strings under `__metadata__`.
  const std::map<std::string, std::string>& metadata() const;
  /// Null when the file has no such tensor.
  const SafetensorsEntry* find(std::string_view name) const;
  /// Throws Error{data} naming the nearest name there is.
  const SafetensorsEntry& at(std::string_view name) const;
  /// Copies the tensor's bytes [first, first + to.size()) into `to`, whatever its dtype. Throws Error{data}
  /// when it has fewer.
  void read_bytes(const SafetensorsEntry& entry, std::uint64_t first, std::span<std::byte> to) const;
  /// Copies elements [first, first + to.numel()) of the flattened tensor `name` into `to`, whatever its
  /// shape. Throws Error{data} when the dtypes differ or the tensor has fewer elements.
  void read(std::string_view name, std::int64_t first, const Tensor& to) const;
  const std::filesystem::path& path() const;

 private:
  struct Content;
  std::unique_ptr<Content> content_;
};

/// A tensor as a SafetensorsWriter is told of it before its elements come.
struct SafetensorsSpec {
  std::string name;
  DType dtype = DType::f32;
  std::vector<std::int64_t> shape;
  std::string type_name = {};  ///< of bytes, u8, the type that the file names: "I8"; empty: the dtype's own
};

/// Writes a safetensors file piece by piece, so that no rank ever holds more than the piece at hand: all
/// names, types and shapes are declared first, elements follow in any order and cut. Tensors lie in the order
/// of the reference writer (widest elements first, then by name), so the same tensors give the same bytes.
/// The file appears under its name when finish() has seen every element. write() may be called from several
/// threads at once for distinct tensors or ranges.
class SafetensorsWriter {
 public:
  /// Reserves the space. Throws Error{usage} for a repeated name, the name "__metadata__" or a negative
  /// extent; Error{io} when the disk has too little room.
  SafetensorsWriter(std::filesystem::path path, std::vector<SafetensorsSpec> specs,
                    const std::map<std::string, std::string>& metadata = {});
  ~SafetensorsWriter();
  SafetensorsWriter(SafetensorsWriter&&) noexcept;

  /// Writes the elements of `from` to positions [first, first + from.numel()) of the flattened tensor `name`.
  /// Throws Error{usage} when the dtype differs, the range is outside, or was written before.
  void write(std::string_view name, std::int64_t first, const Tensor& from);
  /// The same from host memory: `data` holds whole elements of the declared dtype.
  void write(std::string_view name, std::int64_t first, std::span<const std::byte> data);
  /// Throws Error{usage} naming a tensor with elements still missing; otherwise syncs and renames. Returns
  /// what it wrote, summed on the way.
  FileChecksum finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace sherd::tensor
