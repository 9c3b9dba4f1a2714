#pragma once

#include <gtest/gtest.h>

#include <string>

#include "config/config.h"

namespace sherd::config {

/// The message of the Error{config} that parsing `text` throws; empty when it parses.
inline std::string error_of(const std::string& text, const std::vector<std::string>& overrides = {}) {
  try {
    parse_text(text, "run.json", overrides);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::config) << error.what();
    return error.what();
  }
  return {};
}

inline bool has_note(const Config& config, const std::string& start) {
  for (const std::string& note : config.notes)
    if (note.starts_with(start)) return true;
  return false;
}

}  // namespace sherd::config
