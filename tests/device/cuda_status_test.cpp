#include <gtest/gtest.h>

#include <cstdlib>

#include "device/cuda/cuda_device.h"
#include "support/expect_error.h"

namespace sherd::device {
namespace {

TEST(CudaStatus, has_gpus_or_a_reason_and_never_both) {
  const CudaStatus status = cuda_status();
  EXPECT_EQ(status.usable(), status.why_not.empty()) << status.why_not;
  EXPECT_EQ(status.built, !status.version.empty());
  for (const CudaGpu& gpu : status.gpus) {
    EXPECT_GT(gpu.memory, 0u);
    EXPECT_GT(gpu.processors, 0);
  }
}

TEST(CudaStatus, the_reason_is_what_making_a_device_says) {
  const CudaStatus status = cuda_status();
  if (status.usable())
    sherd::testing::expect_error(ErrorKind::io, "there is no GPU 4096",
                                 [] { make_cuda_device({.ordinal = 4096}); });
  else
    sherd::testing::expect_error(ErrorKind::io, status.why_not, [] { make_cuda_device({}); });
}

TEST(CudaStatus, other_devices_are_no_cuda_devices) {
  const auto cpu = make_cpu_device(1);
  sherd::testing::expect_error(ErrorKind::usage, "a CUDA device is needed", [&] { as_cuda(*cpu); });
}

TEST(CudaOrdinal, ranks_take_gpus_in_turn_and_share_when_there_are_fewer) {
  EXPECT_EQ(cuda_ordinal_for(0, 4), 0);
  EXPECT_EQ(cuda_ordinal_for(3, 4), 3);
  EXPECT_EQ(cuda_ordinal_for(3, 2), 1);
  EXPECT_EQ(cuda_ordinal_for(7, 1), 0);
  sherd::testing::expect_error(ErrorKind::usage, "no GPU", [] { cuda_ordinal_for(0, 0); });
}

TEST(CudaStatus, AsksForMoreQueuesThanARankHasStreams) {
  if (!cuda_status().built) GTEST_SKIP() << "built without CUDA";
  const char* connections = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  ASSERT_NE(connections, nullptr);
  EXPECT_GE(std::atoi(connections), 1);  // as the user says, else 32
}

}  // namespace
}  // namespace sherd::device
