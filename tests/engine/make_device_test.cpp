#include "engine/make_device.h"

#include <gtest/gtest.h>

#include "support/expect_error.h"

namespace sherd::engine {
namespace {

using sherd::testing::expect_error;

config::Config with(const std::string& device,
                    const std::string& precision = R"("bf16": {"enabled": true},)") {
  return config::parse_text(cat("{", precision, R"("device": {)", device, "}}"));
}

// GPUs are hidden from these tests.
TEST(MakeDevice, CudaIsDemandedAndAutoTakesWhatIsThere) {
  EXPECT_FALSE(takes_gpus(with("")));
  EXPECT_FALSE(takes_gpus(with(R"("type": "cpu")")));
  expect_error(ErrorKind::config, "there is no CUDA device", [] { takes_gpus(with(R"("type": "cuda")")); });
}

TEST(MakeDevice, RunsForGpusArePlannedWithoutAny) {
  EXPECT_TRUE(meant_for_gpus(with(R"("type": "cuda")")));
  EXPECT_FALSE(meant_for_gpus(with("")));
  EXPECT_FALSE(meant_for_gpus(with(R"("type": "cpu")")));
}

}  // namespace
}  // namespace sherd::engine
