#include "engine/setup/make_device.h"

#include <gtest/gtest.h>

#include <string>

#include "engine/setup/device_config.h"

namespace sherd::engine {
namespace {

constexpr double bf16_of_h200 = 989.4e12;
constexpr std::uint64_t memory_of_h200 = 141'000'000'000;

device::CudaGpu h200(int ordinal, std::uint8_t id) {
  return {.ordinal = ordinal,
          .name = "NVIDIA H200",
          .major = 9,
          .memory = memory_of_h200,
          .processors = 132,
          .uuid = {1, 2, id}};
}

/// A node's GPUs, of which `first` is the first one's identity.
std::vector<device::CudaGpu> node(int gpus, std::uint8_t first) {
  std::vector<device::CudaGpu> out;
  for (int i = 0; i < gpus; ++i) out.push_back(h200(i, static_cast<std::uint8_t>(first + i)));
  return out;
}

/// The GPUs that the driver shows to each of some local ranks.
using Shown = std::vector<std::vector<device::CudaGpu>>;

GpuSharing sharing_of(const config::Config& config, const std::vector<Shown>& machines, int rank) {
  std::vector<GpuSeat> seats;
  for (std::size_t machine = 0; machine < machines.size(); ++machine)
    for (std::size_t local = 0; local < machines[machine].size(); ++local)
      seats.push_back(
          gpu_seat(config, machines[machine][local], static_cast<int>(local), cat("node", machine)));
  return share_gpus(seats, rank);
}

TEST(GpuSharing, ranks_that_see_one_gpu_each_share_none) {
  Shown shown;
  for (int rank = 0; rank < 8; ++rank) shown.push_back({h200(0, static_cast<std::uint8_t>(10 + rank))});
  for (int rank = 0; rank < 8; ++rank) {
    const GpuSharing sharing = sharing_of(device_config(""), {shown}, rank);
    EXPECT_EQ(sharing.gpus, 8);
    EXPECT_EQ(sharing.ranks_here, 1);
    EXPECT_EQ(sharing.memory, memory_of_h200);
    EXPECT_DOUBLE_EQ(sharing.peak, 8 * bf16_of_h200);
  }
}

TEST(GpuSharing, ranks_that_see_all_gpus_take_them_in_turn) {
  const auto of = [](int ranks, const config::Config& config) {
    return sharing_of(config, {Shown(static_cast<std::size_t>(ranks), node(4, 1))}, 0);
  };
  EXPECT_DOUBLE_EQ(of(1, device_config("")).peak, bf16_of_h200);
  EXPECT_DOUBLE_EQ(of(4, device_config("")).peak, 4 * bf16_of_h200);
  EXPECT_EQ(of(4, device_config("")).ranks_here, 1);
  EXPECT_DOUBLE_EQ(of(8, device_config("")).peak, 4 * bf16_of_h200);
  EXPECT_EQ(of(8, device_config("")).ranks_here, 2);
  EXPECT_EQ(of(5, device_config("")).ranks_here, 2);
  EXPECT_DOUBLE_EQ(of(4, device_config(R"("peak_tflops": 500)")).peak, 4 * 500e12);
  EXPECT_DOUBLE_EQ(of(1, device_config(R"("tf32": true)", "")).peak, bf16_of_h200 / 2);
  EXPECT_DOUBLE_EQ(of(1, device_config("", "")).peak, 66.9e12);
}

TEST(GpuSharing, every_machine_has_its_own) {
  const std::vector<Shown> machines{Shown(4, node(4, 1)), Shown(4, node(2, 5))};
  EXPECT_EQ(sharing_of(device_config(""), machines, 0).ranks_here, 1);
  EXPECT_EQ(sharing_of(device_config(""), machines, 7).ranks_here, 2);
  EXPECT_EQ(sharing_of(device_config(""), machines, 7).gpus, 6);
  EXPECT_DOUBLE_EQ(sharing_of(device_config(""), machines, 7).peak, 6 * bf16_of_h200);
}

TEST(GpuSharing, gpus_without_an_identity_are_told_by_machine_and_number) {
  auto gpus = node(2, 1);
  for (device::CudaGpu& gpu : gpus) gpu.uuid = {};
  const GpuSharing sharing = sharing_of(device_config(""), {Shown(4, gpus), Shown(2, gpus)}, 0);
  EXPECT_EQ(sharing.gpus, 4);
  EXPECT_EQ(sharing.ranks_here, 2);
}

TEST(GpuSharing, the_peak_is_unknown_where_one_is) {
  std::vector<device::CudaGpu> gpus = node(2, 1);
  gpus[1].name = "Unheard of", gpus[1].processors = 0;
  EXPECT_EQ(sharing_of(device_config(""), {Shown(2, gpus)}, 0).peak, 0);
  EXPECT_DOUBLE_EQ(sharing_of(device_config(""), {Shown(1, gpus)}, 0).peak, bf16_of_h200);
  EXPECT_DOUBLE_EQ(sharing_of(device_config(R"("peak_tflops": 10)"), {Shown(2, gpus)}, 0).peak, 20e12);
}

// GPUs are hidden from these tests.
TEST(GpuSharing, ranks_on_processors_share_none) {
  EXPECT_EQ(share_gpus_locally(device_config(""), 3).gpus, 0);
  launch_ranks(2, [](const DistributedPtr& dist) {
    const GpuSharing sharing = share_gpus_of_world(device_config(""), *dist);
    EXPECT_EQ(sharing.gpus, 0);
    EXPECT_EQ(sharing.ranks_here, 0);
  });
}

}  // namespace
}  // namespace sherd::engine
