#include "config/config.h"
#include "config/support.h"

namespace sherd::config {
namespace {

Config batch(std::int64_t tb, std::int64_t mb, std::int64_t gas) {
  Config config;
  config.batch = {tb, mb, gas};
  return config;
}

std::string mistake(const Config& config, int ranks) {
  try {
    resolve_batch(config, ranks);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::config);
    return error.what();
  }
  return {};
}

TEST(ResolveBatch, InfersWhatIsMissing) {
  EXPECT_EQ(resolve_batch(batch(64, 0, 0), 2), (Batch{64, 32, 1}));
  EXPECT_EQ(resolve_batch(batch(0, 4, 0), 2), (Batch{8, 4, 1}));
  EXPECT_EQ(resolve_batch(batch(64, 4, 0), 2), (Batch{64, 4, 8}));
  EXPECT_EQ(resolve_batch(batch(64, 0, 8), 4), (Batch{64, 2, 8}));
  EXPECT_EQ(resolve_batch(batch(0, 4, 8), 3), (Batch{96, 4, 8}));
  EXPECT_EQ(resolve_batch(batch(24, 4, 2), 3), (Batch{24, 4, 2}));
}

TEST(ResolveBatch, ShowsTheFourNumbersAndAFix) {
  EXPECT_EQ(
      mistake(batch(10, 4, 0), 1),
      "train_batch_size 10, train_micro_batch_size_per_gpu 4, gradient_accumulation_steps not given and 1 "
      "data-parallel rank do not fit: 4 x 2 x 1 = 8 samples per step; set train_batch_size to 12 "
      "(train_micro_batch_size_per_gpu 4, gradient_accumulation_steps 3), or change one of the others");
  EXPECT_EQ(mistake(batch(64, 4, 4), 2),
            "train_batch_size 64, train_micro_batch_size_per_gpu 4, gradient_accumulation_steps 4 and 2 "
            "data-parallel ranks do not fit: 4 x 4 x 2 = 32 samples per step; set train_batch_size to 32 "
            "(train_micro_batch_size_per_gpu 4, gradient_accumulation_steps 4), or change one of the others");
  EXPECT_EQ(mistake(batch(2, 0, 0), 4),
            "train_batch_size 2, train_micro_batch_size_per_gpu not given, gradient_accumulation_steps not "
            "given and "
            "4 data-parallel ranks do not fit: that is less than one sample for each of them; set "
            "train_batch_size to 4 "
            "(train_micro_batch_size_per_gpu 1, gradient_accumulation_steps 1), or change one of the others");
}

TEST(ResolveBatch, SuggestionsDoMultiply) {
  for (std::int64_t tb = 0; tb < 40; ++tb)
    for (std::int64_t mb = 0; mb < 9; ++mb)
      for (int ranks = 1; ranks < 6; ++ranks) {
        if (tb == 0 && mb == 0) continue;
        const std::string message = mistake(batch(tb, mb, 0), ranks);
        if (message.empty()) continue;
        std::int64_t total = 0, micro = 0, accumulate = 0;
        const auto at = message.find("set train_batch_size");
        ASSERT_NE(at, std::string::npos);
        ASSERT_EQ(std::sscanf(message.c_str() + at,
                              "set train_batch_size to %ld (train_micro_batch_size_per_gpu %ld, "
                              "gradient_accumulation_steps %ld)",
                              &total, &micro, &accumulate),
                  3);
        EXPECT_EQ(resolve_batch(batch(total, micro, accumulate), ranks), (Batch{total, micro, accumulate}));
      }
}

TEST(ResolveBatch, SizesBeyondAnyRunDoNotOverflow) {
  constexpr std::int64_t large = (std::int64_t{1} << 31) - 1;
  EXPECT_EQ(mistake(batch(0, large, large), 1 << 20),
            "train_micro_batch_size_per_gpu 2147483647, gradient_accumulation_steps 2147483647 and 1048576 "
            "data-parallel "
            "ranks make 2^31 samples per step or more; lower them");
  EXPECT_EQ(mistake(batch(5, large, large), 3),
            "train_batch_size 5, train_micro_batch_size_per_gpu 2147483647, gradient_accumulation_steps "
            "2147483647 and 3 "
            "data-parallel ranks do not fit: 2147483647 x 2147483647 x 3 = 2^31 or more samples per step; "
            "lower them");
}

TEST(ResolveBatch, NeedsASize) {
  const std::string message = mistake(batch(0, 0, 4), 1);
  EXPECT_EQ(
      message,
      "the configuration gives neither train_batch_size nor train_micro_batch_size_per_gpu; give one of "
      "them");
  EXPECT_THROW(resolve_batch(batch(std::int64_t{1} << 40, 0, 0), 1), Error);
}

}  // namespace
}  // namespace sherd::config
