#include "base/text/excerpt.h"

#include <gtest/gtest.h>

namespace sherd {
namespace {

TEST(Excerpt, LeavesShortTextsAlone) {
  EXPECT_EQ(excerpt(""), "");
  EXPECT_EQ(excerpt("zero_optimization.stage"), "zero_optimization.stage");
  EXPECT_EQ(excerpt("Grüße, 世界", 40), "Grüße, 世界");
  EXPECT_EQ(excerpt("12345", 5), "12345");
}

TEST(Excerpt, CutsLongTextsAtACharacter) {
  EXPECT_EQ(excerpt("123456", 5), "12345…");
  EXPECT_EQ(excerpt("ab世界", 5), "ab世…");
  EXPECT_EQ(excerpt("ab世界", 4), "ab…");
  EXPECT_LT(excerpt(std::string(10'000'000, 'x')).size(), 130u);
}

TEST(Excerpt, EscapesWhatATerminalWouldObey) {
  EXPECT_EQ(excerpt("a\nb\tc\x1b[2J\x7f"), "a\\nb\\tc\\x1b[2J\\x7f");
  EXPECT_EQ(excerpt(std::string_view("a\0b", 3)), "a\\x00b");
  EXPECT_EQ(excerpt("\xff\xc3"), "\\xff\\xc3") << "not UTF-8";
  EXPECT_EQ(excerpt("\xc2\x9b"), "\\xc2\\x9b") << "U+009B begins a control sequence";
  EXPECT_EQ(excerpt("\xc2\xa0"), "\xc2\xa0");
  EXPECT_EQ(excerpt(std::string(100, '\n'), 10), "\\n\\n\\n\\n\\n…");
}

TEST(Counted, OneThingHasNoPlural) {
  EXPECT_EQ(counted(1, "thread"), "1 thread");
  EXPECT_EQ(counted(0, "thread"), "0 threads");
  EXPECT_EQ(counted(2, "usable core"), "2 usable cores");
}

}  // namespace
}  // namespace sherd
