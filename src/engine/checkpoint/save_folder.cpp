#include "engine/checkpoint/save_folder.h"

#include <fcntl.h>
#include <stdio.h>  // renameat2

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <compare>
#include <cstring>
#include <fstream>
#include <random>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/files.h"
#include "base/log.h"
#include "base/text/excerpt.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/format.h"

namespace sherd::engine {
namespace fs = std::filesystem;
namespace {

constexpr std::string_view hexadecimal = "0123456789abcdef";

/// The first bytes of a folder's manifest.
std::string head_of(const fs::path& folder) {
  std::string head(256, '\0');
  std::ifstream manifest(folder / "manifest.json", std::ios::binary);
  manifest.read(head.data(), static_cast<std::streamsize>(head.size()));
  head.resize(static_cast<std::size_t>(manifest.gcount()));
  return head;
}

/// Whether a manifest of Sherd's begins so, of any format, whole or damaged.
bool is_manifest(const std::string& head) {
  return head.find(cat("\"format\": \"", format_prefix)) != std::string::npos;
}

bool is_checkpoint(const fs::path& folder) {
  return is_manifest(head_of(folder));
}

/// The number behind `key`; 0 where there is none.
std::int64_t number_behind(std::string_view key, std::string_view text) {
  const std::size_t at = text.find(key);
  std::int64_t out = 0;
  if (at != std::string_view::npos)
    std::from_chars(text.data() + at + key.size(), text.data() + text.size(), out);
  return out;
}

/// Manifest::ordinal.
std::int64_t ordinal_in(const std::string& head) {
  return number_behind("\"ordinal\": ", head);
}

}  // namespace

bool is_save_id(std::string_view text) {
  return text.size() == 16 && text.find_first_not_of(hexadecimal) == std::string_view::npos;
}

bool is_leftover(std::string_view name) {
  const std::size_t dot = name.rfind('.');
  if (dot == std::string_view::npos) return false;
  const std::string_view ending = name.substr(dot), rest = name.substr(0, dot);
  if (ending != ".partial" && ending != ".removed") return false;
  const std::size_t id = rest.rfind('.');
  return id != std::string_view::npos && id > 0 && is_save_id(rest.substr(id + 1));
}

std::vector<fs::path> entries_of(const fs::path& folder) {
  std::vector<fs::path> out;
  std::error_code error;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error))
    out.push_back(at->path());
  if (error) log_warning("cannot list '", folder.string(), "': ", error.message());
  return out;
}

std::string new_save_id() {
  std::random_device source;
  std::string id;
  while (id.size() < 16) id += hexadecimal[source() % 16];
  return id;
}

std::string pointed_at(const fs::path& pointer) {
  std::error_code error;
  if (!fs::is_regular_file(pointer, error)) return "";
  std::string name(4096, '\0');
  std::ifstream in(pointer, std::ios::binary);
  in.read(name.data(), static_cast<std::streamsize>(name.size()));
  name.resize(static_cast<std::size_t>(in.gcount()));
  while (!name.empty() && (name.back() == '\n' || name.back() == ' ')) name.pop_back();
  return is_plain_name(name) ? name : "";
}

fs::path partial_folder(const fs::path& directory, const std::string& tag, const std::string& save_id) {
  return directory / cat(tag, ".", save_id, ".partial");
}

bool is_plain_name(const std::string& tag) {
  return !tag.empty() && tag.find('/') == std::string::npos && !tag.starts_with('.') && tag.back() != ' ' &&
         excerpt(tag, tag.size()) == tag;
}

void require_good_tag(const std::string& tag) {
  require(is_plain_name(tag), "a checkpoint cannot be called '", excerpt(tag),
          "': a tag is a file name without '/', control characters, a '.' at "
          "its beginning or a space at its end");
  bool own = is_leftover(tag);
  for (const std::string& pointer : {std::string(latest_pointer), std::string(best_pointer)})
    own = own || tag == pointer || tag == pointer + ".partial";
  require(!own, "a checkpoint cannot be called '", tag, "', which is a name of Sherd's own");
}

void require_replaceable(const fs::path& place) {
  std::error_code error;
  if (!fs::exists(fs::symlink_status(place, error)) || is_checkpoint(place)) return;
  if (fs::is_directory(place, error) && fs::is_empty(place, error) && !error) return;
  fail(ErrorKind::io, "'", place.string(),
       "' is no checkpoint, and saving would remove it: save under another tag, or move it away");
}

