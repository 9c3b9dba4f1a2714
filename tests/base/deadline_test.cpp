#include "base/deadline.h"

#include <gtest/gtest.h>

#include <limits>

namespace sherd {
namespace {

TEST(Deadline, PassesWhenItIsTime) {
  EXPECT_TRUE(Deadline::after_seconds(0).passed());
  EXPECT_FALSE(Deadline::after_seconds(60).passed());
}

/// More seconds than a clock has room for are no time that has passed.
TEST(Deadline, TakesLongTimesForEver) {
  for (const double seconds : {1e9, 1e10, 1e12, 1e300, std::numeric_limits<double>::infinity()})
    EXPECT_FALSE(Deadline::after_seconds(seconds).passed()) << seconds;
}

}  // namespace
}  // namespace sherd
