#include <algorithm>
#include <charconv>
#include <fstream>
#include <sstream>

#include "base/excerpt.h"
#include "engine/checkpoint.h"
#include "engine/checkpoint/checksum.h"
#include "engine/checkpoint/format.h"
#include "engine/checkpoint/safetensors.h"
#include "engine/checkpoint/save_folder.h"

namespace sherd::engine {
namespace fs = std::filesystem;
namespace {

/// Enough for the shapes of a million parameters.
constexpr std::uintmax_t largest_manifest = 256 << 20;

std::string read_text(const fs::path& path, const std::string& next_step) {
  std::ifstream in(path, std::ios::binary);
  std::error_code error;
  const std::uintmax_t size = fs::file_size(path, error);
  if (!in || error) fail(ErrorKind::io, "cannot read '", path.string(), "': ", next_step);
  if (size > largest_manifest)
    fail(ErrorKind::data, "'", path.string(), "' has ", size,
         " bytes, more than any file of its name that Sherd writes");
  std::ostringstream text;
  text << in.rdbuf();
  return std::move(text).str();
}

bool is_there(const fs::path& path) {
  std::error_code error;
  return fs::exists(path, error);
}

/// The number in the metadata of where a tensor begins; -1 for anything else.
std::int64_t begin_of(const std::string& text) {
  std::int64_t begin = -1;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, begin);
  return error == std::errc() && stop == end ? begin : -1;
}

/// The whole checkpoints in a folder, for errors.
std::string there_are(const fs::path& directory) {
  std::string names;
  std::error_code error;
  for (fs::directory_iterator at(directory, error), end; !error && at != end; at.increment(error))
    if (is_there(at->path() / "manifest.json"))
      names += (names.empty() ? "" : ", ") + at->path().filename().string();
  return names.empty() ? "no checkpoint was completed in this folder; check the path"
                       : "name one of those that are there: " + excerpt(names, 300);
}

}  // namespace

fs::path checkpoint_folder(const fs::path& directory, const std::string& tag) {
  if (is_there(directory / "manifest.json")) return directory;  // a tag's own folder was named
  std::string name = tag;
  if (name.empty()) {
    const fs::path latest = directory / "latest";
    name = read_text(latest, there_are(directory));
    while (!name.empty() && (name.back() == '\n' || name.back() == ' ')) name.pop_back();
    if (!is_plain_name(name))
      fail(ErrorKind::data, "'", latest.string(),
           "' does not hold the name of a checkpoint: resume from one by naming its tag");
  }
  if (!is_there(directory / name / "manifest.json"))
    fail(ErrorKind::io, "there is no whole checkpoint '", excerpt(name), "' in ", directory.string(), ": ",
         there_are(directory));
  return directory / name;
}

struct CheckpointReader::Content {
  struct Part {
    std::size_t file;
    std::int64_t begin, count;
  };

  explicit Content(fs::path at);
  void add(SafetensorsFile file);
  template <class Visit>
  void for_each_part(const std::string& name, std::int64_t begin, std::int64_t end, const Visit& visit) const;

  fs::path folder;
  Manifest manifest;
  std::vector<SafetensorsFile> files;
  std::map<std::string, std::vector<Part>> parts;  ///< by "KIND.PARAMETER"
};

CheckpointReader::Content::Content(fs::path at) : folder(std::move(at)) {
  const auto path = folder / "manifest.json";
  manifest = Manifest::from_json(read_text(path, "is this a checkpoint's folder?"), path);
  for (int rank = 0; rank < manifest.world_size; ++rank) add(SafetensorsFile(folder / rank_file(rank)));
  for (auto& [name, parts] : parts)
    std::sort(parts.begin(), parts.end(), [](const Part& a, const Part& b) { return a.begin < b.begin; });
}

void CheckpointReader::Content::add(SafetensorsFile file) {
  const auto id = file.metadata().find(save_id_key);
  if ((id == file.metadata().end() ? "" : id->second) != manifest.save_id)
    fail(ErrorKind::data, "'", file.path().string(), "' and the manifest beside it were not saved together: ",
         "resume from another checkpoint by naming its tag");
  for (const SafetensorsEntry& entry : file.entries()) {
    const auto text = file.metadata().find(entry.name);
    const std::int64_t begin = text == file.metadata().end() ? -1 : begin_of(text->second);
    if (begin < 0 || begin > INT64_MAX - entry.numel())
      fail(ErrorKind::data, "'", file.path().string(), "' does not say where tensor '", excerpt(entry.name),
           "' begins");
    parts[entry.name].push_back({files.size(), begin, entry.numel()});
  }
  files.push_back(std::move(file));
}

/// Calls visit(part, first, last) for the parts that together hold elements [begin, end) of tensor `name`.
template <class Visit>
void CheckpointReader::Content::for_each_part(const std::string& name, std::int64_t begin, std::int64_t end,
                                              const Visit& visit) const {
  std::int64_t at = begin;
  if (const auto found = parts.find(name); found != parts.end())
    for (const Part& part : found->second) {
      if (at >= end || part.begin > at) break;
      const std::int64_t stop = std::min(end, part.begin + part.count);
      if (stop <= at) continue;
      visit(part, at, stop);
      at = stop;
    }
  if (at < end)
    fail(ErrorKind::data, "checkpoint ", folder.string(), " lacks elements from ", at, " on of '", name,
         "': it was written by another model or optimizer");
}

CheckpointReader::CheckpointReader(fs::path folder)
    : content_(std::make_unique<Content>(std::move(folder))) {}
CheckpointReader::~CheckpointReader() = default;
CheckpointReader::CheckpointReader(CheckpointReader&&) noexcept = default;

const Manifest& CheckpointReader::manifest() const {
  return content_->manifest;
}
const fs::path& CheckpointReader::folder() const {
  return content_->folder;
}

void CheckpointReader::verify(const std::string& file) const {
  const auto entry = manifest().files.find(file);
  require(entry != manifest().files.end(), "checkpoint ", folder().string(), " has no file '", file, "'");
  const FileChecksum wanted = entry->second, found = checksum_file(folder() / file);
  if (found == wanted) return;
  fail(ErrorKind::data, (folder() / file).string(), " is damaged: ", found.bytes, " bytes with CRC-32C ",
       found.crc32c, " where the manifest has ", wanted.bytes, " and ", wanted.crc32c,
       "; resume from an earlier checkpoint by naming its tag");
}

void CheckpointReader::require_state(const std::string& kind, const std::string& parameter,
                                     std::int64_t begin, std::int64_t end, DType dtype) const {
  const std::string name = kind + "." + parameter;
  content_->for_each_part(name, begin, end, [&](const Content::Part& part, std::int64_t, std::int64_t) {
    const SafetensorsEntry& entry = content_->files[part.file].at(name);
    if (entry.dtype != dtype)
      fail(ErrorKind::data, "checkpoint ", folder().string(), " holds '", name, "' in ", entry.dtype_name,
           ", and this run keeps it in ", name_of(dtype),
           ": resume with the optimizer and the training.moments_dtype "
           "that it was saved with");
  });
}

void CheckpointReader::read(const std::string& kind, const std::string& parameter, std::int64_t begin,
                            const tensor::Tensor& to) const {
  const std::string name = kind + "." + parameter;
  content_->for_each_part(
      name, begin, begin + to.numel(), [&](const Content::Part& part, std::int64_t at, std::int64_t stop) {
        content_->files[part.file].read(name, at - part.begin, to.range(at - begin, stop - begin));
      });
}

}  // namespace sherd::engine
