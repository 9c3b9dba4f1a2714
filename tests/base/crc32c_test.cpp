#include "base/crc32c.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace sherd {
namespace {

// Check values: RFC 3720 appendix B.4 and the catalogue of parametrised CRC algorithms.
TEST(Crc32c, MatchesPublishedValues) {
  const std::string digits = "123456789";
  const std::string zeros(32, '\0'), ones(32, '\xff');
  for (auto* crc : {&crc32c, &crc32c_portable}) {
    EXPECT_EQ(crc(digits.data(), digits.size(), 0), 0xe3069283u);
    EXPECT_EQ(crc(zeros.data(), zeros.size(), 0), 0x8a9136aau);
    EXPECT_EQ(crc(ones.data(), ones.size(), 0), 0x62a8ab43u);
    EXPECT_EQ(crc(nullptr, 0, 0), 0u);
  }
}

TEST(Crc32c, BothWaysAgreeForEverySplit) {
  std::vector<unsigned char> data(67);
  for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<unsigned char>(i * i + 7);
  const std::uint32_t whole = crc32c(data.data(), data.size());
  for (std::size_t cut = 0; cut <= data.size(); ++cut) {
    EXPECT_EQ(crc32c(data.data() + cut, data.size() - cut, crc32c(data.data(), cut)), whole);
    EXPECT_EQ(crc32c_portable(data.data() + cut, data.size() - cut, crc32c_portable(data.data(), cut)),
              whole);
  }
}

}  // namespace
}  // namespace sherd
