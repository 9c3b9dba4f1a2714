#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tensor/safetensors/safetensors.h"

namespace sherd::tensor {

// A model's tensors as Hugging Face's transformers keeps them in a folder: in model.safetensors, or in shards
// of it, model-00001-of-00004.safetensors …, which model.safetensors.index.json lists.

/// A folder like that, which is read. The index and the head of every shard are checked when it is opened;
/// reading is as SafetensorsFile's.
class SafetensorsFolder {
 public:
  /// Throws Error{io} or Error{data} naming what is missing or wrong; of a folder with PyTorch's own files
  /// alone (pytorch_model.bin), it says so.
  /// `stem`: of the files' names, in place of "model".
  explicit SafetensorsFolder(std::filesystem::path folder, const std::string& stem = "model");

  const std::filesystem::path& path() const { return path_; }
  /// The tensors of all files, by name.
  std::vector<std::string> names() const;
  /// Null when there is no such tensor. As long as the folder object lives.
  const SafetensorsEntry* find(std::string_view name) const;
  /// As SafetensorsFile::read_bytes() of a tensor that is there.
  void read_bytes(std::string_view name, std::uint64_t first, std::span<std::byte> to) const;

 private:
  void add(const std::filesystem::path& file);

  std::filesystem::path path_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, std::pair<std::size_t, const SafetensorsEntry*>, std::less<>> tensors_;
};

/// Writes such a folder, as SafetensorsWriter does a file: tensors are told first, and cut into shards of at
/// most `shard_bytes` in the order in which they are told (one tensor that is larger has a shard of its own).
class SafetensorsFolderWriter {
 public:
  /// As SafetensorsWriter's.
  SafetensorsFolderWriter(std::filesystem::path folder, const std::vector<SafetensorsSpec>& specs,
                          std::uint64_t shard_bytes, const std::map<std::string, std::string>& metadata,
                          std::string stem = "model");

  void write(std::string_view name, std::int64_t first, std::span<const std::byte> data);
  /// Finishes the shards, and writes their index where there are several.
  void finish();
  std::size_t shards() const { return writers_.size(); }

 private:
  std::filesystem::path folder_;
  std::string stem_;
  std::vector<std::string> files_;
  std::vector<SafetensorsWriter> writers_;
  std::map<std::string, std::size_t, std::less<>> shard_of_;
  std::uint64_t total_bytes_ = 0;
};

}  // namespace sherd::tensor
