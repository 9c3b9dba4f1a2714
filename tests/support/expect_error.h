#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "base/error.h"

namespace sherd::testing {

/// Runs `body`, which must throw Error{kind} with a message of one line that contains `part`.
template <class Body>
void expect_error(ErrorKind kind, const std::string& part, Body&& body) {
  try {
    body();
    ADD_FAILURE() << "nothing was thrown; expected an error with '" << part << "'";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), kind) << error.what();
    EXPECT_THAT(error.what(), ::testing::HasSubstr(part));
    EXPECT_THAT(error.what(), ::testing::Not(::testing::HasSubstr("\n")));
  }
}

}  // namespace sherd::testing
