#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace sherd::engine {

/// A file that grows by whole pieces: each is handed to the system at once, so that it outlives the process.
/// Throws Error{io} that names the file by `what`, as "the metrics file".
class AppendFile {
 public:
  /// `keep`: go on behind what is there, else begin anew.
  AppendFile(std::filesystem::path path, bool keep, std::string what);
  ~AppendFile();
  AppendFile(const AppendFile&) = delete;
  AppendFile& operator=(const AppendFile&) = delete;

  void write(std::string_view piece);

 private:
  [[noreturn]] void fail_errno(const char* action) const;

  std::filesystem::path path_;
  std::string what_;
  int descriptor_ = -1;
};

}  // namespace sherd::engine
