#include "cli/export/output_folder.h"

#include "base/files.h"

namespace sherd::cli {
namespace fs = std::filesystem;
namespace {

constexpr const char* lock_name = ".sherd-export";

fs::path without_slash(const fs::path& path) {
  const fs::path plain = path.lexically_normal();
  return plain.has_filename() ? plain : plain.parent_path();
}

}  // namespace

OutputFolder::OutputFolder(const fs::path& path, bool file)
    : path_(without_slash(path)), partial_(path_), file_(file) {
  std::error_code error;
  partial_ += ".partial";
  const bool empty = !file && fs::is_directory(path_, error) && fs::is_empty(path_, error);
  if (fs::exists(path_, error) && !empty)
    fail(ErrorKind::io, "'", path_.string(), "' is there already: name a new ", file ? "file" : "folder");
  if (fs::exists(partial_, error) && !fs::exists(partial_ / lock_name, error))
    fail(ErrorKind::io, "'", partial_.string(),
         "' is there, and no export made it: move it, or name another --output");
  fs::create_directories(partial_, error);
  if (error) fail(ErrorKind::io, "cannot make '", partial_.string(), "': ", error.message());
  lock_.emplace(partial_ / lock_name, LockUse{path_, "export", "another --output"});
  for (const auto& entry : fs::directory_iterator(partial_))
    if (entry.path().filename() != lock_name) fs::remove_all(entry.path(), error);
}

OutputFolder::~OutputFolder() {
  if (!lock_) return;
  std::error_code error;
  fs::remove_all(partial_, error);
}

void OutputFolder::publish() {
  std::error_code error;
  if (!file_) lock_->remove();
  if (!file_) fs::remove(path_, error);
  const fs::path made = file_ ? partial_ / path_.filename() : partial_;
  fs::rename(made, path_, error);
  if (error)
    fail(ErrorKind::io, "cannot rename '", made.string(), "' to '", path_.string(), "': ", error.message());
  if (file_)
    fs::remove_all(partial_, error),
        sync_folder(path_.has_parent_path() ? path_.parent_path() : fs::path("."));
  lock_.reset();
}

}  // namespace sherd::cli
