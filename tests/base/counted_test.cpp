#include "base/counted.h"

#include <gtest/gtest.h>

namespace sherd {
namespace {

TEST(Counted, OneThingHasNoPlural) {
  EXPECT_EQ(counted(1, "thread"), "1 thread");
  EXPECT_EQ(counted(0, "thread"), "0 threads");
  EXPECT_EQ(counted(2, "usable core"), "2 usable cores");
}

}  // namespace
}  // namespace sherd
