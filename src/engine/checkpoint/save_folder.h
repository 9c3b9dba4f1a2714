#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "base/run_lock.h"

namespace sherd::engine {

/// Names one act of saving: sixteen hexadecimal digits, drawn at random.
std::string new_save_id();
/// Whether a text can be such a name.
bool is_save_id(std::string_view text);

/// The entries of a folder; a folder that cannot be listed is a warning.
std::vector<std::filesystem::path> entries_of(const std::filesystem::path& folder);

/// Whether `name` is TAG.SAVEID.partial or TAG.SAVEID.removed: what is written or removed, or was when a run
/// died.
bool is_leftover(std::string_view name);

/// A folder of checkpoints that this run alone saves in, while the object lives (DIR/.sherd.lock). For rank
/// 0.
///
/// Whatever is written or removed there bears a name that no run resumes from while it is not whole:
/// TAG.SAVEID.partial while it is written, TAG.SAVEID.removed while it is removed. What has such a name when
/// the lock is taken was left by a dead run.
class SaveFolder {
 public:
  /// Makes the folder, takes its lock, and removes what dead runs left. Throws Error{io} naming the process
  /// that holds it.
  explicit SaveFolder(std::filesystem::path directory);
  ~SaveFolder();

  const std::filesystem::path& path() const { return path_; }
  /// Whether others removed the lock, or the folder with it.
  bool lost() const { return lock_.lost(); }
  /// Puts `partial`, complete, in the place of TAG; a checkpoint of that name is exchanged in one step and
  /// removed after. Then moves DIR/best, where it is the `best`, and DIR/latest. Throws Error{io}, also as
  /// require_replaceable() does.
  void publish(const std::filesystem::path& partial, const std::string& tag, bool best = false) const;

 private:
  void remove_leftovers() const;

  std::filesystem::path path_;
  RunLock lock_;
};

/// The Manifest::ordinal of the next checkpoint in a folder: above those of all that are there.
std::int64_t next_ordinal(const std::filesystem::path& directory);

/// Files that hold a tag, of the newest checkpoint and of that with the lowest validation loss.
inline constexpr const char *latest_pointer = "latest", *best_pointer = "best";

/// The tag that such a file holds; empty where there is no file, or no tag in it.
std::string pointed_at(const std::filesystem::path& pointer);

/// Where the files of a checkpoint lie until all are there.
std::filesystem::path partial_folder(const std::filesystem::path& directory, const std::string& tag,
                                     const std::string& save_id);

/// Whether a checkpoint can have this name, in a folder and in DIR/latest: a file name of printable UTF-8
/// without '/', a '.' at its beginning or a space at its end.
bool is_plain_name(const std::string& tag);

/// Throws Error{usage} unless `tag` is a plain name, and none that Sherd uses itself.
void require_good_tag(const std::string& tag);

/// Throws Error{io} unless a checkpoint can take `place`: what stands there is a checkpoint, an empty folder
/// or nothing.
void require_replaceable(const std::filesystem::path& place);

/// Removes the folder and what is in it, if it is there; where that fails, warns and leaves the rest.
void remove_folder(const std::filesystem::path& folder) noexcept;

}  // namespace sherd::engine
