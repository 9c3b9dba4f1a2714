#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "base/files.h"
#include "models/gguf/gguf_blocks.h"

// This folder writes models as GGUF files, which llama.cpp and the programs around it read:
// - the file, metadata and tensors: here; values in blocks: gguf_blocks.h
// - which tensors a model's parameters are: gguf_layout.h; what a family's files have otherwise is the member
//   `gguf` of its entry in models/families
// - keys that describe the model: gguf_metadata.h; its tokenizer: gguf_tokenizer.h
// - all of it, one run of rows at a time: gguf_export.h
namespace sherd::models {

/// A value of a file's metadata.
using GgufValue =
    std::variant<std::uint32_t, std::int32_t, float, bool, std::string, std::vector<std::uint8_t>,
                 std::vector<std::int32_t>, std::vector<float>, std::vector<bool>, std::vector<std::string>>;

/// A file's metadata, in its order.
class GgufMetadata {
 public:
  /// Throws Error{usage} for a key that is there.
  void set(std::string key, GgufValue value);
  void set(std::string key, const char* text) { set(std::move(key), GgufValue(std::string(text))); }
  /// A size or a count, as files have them.
  void set(std::string key, std::int64_t number) {
    set(std::move(key), GgufValue(static_cast<std::uint32_t>(number)));
  }
  void set(std::string key, double number) { set(std::move(key), GgufValue(static_cast<float>(number))); }
  const std::vector<std::pair<std::string, GgufValue>>& values() const { return values_; }

 private:
  std::vector<std::pair<std::string, GgufValue>> values_;
};

/// A tensor of a file.
struct GgufSpec {
  std::string name;
  GgufType type;
  std::vector<std::int64_t> shape;  ///< the extent of a row comes last, as everywhere here
};

/// Writes a GGUF file of version 3, whose tensors' rows may come in any order. It appears when it is
/// complete.
class GgufWriter {
 public:
  /// Throws Error{usage} for two tensors of one name, and rows of no whole number of blocks; Error{io}.
  GgufWriter(std::filesystem::path path, const GgufMetadata& metadata, const std::vector<GgufSpec>& tensors);

  /// Writes encoded rows of a tensor from row `first` on, all dimensions but the last counted through.
  void write(std::string_view tensor, std::int64_t first, std::span<const std::byte> rows);
  /// Completes the file, and gives its bytes. Throws Error{usage} where not all rows of all tensors came.
  std::uint64_t finish();

 private:
  struct Place {
    std::uint64_t begin, row_bytes, bytes, written = 0;
  };
  AtomicFile file_;
  std::map<std::string, Place, std::less<>> places_;
  std::uint64_t end_ = 0;
};

}  // namespace sherd::models
