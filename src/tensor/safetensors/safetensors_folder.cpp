#include "tensor/safetensors/safetensors_folder.h"

#include <nlohmann/json.hpp>
#include <set>

#include "base/files.h"
#include "base/text/check_json.h"
#include "base/text/excerpt.h"

namespace sherd::tensor {
namespace fs = std::filesystem;
namespace {

std::string single_file(const std::string& stem) {
  return stem + ".safetensors";
}
std::string index_file(const std::string& stem) {
  return stem + ".safetensors.index.json";
}

bool is_there(const fs::path& path) {
  std::error_code error;
  return fs::exists(path, error);
}

/// The files that an index names.
std::set<std::string> indexed_files(const fs::path& path, std::map<std::string, std::string>& weights) {
  const std::string text = read_file(path);
  try {
    check_json(text);
    const nlohmann::json index = nlohmann::json::parse(text);
    std::set<std::string> out;
    for (const auto& [name, file] : index.at("weight_map").items()) {
      const std::string shard = file.get<std::string>();
      if (shard.empty() || fs::path(shard).filename() != shard)
        fail(ErrorKind::data, "'", excerpt(shard), "' is not the name of a file beside it");
      out.insert(shard);
      weights.emplace(name, shard);
    }
    return out;
  } catch (const std::exception& error) {
    fail(ErrorKind::data, "'", path.string(),
         "' is no index of safetensors files: ", excerpt(error.what(), 200));
  }
}

[[noreturn]] void nothing_there(const fs::path& folder, const std::string& stem) {
  if (!is_there(folder)) fail(ErrorKind::io, "there is no folder '", folder.string(), "'");
  if (is_there(folder / "pytorch_model.bin") || is_there(folder / "pytorch_model.bin.index.json"))
    fail(ErrorKind::data, "'", folder.string(), "' has PyTorch's own files (pytorch_model.bin) and no ",
         single_file(stem),
         ": load the model with transformers once and call save_pretrained(), which writes safetensors");
  fail(ErrorKind::data, "'", folder.string(), "' has neither ", single_file(stem), " nor ", index_file(stem));
}

}  // namespace

SafetensorsFolder::SafetensorsFolder(fs::path folder, const std::string& stem) : path_(std::move(folder)) {
  if (is_there(path_ / single_file(stem))) {
    add(path_ / single_file(stem));
    return;
  }
  const fs::path index = path_ / index_file(stem);
  if (!is_there(index)) nothing_there(path_, stem);
  std::map<std::string, std::string> weights;
  for (const std::string& file : indexed_files(index, weights)) add(path_ / file);
  for (const auto& [name, file] : weights) {
    const auto found = tensors_.find(name);
    if (found == tensors_.end() || files_[found->second.first]->path().filename() != file)
      fail(ErrorKind::data, "'", index.string(), "' names tensor '", excerpt(name), "' in ", excerpt(file),
           ", which does not have it: the files are of different models, or one was not copied");
  }
}

void SafetensorsFolder::add(const fs::path& file) {
  files_.push_back(std::make_unique<SafetensorsFile>(file));
  for (const SafetensorsEntry& entry : files_.back()->entries())
    if (!tensors_.emplace(entry.name, std::pair(files_.size() - 1, &entry)).second)
      fail(ErrorKind::data, "tensor '", excerpt(entry.name), "' is in two files of '", path_.string(), "'");
}

std::vector<std::string> SafetensorsFolder::names() const {
  std::vector<std::string> out;
  for (const auto& [name, at] : tensors_) out.push_back(name);
  return out;
}

const SafetensorsEntry* SafetensorsFolder::find(std::string_view name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : found->second.second;
}

void SafetensorsFolder::read_bytes(std::string_view name, std::uint64_t first,
                                   std::span<std::byte> to) const {
  const auto found = tensors_.find(name);
  require(found != tensors_.end(), "'", path_.string(), "' has no tensor '", name, "'");
  files_[found->second.first]->read_bytes(*found->second.second, first, to);
}

SafetensorsFolderWriter::SafetensorsFolderWriter(fs::path folder, const std::vector<SafetensorsSpec>& specs,
                                                 std::uint64_t shard_bytes,
                                                 const std::map<std::string, std::string>& metadata,
                                                 std::string stem)
    : folder_(std::move(folder)), stem_(std::move(stem)) {
  std::vector<std::vector<SafetensorsSpec>> shards(1);
  std::uint64_t bytes = 0;
  for (const SafetensorsSpec& spec : specs) {
    std::uint64_t own = size_of(spec.dtype);
    for (const std::int64_t extent : spec.shape) own *= static_cast<std::uint64_t>(extent);
    if (bytes + own > shard_bytes && !shards.back().empty()) shards.emplace_back(), bytes = 0;
    shards.back().push_back(spec);
    bytes += own, total_bytes_ += own;
  }
  for (std::size_t i = 0; i < shards.size(); ++i) {
    char number[64];
    std::snprintf(number, sizeof number, "-%05zu-of-%05zu.safetensors", i + 1, shards.size());
    files_.push_back(shards.size() == 1 ? single_file(stem_) : stem_ + number);
    for (const SafetensorsSpec& spec : shards[i]) shard_of_[spec.name] = i;
    writers_.emplace_back(folder_ / files_.back(), std::move(shards[i]), metadata);
  }
}

void SafetensorsFolderWriter::write(std::string_view name, std::int64_t first,
                                    std::span<const std::byte> data) {
  const auto found = shard_of_.find(name);
  require(found != shard_of_.end(), "tensor '", name, "' was not told of");
  writers_[found->second].write(name, first, data);
}

void SafetensorsFolderWriter::finish() {
  for (SafetensorsWriter& writer : writers_) writer.finish();
  if (writers_.size() == 1) return;
  nlohmann::ordered_json index;
  index["metadata"]["total_size"] = total_bytes_;
  for (const auto& [name, shard] : shard_of_) index["weight_map"][name] = files_[shard];
  write_file_atomically(folder_ / index_file(stem_), index.dump(2) + "\n");
}

}  // namespace sherd::tensor
