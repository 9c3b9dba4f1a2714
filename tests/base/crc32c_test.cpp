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

TEST(Crc32c, SumsOfPartsJoinToThatOfTheWhole) {
  std::vector<unsigned char> data(100'003);
  for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<unsigned char>(i * i % 251);
  const std::uint32_t whole = crc32c(data.data(), data.size());
  for (const std::size_t cut : {0, 1, 7, 4096, 65'535, 100'002, 100'003})
    EXPECT_EQ(crc32c_joined(crc32c(data.data(), cut), crc32c(data.data() + cut, data.size() - cut),
                            data.size() - cut),
              whole)
        << cut;
  // Nothing changes on the way round a third part, however it is cut.
  const auto of = [&](std::size_t begin, std::size_t end) {
    return crc32c(data.data() + begin, end - begin);
  };
  EXPECT_EQ(crc32c_joined(of(0, 10), crc32c_joined(of(10, 5000), of(5000, 100'003), 95'003), 99'993), whole);
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
