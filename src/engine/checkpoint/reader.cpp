#include <algorithm>
#include <fstream>
#include <set>
#include <sstream>

#include "base/text/excerpt.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/format.h"
#include "engine/checkpoint/frozen/referenced_base.h"
#include "engine/checkpoint/pieces.h"
#include "engine/checkpoint/save_folder.h"
#include "tensor/safetensors/safetensors.h"

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

/// Advice where a checkpoint is not whole any more.
constexpr const char* another =
    "take another checkpoint of the run, by its tag: `sherd checkpoint verify FOLDER --all` tells which are "
    "whole";

/// The folders in one that hold a file; "" where there are none.
std::string folders_with(const fs::path& directory, const char* file) {
  std::string names;
  std::error_code error;
  for (fs::directory_iterator at(directory, error), end; !error && at != end; at.increment(error))
    if (is_there(at->path() / file)) names += (names.empty() ? "" : ", ") + at->path().filename().string();
  return names;
}

/// The whole checkpoints in a folder, or the runs, for errors.
std::string there_are(const fs::path& directory) {
  std::error_code error;
  if (!fs::is_directory(directory, error))
    return "there is no such folder; name that of a run, its training.save_dir";
  if (const std::string runs = folders_with(directory, latest_pointer); !runs.empty())
    return "it is a folder of runs; name one of them: " + excerpt(runs, 300);
  const std::string names = folders_with(directory, "manifest.json");
  return names.empty() ? "no checkpoint was completed in this folder; check the path"
                       : "name one of those that are there: " + excerpt(names, 300);
}

}  // namespace

fs::path checkpoint_folder(const fs::path& directory, const std::string& tag) {
  if (is_there(directory / "config.json") && !is_there(directory / "latest") &&
      !is_there(directory / "manifest.json"))
    fail(ErrorKind::io, "'", directory.string(),
         "' is a folder of Hugging Face's, and no checkpoint: `sherd import` makes one of it");
  if (is_there(directory / "manifest.json")) return directory;  // a tag's own folder was named
  for (const char* pointer : {latest_pointer, best_pointer}) {
    std::error_code error;
    if (tag.empty() && directory.filename() == pointer && fs::is_regular_file(directory, error))
      return checkpoint_folder(directory.parent_path(), pointer);
  }
  std::string name = tag;
  std::error_code error;
  if (name.empty()) name = latest_pointer;
  if (name == latest_pointer || (name == best_pointer && !fs::is_directory(directory / name, error))) {
    const fs::path pointer = directory / name;
    read_text(pointer, name == best_pointer
                           ? cat("no checkpoint is the best of a run with training.keep_best there; ",
                                 there_are(directory))
                           : there_are(directory));
    name = pointed_at(pointer);
    if (name.empty())
      fail(ErrorKind::data, "'", pointer.string(),
           "' does not hold the name of a checkpoint: resume from one by naming its tag");
  }
  if (!is_there(directory / name / "manifest.json"))
    fail(ErrorKind::io, "there is no whole checkpoint '", excerpt(name), "' in ", directory.string(), ": ",
         there_are(directory));
  return directory / name;
}

void require_no_checkpoints(const fs::path& folder, const std::string& advice) {
  std::error_code error;
  if (!fs::exists(folder / latest_pointer, error)) {
    // As after copying some of a run's by themselves: a run of its own would delete them by keep_last.
    if (const std::string names = folders_with(folder, "manifest.json"); !names.empty())
      fail(ErrorKind::config, "training.save_dir: '", folder.string(), "' holds checkpoints (",
           excerpt(names, 300), "), and no file `latest` that names the newest: ", advice,
           " from one of them, by its tag, or choose another folder");
    return;
  }
  fail(ErrorKind::config, "training.save_dir: '", folder.string(), "' holds checkpoints, the newest ",
       checkpoint_folder(folder).filename().string(), ": ", advice, ", or choose another folder");
}