void remove_folder(const fs::path& folder) noexcept {
  std::error_code error;
  // Another rank may still be writing there, and puts and renames files in what is being emptied.
  for (int attempt = 0; attempt < 10; ++attempt) {
    error.clear();
    fs::remove_all(folder, error);
    if (!error) break;
  }
  if (error)
    log_warning("cannot remove '", folder.string(), "': ", error.message(),
                "; the run goes on. Remove it by hand");
}

void remove_old_checkpoints(const fs::path& directory, std::size_t keep, const std::string& newest) {
  const std::string best = pointed_at(directory / best_pointer);
  struct OldCheckpoint {
    std::int64_t ordinal, step;  // the step, of those that have no ordinal
    fs::path path;
    auto operator<=>(const OldCheckpoint&) const = default;
  };
  std::vector<OldCheckpoint> found;
  for (const fs::path& entry : entries_of(directory)) {
    const std::string name = entry.filename(), head = head_of(entry);
    if (!name.starts_with("global_step") || is_leftover(name) || name == newest || name == best ||
        !is_manifest(head))
      continue;
    found.push_back({ordinal_in(head), number_behind("global_step", name), entry});
  }
  std::sort(found.rbegin(), found.rend());
  for (std::size_t i = std::max<std::size_t>(keep, 1) - 1; i < found.size(); ++i) {
    const fs::path old = found[i].path,
                   aside = directory / cat(old.filename().string(), ".", new_save_id(), ".removed");
    if (::rename(old.c_str(), aside.c_str()) == 0)
      remove_folder(aside);
    else
      log_warning("cannot remove the old checkpoint '", old.string(), "': ", std::strerror(errno),
                  "; the run goes on. Remove it by hand");
  }
}

void point_best(const fs::path& directory, const std::string& tag) {
  const fs::path pointer = directory / best_pointer;
  std::error_code error;
  if (pointed_at(pointer) == tag) return;
  if (!tag.empty() && is_checkpoint(directory / tag))
    write_file_atomically(pointer, tag + "\n");
  else
    fs::remove(pointer, error);
}

SaveFolder::SaveFolder(fs::path directory)
    : path_(std::move(directory)),
      lock_(path_ / ".sherd.lock",
            {path_, "engine", "another folder for its checkpoints (training.save_dir)", false}) {
  if (lock_.held()) remove_leftovers();
}

SaveFolder::~SaveFolder() {
  lock_.remove();
}

void SaveFolder::remove_leftovers() const {
  for (const fs::path& entry : entries_of(path_)) {
    std::error_code error;
    if (!is_leftover(entry.filename().string()) || !fs::is_directory(fs::symlink_status(entry, error)))
      continue;
    log_info("removing '", entry.string(),
             "', left by a run that ended while it saved or removed a checkpoint");
    remove_folder(entry);
  }
}

std::int64_t next_ordinal(const fs::path& directory) {
  std::int64_t last = 0;
  for (const fs::path& entry : entries_of(directory))
    if (const std::string head = head_of(entry); is_manifest(head)) last = std::max(last, ordinal_in(head));
  return last + 1;
}

void SaveFolder::publish(const fs::path& partial, const std::string& tag, bool best) const {
  const fs::path final_name = path_ / tag;
  require_replaceable(final_name);
  // The checkpoint that DIR/best names must not become another that is not the best.
  std::error_code ignored;
  if (!best && pointed_at(path_ / best_pointer) == tag) fs::remove(path_ / best_pointer, ignored);
  std::error_code absent;
  if (!fs::exists(fs::symlink_status(final_name, absent))) {
    publish_folder(partial, final_name);
  } else {
    sync_folder(partial);
    if (renameat2(AT_FDCWD, partial.c_str(), AT_FDCWD, final_name.c_str(), RENAME_EXCHANGE) != 0)
      fail(ErrorKind::io, "the file system cannot replace ", final_name.string(), " in one step (",
           std::strerror(errno), "): save under another tag or remove that folder first");
    sync_folder(path_);
    remove_folder(partial);
  }
  // The best first: a run that goes on from an older one comes here again.
  if (best) write_file_atomically(path_ / best_pointer, tag + "\n");
  write_file_atomically(path_ / latest_pointer, tag + "\n");
}

}  // namespace sherd::engine
