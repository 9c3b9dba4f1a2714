#define SHERD_CUDA simt
#include "simt/device/cuda/launch.cuh"
#include "simt/racecheck.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "support/expect_error.h"

namespace sherd::simt {
namespace {

using device::simt::block_sum;
using device::simt::launch;
using device::simt::warp_sum;

__global__ void coordinates_kernel(int* out, unsigned width) {
  const unsigned x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
  out[(blockIdx.z * gridDim.y * blockDim.y + y) * width + x] =
      static_cast<int>(100 * blockIdx.z + 10 * y + x);
}

TEST(Emulator, gives_every_thread_its_coordinates) {
  std::vector<int> out(2 * 6 * 6, -1);
  launch(coordinates_kernel, dim3(2, 3, 2), dim3(3, 2), 0, nullptr, out.data(), 6u);
  for (int z = 0; z < 2; ++z)
    for (int y = 0; y < 6; ++y)
      for (int x = 0; x < 6; ++x)
        EXPECT_EQ(out[static_cast<std::size_t>((z * 6 + y) * 6 + x)], 100 * z + 10 * y + x);
}

/// Reverses each block's part through shared memory, twice, so that barriers are met more than once.
__global__ void reverse_kernel(int* data) {
  SHERD_SHARED(int, part, 96);
  int* mine = data + blockIdx.x * blockDim.x;
  for (int round = 0; round < 3; ++round) {
    part[threadIdx.x] = mine[threadIdx.x];
    __syncthreads();
    mine[threadIdx.x] = part[blockDim.x - 1 - threadIdx.x];
    __syncthreads();
  }
}

TEST(Emulator, barriers_hold_in_either_order) {
  for (const Order order : {Order::ascending, Order::descending}) {
    set_order(order);
    std::vector<int> data(3 * 96);
    std::iota(data.begin(), data.end(), 0);
    launch(reverse_kernel, 3, 96, 0, nullptr, data.data());
    for (int i = 0; i < 3 * 96; ++i) EXPECT_EQ(data[static_cast<std::size_t>(i)], i / 96 * 96 + 95 - i % 96);
  }
  set_order(Order::ascending);
}

/// A kernel that is wrong without the barrier, so that the orders would show it.
__global__ void racing_kernel(int* data) {
  SHERD_SHARED(int, part, 64);
  part[threadIdx.x] = data[threadIdx.x];
  data[threadIdx.x] = part[63 - threadIdx.x];
}

TEST(Emulator, a_missing_barrier_shows) {
  std::vector<int> data(64, 7);
  if (finds_races())
    testing::expect_error(ErrorKind::usage, "race: thread",
                          [&] { launch(racing_kernel, 1, 64, 0, nullptr, data.data()); });
  else
    launch(racing_kernel, 1, 64, 0, nullptr, data.data());
  EXPECT_NE(data, std::vector<int>(64, 7));  // the first ones read what nobody has written
  EXPECT_EQ(data[0], -1);
}

__global__ void shuffles_kernel(int* out, double* sums, unsigned* votes) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  int* mine = out + threadIdx.x * 4;
  mine[0] = __shfl_sync(0xffffffffu, lane, 5);
  mine[1] = __shfl_xor_sync(0xffffffffu, lane, 3);
  mine[2] = __shfl_down_sync(0xffffffffu, lane, 4, 8);
  mine[3] = __shfl_up_sync(0xffffffffu, lane, 2);
  sums[threadIdx.x] = warp_sum(static_cast<double>(threadIdx.x));
  votes[threadIdx.x] = __ballot_sync(0xffffffffu, lane % 3 == 0);
}

TEST(Emulator, warps_exchange_values) {
  std::vector<int> out(64 * 4);
  std::vector<double> sums(64);
  std::vector<unsigned> votes(64);
  launch(shuffles_kernel, 1, 64, 0, nullptr, out.data(), sums.data(), votes.data());
  for (int t = 0; t < 64; ++t) {
    const auto at = static_cast<std::size_t>(t);
    const int lane = t % 32;
    EXPECT_EQ(out[4 * at], 5);
    EXPECT_EQ(out[4 * at + 1], lane ^ 3);
    EXPECT_EQ(out[4 * at + 2], lane % 8 < 4 ? lane + 4 : lane);
    EXPECT_EQ(out[4 * at + 3], lane < 2 ? lane : lane - 2);
    EXPECT_EQ(sums[at], t < 32 ? 496 : 1520);
    EXPECT_EQ(votes[at], 0x49249249u);
  }
}

__global__ void sums_kernel(std::int64_t* out) {
  const std::int64_t first = block_sum(std::int64_t{threadIdx.x});
  const std::int64_t second = block_sum(first * threadIdx.x);
  out[blockIdx.x * blockDim.x + threadIdx.x] = second;
  if (__syncthreads_count(threadIdx.x < 5) != 5) out[0] = -1;
  if (__syncthreads_or(0)) out[0] = -2;
}

TEST(Emulator, blocks_add_up) {
  std::vector<std::int64_t> out(2 * 256);
  launch(sums_kernel, 2, 256, 0, nullptr, out.data());
  for (const std::int64_t value : out) EXPECT_EQ(value, std::int64_t{32640} * 32640);
}

__global__ void dynamic_kernel(int* out, int n) {
  SHERD_DYNAMIC_SHARED(int, values);
  out[threadIdx.x + 4] = values[threadIdx.x];
  __syncthreads();
  if (threadIdx.x == 0)
    for (int i = 0; i < n; ++i) values[i] = i * i;
  __syncthreads();
  out[threadIdx.x] = values[threadIdx.x];
}

TEST(Emulator, shared_memory_comes_with_the_launch_and_holds_nothing) {
  std::vector<int> out(8);
  launch(dynamic_kernel, 1, 4, 4 * sizeof(int), nullptr, out.data(), 4);
  EXPECT_EQ(out, (std::vector<int>{0, 1, 4, 9, -1, -1, -1, -1}));
}

__global__ void atomics_kernel(unsigned long long* sum, int* least) {
  atomicAdd(sum, 1ull);
  atomicMin(least, static_cast<int>(threadIdx.x) - 3);
}

TEST(Emulator, atomics_count) {
  unsigned long long sum = 0;
  int least = 100;
  launch(atomics_kernel, 5, 33, 0, nullptr, &sum, &least);
  EXPECT_EQ(sum, 165u);
  EXPECT_EQ(least, -3);
}

__global__ void denormal_kernel(const float* x, float* y) {
  *y = *x * 0.5f;
}

TEST(Emulator, flushes_subnormals_and_restores_the_mode) {
  const float x = 0x1p-126f;
  float y = 1;
  launch(denormal_kernel, 1, 1, 0, nullptr, &x, &y);
  EXPECT_EQ(y, 0);
  volatile float here = x;
  EXPECT_NE(here * 0.5f, 0.0f);
}

// ---- what must not pass ----

__global__ void lonely_barrier_kernel() {
  if (threadIdx.x < 7) __syncthreads();
}
__global__ void two_barriers_kernel() {
  if (threadIdx.x < 32)
    __syncthreads();
  else
    __syncwarp();
  if (threadIdx.x < 32) __syncthreads();
}
__global__ void left_warp_kernel(int* out) {
  if (threadIdx.x == 3) return;
  *out = __shfl_sync(0xffffffffu, 1, 0);
}
__global__ void masks_kernel() {
  __syncwarp(threadIdx.x < 8 ? 0xffffu : 0xffffffffu);
}
__global__ void stranger_kernel() {
  __syncwarp(0x0fu);
}
__global__ void nothing_kernel() {}

/// One round of a loop with the barrier behind the writes, and none before those of the next round.
__global__ void reused_kernel(int* data, int rounds) {
  SHERD_SHARED(int, part, 64);
  for (int round = 0; round < rounds; ++round) {
    part[threadIdx.x] = data[threadIdx.x] + round;
    __syncthreads();
    data[threadIdx.x] += part[63 - threadIdx.x];
  }
}
/// A warp's lanes hand values on, with what orders memory between them or with a shuffle, which does not.
__global__ void hand_on_kernel(int* data, bool order) {
  SHERD_SHARED(int, part, 32);
  part[threadIdx.x] = data[threadIdx.x];
  if (order)
    __syncwarp();
  else
    data[threadIdx.x] = __shfl_sync(0xffffffffu, 1, 0);
  data[threadIdx.x] = part[threadIdx.x ^ 1];
}
/// Halves of a warp meet among themselves; then `partner` is read.
__global__ void halves_kernel(int* data, int partner) {
  SHERD_SHARED(int, part, 32);
  part[threadIdx.x] = 1;
  __syncwarp(threadIdx.x < 16 ? 0xffffu : 0xffff0000u);
  data[threadIdx.x] = part[static_cast<int>(threadIdx.x) ^ partner];
}
/// __syncwarp() orders a warp, not the block.
__global__ void warps_kernel(int* data) {
  SHERD_SHARED(int, part, 64);
  part[threadIdx.x] = 1;
  __syncwarp();
  data[threadIdx.x] = part[threadIdx.x ^ 32];
}
/// A warp writes where it and another have read. After a barrier the emulator goes on with the thread that
/// came last, which would be of the other warp and the first to read: it does not read.
__global__ void read_by_two_kernel(int* data) {
  __syncthreads();
  if (threadIdx.x < 48) data[1 + threadIdx.x] = data[0];
  __syncwarp();
  if (threadIdx.x == 0) data[0] = 1;
}
/// Blocks write to one place, or count there.
__global__ void meet_kernel(unsigned* data, bool atomic) {
  if (atomic)
    atomicAdd(data, 1u);
  else
    *data = blockIdx.x;
}
/// Thread 0 reads what others count without waiting for them.
__global__ void early_read_kernel(unsigned* data) {
  atomicAdd(data, 1u);
  if (threadIdx.x == 0) data[1] = *data;
}
/// 16-bit neighbours are two places.
__global__ void neighbours_kernel(std::uint16_t* data) {
  data[threadIdx.x] = static_cast<std::uint16_t>(data[threadIdx.x] + 1);
}
/// Thread 0 writes a word, thread 1 half of one, at `half`: with no barrier between, and with one.
__global__ void word_and_half_kernel(std::uint16_t* data, int half, bool barrier) {
  if (threadIdx.x == 0) *reinterpret_cast<std::uint32_t*>(data) = 1;
  if (barrier) __syncthreads();
  if (threadIdx.x == 1) data[half] = 2;
}
/// One shared array for block after block.
__global__ void blocks_kernel(int* data) {
  SHERD_SHARED(int, part, 32);
  SHERD_DYNAMIC_SHARED(int, more);
  part[threadIdx.x] = 1, more[threadIdx.x] = 2;
  __syncthreads();
  data[blockIdx.x * 32 + threadIdx.x] = part[threadIdx.x ^ 1] + more[threadIdx.x ^ 1];
}

TEST(Emulator, finds_races_and_no_others) {
  if (!finds_races()) GTEST_SKIP() << "a sanitizer watches this build";
  std::vector<int> data(128);
  std::vector<unsigned> counts(2);
  std::vector<std::uint16_t> halves(64);
  const auto expect_race = [](const auto& run) {
    testing::expect_error(ErrorKind::usage, "race: thread", run);
  };
  expect_race([&] { launch(reused_kernel, 1, 64, 0, nullptr, data.data(), 2); });
  launch(reused_kernel, 1, 64, 0, nullptr, data.data(), 1);
  expect_race([&] { launch(hand_on_kernel, 1, 32, 0, nullptr, data.data(), false); });
  launch(hand_on_kernel, 1, 32, 0, nullptr, data.data(), true);
  expect_race([&] { launch(halves_kernel, 1, 32, 0, nullptr, data.data(), 16); });
  launch(halves_kernel, 1, 32, 0, nullptr, data.data(), 8);
  expect_race([&] { launch(warps_kernel, 1, 64, 0, nullptr, data.data()); });
  expect_race([&] { launch(read_by_two_kernel, 1, 64, 0, nullptr, data.data()); });
  launch(read_by_two_kernel, 1, 32, 0, nullptr, data.data());
  expect_race([&] { launch(meet_kernel, 2, 1, 0, nullptr, counts.data(), false); });
  launch(meet_kernel, 2, 1, 0, nullptr, counts.data(), true);
  launch(meet_kernel, 1, 1, 0, nullptr, counts.data(), false);
  expect_race([&] { launch(early_read_kernel, 1, 2, 0, nullptr, counts.data()); });
  launch(neighbours_kernel, 1, 64, 0, nullptr, halves.data());
  for (const int half : {0, 1}) {
    expect_race([&] { launch(word_and_half_kernel, 1, 2, 0, nullptr, halves.data(), half, false); });
    launch(word_and_half_kernel, 1, 2, 0, nullptr, halves.data(), half, true);
  }
  launch(word_and_half_kernel, 1, 2, 0, nullptr, halves.data(), 2, false);
  launch(blocks_kernel, 4, 32, 32 * sizeof(int), nullptr, data.data());
  set_order(Order::descending);
  launch(reused_kernel, 1, 64, 0, nullptr, data.data(), 2);  // not looked at
  set_order(Order::ascending);
}

__global__ void misaligned_kernel(float* data) {
  device::simt::store_pack(data, device::simt::load_pack<4>(data));
}

TEST(Emulator, refuses_misaligned_accesses) {
  alignas(16) float data[8] = {};
  launch(misaligned_kernel, 1, 1, 0, nullptr, data + 4);
  testing::expect_error(ErrorKind::usage, "not aligned",
                        [&] { launch(misaligned_kernel, 1, 1, 0, nullptr, data + 1); });
}

TEST(Emulator, refuses_what_would_hang_or_fail_on_a_device) {
  using testing::expect_error;
  int out = 0;
  expect_error(ErrorKind::usage, "57 are done, 7 wait at a barrier",
               [] { launch(lonely_barrier_kernel, 1, 64, 0, nullptr); });
  expect_error(ErrorKind::usage, "wait for ones that never come",
               [] { launch(two_barriers_kernel, 1, 64, 0, nullptr); });
  expect_error(ErrorKind::usage, "31 at one of their warp",
               [&] { launch(left_warp_kernel, 1, 32, 0, nullptr, &out); });
  expect_error(ErrorKind::usage, "different masks", [] { launch(masks_kernel, 1, 32, 0, nullptr); });
  expect_error(ErrorKind::usage, "not in the mask", [] { launch(stranger_kernel, 1, 32, 0, nullptr); });
  expect_error(ErrorKind::usage, "more than a device takes",
               [] { launch(nothing_kernel, 1, 1025, 0, nullptr); });
  expect_error(ErrorKind::usage, "more than a device takes",
               [] { launch(nothing_kernel, 1, 1, 300000, nullptr); });
  expect_error(ErrorKind::usage, "no threads", [] { launch(nothing_kernel, 0, 32, 0, nullptr); });
  launch(nothing_kernel, 1, 1024, 0, nullptr);  // and goes on as if nothing had been
}

}  // namespace
}  // namespace sherd::simt