struct CheckpointReader::Content {
  explicit Content(fs::path at);
  void add(SafetensorsFile file, const std::string& save_id);
  StoredFormat format_of(const std::string& name) const {
    const auto found = formats.find(name);
    return found == formats.end() ? StoredFormat::compute : found->second;
  }
  std::string advice_on_dtype(const std::string& kind, bool in_blocks) const;
  std::string advice_on_missing(const std::string& kind, const std::string& parameter) const;

  fs::path folder;
  Manifest manifest;
  std::vector<SafetensorsFile> files;
  PieceIndex pieces;
  std::map<std::string, DType> dtypes;          ///< by KIND.PARAMETER, as one of the files has it
  std::map<std::string, StoredFormat> formats;  ///< of those in blocks
  std::unique_ptr<ReferencedBase> base;         ///< once it was asked for
};

CheckpointReader::Content::Content(fs::path at) : folder(std::move(at)) {
  const auto path = folder / "manifest.json";
  manifest = Manifest::from_json(read_text(path, "is this a checkpoint's folder?"), path);
  const auto file = [&](const std::string& name) {
    try {
      return SafetensorsFile(folder / name);
    } catch (const Error& error) {
      fail(error.kind(), error.what(), "; ", another);
    }
  };
  for (int rank = 0; rank < manifest.world_size; ++rank) {
    add(file(rank_file(rank)), manifest.save_id);
    if (const std::string frozen = frozen_file(rank); manifest.files.contains(frozen))
      add(file(frozen), manifest.frozen_id);
  }
}

void CheckpointReader::Content::add(SafetensorsFile file, const std::string& save_id) {
  const auto id = file.metadata().find(save_id_key);
  if ((id == file.metadata().end() ? "" : id->second) != save_id)
    fail(ErrorKind::data, "'", file.path().string(), "' and the manifest beside it were not saved together: ",
         "resume from another checkpoint by naming its tag");
  for (const SafetensorsEntry& entry : file.entries()) {
    const auto text = file.metadata().find(entry.name);
    const std::string parameter = entry.name.substr(std::min(entry.name.find('.') + 1, entry.name.size()));
    try {
      if (text == file.metadata().end()) fail(ErrorKind::data, "nothing is said of it");
      PieceRecord record = PieceRecord::parse(text->second, manifest, parameter, entry.numel(), entry.dtype);
      if (record.format != StoredFormat::compute &&
          formats.emplace(entry.name, record.format).first->second != record.format)
        fail(ErrorKind::data, "files hold it in several formats");
      pieces.add(entry.name, files.size(), std::move(record));
      if (entry.dtype) dtypes.emplace(entry.name, *entry.dtype);
    } catch (const Error& error) {
      fail(ErrorKind::data, "'", file.path().string(),
           "' does not say which elements of its parameter tensor '", excerpt(entry.name),
           "' holds: ", excerpt(error.what(), 300));
    }
  }
  files.push_back(std::move(file));
}

/// Advice where this run keeps a state in another dtype.
std::string CheckpointReader::Content::advice_on_dtype(const std::string& kind, bool in_blocks) const {
  if (kind == "fp32") return "no run of Sherd saves it so; resume from another checkpoint by naming its tag";
  if (kind == "frozen" && in_blocks)
    return "a base goes on as it is kept: resume with the training.adapter.base_format that it was saved "
           "with, or "
           "begin anew from its weights with training.init_from";
  if (kind == "frozen")
    return cat("a frozen parameter is kept in the precision that the run computes in; resume in ",
               manifest.compute_dtype, ", as it was saved");
  return "resume with the optimizer and the training.moments_dtype that it was saved with";
}

