#include "engine/setup/make_device.h"

#include <gtest/gtest.h>

#include "engine/setup/device_config.h"
#include "support/expect_error.h"

namespace sherd::engine {
namespace {

using sherd::testing::expect_error;

// GPUs are hidden from these tests.
TEST(MakeDevice, CudaIsDemandedAndAutoTakesWhatIsThere) {
  EXPECT_FALSE(takes_gpus(device_config("")));
  EXPECT_FALSE(takes_gpus(device_config(R"("type": "cpu")")));
  expect_error(ErrorKind::io, "there is no CUDA device",
               [] { takes_gpus(device_config(R"("type": "cuda")")); });
}

TEST(MakeDevice, RunsForGpusArePlannedWithoutAny) {
  EXPECT_TRUE(meant_for_gpus(device_config(R"("type": "cuda")")));
  EXPECT_FALSE(meant_for_gpus(device_config("")));
  EXPECT_FALSE(meant_for_gpus(device_config(R"("type": "cpu")")));
}

// Most machines have neither a GPU nor a driver for one, and their runs have nothing to say of it.
TEST(MakeDevice, AutoTellsOfALackOnlyWhereThereIsADriver) {
  device::CudaStatus status;
  status.built = true, status.why_not = "no NVIDIA driver is installed here";
  EXPECT_EQ(unexpected_lack(status), "");
  status.driver_version = "11.8", status.why_not = "update the driver";
  EXPECT_EQ(unexpected_lack(status), "update the driver");
}

}  // namespace
}  // namespace sherd::engine
