#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "base/error.h"
#include "base/run_lock.h"

namespace sherd::cli {

/// A folder, or a file, that appears when it is complete: until then its parts are in the folder
/// PATH.partial, which one process at a time writes to. What a dead one left there goes.
class OutputFolder {
 public:
  /// Throws Error{io} where something stands in the way. `file`: what is made is the file of PATH's name in
  /// the folder.
  explicit OutputFolder(const std::filesystem::path& path, bool file = false);
  ~OutputFolder();
  OutputFolder(const OutputFolder&) = delete;
  OutputFolder& operator=(const OutputFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  const std::filesystem::path& partial() const { return partial_; }
  void publish();

 private:
  std::filesystem::path path_, partial_;
  bool file_;
  std::optional<RunLock> lock_;  ///< while there is something to clean up
};

}  // namespace sherd::cli