/// Where elements of KIND.PARAMETER are missing.
std::string CheckpointReader::Content::advice_on_missing(const std::string& kind,
                                                         const std::string& parameter) const {
  std::set<std::string> kinds;  // of the parameter
  for (const SafetensorsFile& file : files)
    for (const SafetensorsEntry& entry : file.entries())
      if (const std::string found = entry.name.substr(0, entry.name.find('.'));
          entry.name == cat(found, ".", parameter))
        kinds.insert(found);
  if (kind == "fp32" && kinds.contains("frozen"))
    return "the parameter was frozen when it was saved; freeze it in this run too";
  if (kind == "frozen" && kinds.contains("fp32"))
    return "the parameter was trained when it was saved; do not freeze it in this run";
  if (kind == "fp32" || kind == "frozen" || kinds.contains(kind))
    return "it is not whole; resume from another checkpoint by naming its tag";
  std::string names;
  for (const std::string& name : kinds)
    if (name != "fp32") names += (names.empty() ? " " : ", ") + name;
  return cat("its optimizer kept ", names.empty() ? "no moments" : cat("the moments", excerpt(names, 200)),
             "; resume with the optimizer that it was saved with, and the groups, or begin anew from "
             "its weights with training.init_from");
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
       is_frozen_file(file)
           ? "; other checkpoints of the run share this file, of weights that do not train. What trained is "
             "elsewhere: begin a new run with training.init_from as this one began, and this checkpoint as "
             "training.adapter.init_from, or write the adapter with `sherd export --adapter`"
           : cat("; ", another));
}

bool CheckpointReader::refers(const std::string& kind, const std::string& parameter) const {
  return kind == "frozen" && manifest().base && manifest().shapes.contains(parameter) &&
         !content_->pieces.holds("fp32." + parameter) && !content_->pieces.holds("frozen." + parameter);
}

const ReferencedBase& CheckpointReader::base() const {
  if (!content_->base) content_->base = std::make_unique<ReferencedBase>(*this);
  return *content_->base;
}

void CheckpointReader::verify_share(int rank, int ranks, WhatToVerify what) const {
  int place = 0;
  if (what == WhatToVerify::all && manifest().base) {
    for (const auto& [file, sum] : manifest().base->files)
      if (place++ % ranks == rank) check_base_file(*this, file, true);
    if (is_there(fs::path(manifest().base->folder) / "manifest.json"))  // which may refer to another
      CheckpointReader(manifest().base->folder).verify_share(rank, ranks, what);
  }
  for (int of = rank; of < manifest().world_size; of += ranks) {
    verify(rank_file(of));
    const std::string frozen = frozen_file(of);
    if (what == WhatToVerify::all && manifest().files.contains(frozen)) verify(frozen);
  }
}

void CheckpointReader::verify_all(WhatToVerify what) const {
  for (const auto& [file, checksum] : manifest().files)
    if (what == WhatToVerify::all || !is_frozen_file(file)) verify(file);
  if (what != WhatToVerify::all || !manifest().base) return;
  for (const auto& [file, checksum] : manifest().base->files) check_base_file(*this, file, true);
  if (is_there(fs::path(manifest().base->folder) / "manifest.json"))
    CheckpointReader(manifest().base->folder).verify_all(what);
}

std::set<std::string> CheckpointReader::require_state(const std::string& kind, const std::string& parameter,
                                                      const tensor::Slice& slice, std::int64_t begin,
                                                      std::int64_t end, DType dtype,
                                                      StoredFormat format) const {
  std::set<std::string> out;
  constexpr std::int64_t most = std::int64_t{1}
                                << 20;  // of which the runs, however short, take little memory
  const std::string name = kind + "." + parameter;
  const auto require_type = [&](std::optional<DType> type, std::string_view type_name, StoredFormat there) {
    if (type != dtype || there != format) {
      const auto in_words = [](std::string_view type, StoredFormat of) {
        return of == StoredFormat::compute ? type : tensor::name_of(of);
      };
      const bool blocks = there != StoredFormat::compute || format != StoredFormat::compute;
      fail(ErrorKind::data, "checkpoint ", folder().string(), " holds '", name, "' in ",
           in_words(type_name, there), ", and this run keeps it in ", in_words(name_of(dtype), format), ": ",
           content_->advice_on_dtype(kind, blocks));
    }
  };
  if (refers(kind, parameter)) {
    const StoredFormat there = base().format_of(parameter);
    require_type(this->dtype(kind, parameter), manifest().compute_dtype, there);
    return out;
  }
  const auto check_type = [&](std::size_t file, std::span<const FileRun>) {
    const SafetensorsEntry& entry = content_->files[file].at(name);
    out.insert(content_->files[file].path().filename());
    require_type(entry.dtype, entry.dtype_name, content_->format_of(name));
  };
  for (; begin < end; begin += std::min(most, end - begin)) {
    const std::int64_t stop = begin + std::min(most, end - begin);
    const std::int64_t missing = content_->pieces.for_each_part(name, slice, begin, stop, check_type);
    if (missing < stop)
      fail(ErrorKind::data, "checkpoint ", folder().string(), " lacks elements from ", missing, " on of '",
           name, "', ", slice.str(), ": ", content_->advice_on_missing(kind, parameter));
  }
  return out;
}

