#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>
#include <string>

#include "base/error.h"
#include "support/temp_folder.h"

namespace sherd::testing {

/// Whether this process has a file of that name in its memory.
inline bool mapped(const std::string& name) {
  return read_text("/proc/self/maps").find(name) != std::string::npos;
}

/// What the Error{config} that `body` must throw says.
template <class Body>
std::string refusal(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::config) << error.what();
    return error.what();
  }
  return "nothing was thrown";
}

/// Puts a folder into LD_LIBRARY_PATH while it lives.
class LibraryPath {
 public:
  explicit LibraryPath(const std::filesystem::path& folder) {
    if (const char* before = std::getenv(name)) before_ = before;
    ::setenv(name, ("/nonexistent::" + folder.string()).c_str(), 1);
  }
  ~LibraryPath() { before_ ? ::setenv(name, before_->c_str(), 1) : ::unsetenv(name); }
  LibraryPath(const LibraryPath&) = delete;
  LibraryPath& operator=(const LibraryPath&) = delete;

 private:
  static constexpr const char* name = "LD_LIBRARY_PATH";
  std::optional<std::string> before_;
};

}  // namespace sherd::testing
