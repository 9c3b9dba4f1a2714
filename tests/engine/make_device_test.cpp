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

TEST(PeakOfGpus, CountsEachGpuInUseOnceOnEveryMachine) {
  const std::vector<device::CudaGpu> gpus(4, {.name = "NVIDIA H200", .major = 9, .processors = 132});
  const config::Config config = with("");
  const double one = 989.4e12;
  EXPECT_DOUBLE_EQ(peak_of_gpus(config, gpus, 1, 1), one);
  EXPECT_DOUBLE_EQ(peak_of_gpus(config, gpus, 4, 4), 4 * one);
  EXPECT_DOUBLE_EQ(peak_of_gpus(config, gpus, 8, 8), 4 * one) << "ranks share them";
  EXPECT_DOUBLE_EQ(peak_of_gpus(config, gpus, 8, 4), 8 * one) << "on two machines";
  EXPECT_DOUBLE_EQ(peak_of_gpus(with(R"("peak_tflops": 500)"), gpus, 4, 4), 4 * 500e12);
  EXPECT_DOUBLE_EQ(peak_of_gpus(with(R"("tf32": true)", ""), gpus, 1, 1), one / 2);
  EXPECT_DOUBLE_EQ(peak_of_gpus(with("", ""), gpus, 1, 1), 66.9e12);
}

TEST(PeakOfGpus, IsUnknownWhereOneIs) {
  const std::vector<device::CudaGpu> gpus{{.name = "NVIDIA H200", .major = 9, .processors = 132},
                                          {.name = "Unheard of"}};
  EXPECT_EQ(peak_of_gpus(with(""), gpus, 2, 2), 0);
  EXPECT_GT(peak_of_gpus(with(""), gpus, 1, 1), 0);
  EXPECT_DOUBLE_EQ(peak_of_gpus(with(R"("peak_tflops": 10)"), gpus, 2, 2), 20e12);
  EXPECT_EQ(peak_of_gpus(with(""), {}, 2, 2), 0);
}

}  // namespace
}  // namespace sherd::engine