std::optional<DType> CheckpointReader::dtype(const std::string& kind, const std::string& parameter) const {
  if (refers(kind, parameter))
    return base().format_of(parameter) == StoredFormat::compute ? parse_dtype(manifest().compute_dtype)
                                                                : DType::u8;
  const auto found = content_->dtypes.find(kind + "." + parameter);
  if (found == content_->dtypes.end()) return {};
  return found->second;
}

bool CheckpointReader::holds(const std::string& kind, const std::string& parameter) const {
  return content_->pieces.holds(kind + "." + parameter) || refers(kind, parameter);
}

std::vector<CheckpointTensor> CheckpointReader::tensors() const {
  std::vector<CheckpointTensor> out;
  for (const auto& [name, dtype] : content_->dtypes) {
    const std::size_t dot = name.find('.');
    out.push_back({name.substr(0, dot), name.substr(dot + 1), dtype, content_->format_of(name)});
  }
  return out;
}

std::map<std::string, std::string> CheckpointReader::learned() const {
  std::map<std::string, std::string> out;
  const std::string prefix = learned_prefix;
  for (const SafetensorsFile& file : content_->files)
    for (const auto& [key, text] : file.metadata())
      if (key.starts_with(prefix)) out[key.substr(prefix.size())] = text;
  return out;
}

void CheckpointReader::read(const std::string& kind, const std::string& parameter, const tensor::Slice& slice,
                            std::int64_t begin, const tensor::Tensor& to) const {
  const std::string name = kind + "." + parameter;
  if (refers(kind, parameter)) return base().read(parameter, slice, begin, to);
  const std::int64_t end = begin + to.numel();
  const StoredFormat format = content_->format_of(name);
  const bool blocks = to.dtype() == DType::f32 && format != StoredFormat::compute;
  require_state(kind, parameter, slice, begin, end, blocks ? DType::u8 : to.dtype(), format);
  content_->pieces.for_each_part(name, slice, begin, end,
                                 [&](std::size_t file, std::span<const FileRun> runs) {
                                   const SafetensorsFile& from = content_->files[file];
                                   if (blocks)
                                     read_stored_runs(from, name, format, runs, begin, to);
                                   else
                                     read_runs(from, name, runs, begin, to);
                                 });
}

bool CheckpointReader::read_blocks(const std::string& kind, const std::string& parameter,
                                   const tensor::Slice& slice, std::int64_t begin, std::int64_t count,
                                   const tensor::Tensor& to) const {
  const std::string name = kind + "." + parameter;
  const bool elsewhere = refers(kind, parameter);
  const StoredFormat format = elsewhere ? base().format_of(parameter) : content_->format_of(name);
  if (format == StoredFormat::compute) return false;
  if (elsewhere) return base().read_blocks(parameter, slice, begin, count, to), true;
  const std::int64_t end = begin + count;
  require_state(kind, parameter, slice, begin, end, DType::u8, format);
  bool same = true;
  const auto for_parts = [&](const auto& visit) {
    content_->pieces.for_each_part(name, slice, begin, end, visit);
  };
  for_parts([&](std::size_t, std::span<const FileRun> runs) {
    same = same && are_blocks(format, runs, begin, slice.numel());
  });
  if (!same) return false;
  for_parts([&](std::size_t file, std::span<const FileRun> runs) {
    engine::read_blocks(content_->files[file], name, format, runs, begin, to);
  });
  return true;
}

}  // namespace sherd::engine
