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

/// The text of the Error{io} that `body` must throw.
template <class Body>
std::string refusal(const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::io) << error.what();
    return error.what();
  }
  return "nothing was thrown";
}

/// A file that is no library, in a folder of LD_LIBRARY_PATH while it lives.
class BrokenLibrary {
 public:
  explicit BrokenLibrary(const std::string& file) : path_(folder_ / file) {
    write_text(path_, "no library");
    if (const char* before = std::getenv(name)) before_ = before;
    ::setenv(name, ("/nonexistent::" + folder_.path().string()).c_str(), 1);
  }
  ~BrokenLibrary() { before_ ? ::setenv(name, before_->c_str(), 1) : ::unsetenv(name); }
  BrokenLibrary(const BrokenLibrary&) = delete;
  BrokenLibrary& operator=(const BrokenLibrary&) = delete;

  std::string path() const { return path_.string(); }

 private:
  static constexpr const char* name = "LD_LIBRARY_PATH";
  TempFolder folder_;
  std::filesystem::path path_;
  std::optional<std::string> before_;
};

}  // namespace sherd::testing
