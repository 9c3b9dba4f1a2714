// The emulated tensor cores against plain products of matrices. Who holds which element is written here as
// the PTX ISA's tables have it: the row and column of a lane's element i.
#define SHERD_CUDA simt
#include "simt/device/cuda/tensor_cores.cuh"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include "simt/racecheck.h"
#include "support/expect_error.h"

namespace sherd::simt {
namespace {

using device::simt::launch;

struct Place {
  int row, column;
};
/// "Matrix fragments for mma.m16n8k16 with floating point type": a0…a7, b0…b3, c0…c3.
Place of_a(int lane, int i) {
  const int group = lane >> 2, in_group = lane % 4;
  const bool upper = (0 <= i && i < 2) || (4 <= i && i < 6);
  return {upper ? group : group + 8, i < 4 ? in_group * 2 + (i & 1) : in_group * 2 + (i & 1) + 8};
}
Place of_b(int lane, int i) {
  const int group = lane >> 2, in_group = lane % 4;
  return {i < 2 ? in_group * 2 + (i & 1) : in_group * 2 + (i & 1) + 8, group};
}
Place of_c(int lane, int i) {
  const int group = lane >> 2, in_group = lane % 4;
  return {i < 2 ? group : group + 8, in_group * 2 + (i & 1)};
}

struct Fragments {
  unsigned a[4], b[2];
  float d[4];
};

template <class T>
__global__ void mma_kernel(Fragments* lanes) {
  Fragments& mine = lanes[threadIdx.x];
  device::simt::mma_16x8x16(mine.d, mine.a, mine.b, T{});
}

/// Integers whose sums are exact in any order.
float number(int salt, int row, int column) {
  return static_cast<float>((row * 37 + column * 11 + salt * 5 + row * column) % 17 - 8);
}

template <class T>
void put(unsigned* words, int i, float value) {
  words[i / 2] |= static_cast<unsigned>(T(value).bits) << (i % 2 * 16);
}

template <class T>
void expect_product() {
  std::vector<Fragments> warps(64);  // two warps, of which each has its own product
  for (int thread = 0; thread < 64; ++thread) {
    Fragments& mine = warps[static_cast<std::size_t>(thread)] = {};
    const int lane = thread % 32, warp = thread / 32;
    for (int i = 0; i < 8; ++i) put<T>(mine.a, i, number(warp, of_a(lane, i).row, of_a(lane, i).column));
    for (int i = 0; i < 4; ++i) put<T>(mine.b, i, number(2 + warp, of_b(lane, i).row, of_b(lane, i).column));
    for (int i = 0; i < 4; ++i) mine.d[i] = number(4, of_c(lane, i).row, of_c(lane, i).column) / 4;
  }
  launch(mma_kernel<T>, 1, 64, 0, nullptr, warps.data());
  for (int thread = 0; thread < 64; ++thread)
    for (int i = 0; i < 4; ++i) {
      const Place at = of_c(thread % 32, i);
      float want = number(4, at.row, at.column) / 4;
      for (int k = 0; k < 16; ++k)
        want += number(thread / 32, at.row, k) * number(2 + thread / 32, k, at.column);
      EXPECT_EQ(warps[static_cast<std::size_t>(thread)].d[i], want) << thread << " " << i;
    }
}

TEST(TensorCores, MultiplyAndAdd) {
  for (const Order order : {Order::ascending, Order::descending}) {
    set_order(order);
    expect_product<bf16>();
    expect_product<f16>();
  }
  set_order(Order::ascending);
}

constexpr int stride = 24;  // elements from row to row: aligned to 16 bytes

template <bool transposed>
__global__ void load_kernel(std::uint16_t* to, int skew) {
  SHERD_SHARED(std::uint16_t, tile, 32 * stride + 8);
  for (int c = 0; c < 8; ++c)
    tile[threadIdx.x * stride + static_cast<unsigned>(c + skew)] =
        static_cast<std::uint16_t>(threadIdx.x * 8 + static_cast<unsigned>(c));
  __syncwarp();
  unsigned pairs[4];
  device::simt::load_matrices<transposed>(pairs, tile + threadIdx.x * stride + skew);
  std::memcpy(to + threadIdx.x * 8, pairs, sizeof pairs);
}

TEST(TensorCores, LoadMatricesAndTheirTransposes) {
  std::vector<std::uint16_t> plain(32 * 8), turned(32 * 8);
  launch(load_kernel<false>, 1, 32, 0, nullptr, plain.data(), 8);
  launch(load_kernel<true>, 1, 32, 0, nullptr, turned.data(), 0);
  // Element (r, c) of matrix i is (8·i + r)·8 + c. Thread 4·r + c/2 receives it; of the transpose, 4·c + r/2.
  for (int i = 0; i < 4; ++i)
    for (int r = 0; r < 8; ++r)
      for (int c = 0; c < 8; ++c) {
        const auto value = static_cast<std::uint16_t>((8 * i + r) * 8 + c);
        EXPECT_EQ(plain[static_cast<std::size_t>((4 * r + c / 2) * 8 + 2 * i + c % 2)], value);
        EXPECT_EQ(turned[static_cast<std::size_t>((4 * c + r / 2) * 8 + 2 * i + r % 2)], value);
      }
  testing::expect_error(ErrorKind::usage, "not aligned",
                        [&] { launch(load_kernel<false>, 1, 32, 0, nullptr, plain.data(), 1); });
}

enum class Wait : int { none, early, late, right };

/// Each thread copies a number and reads its neighbour's.
__global__ void copy_kernel(const float* from, float* to, int there, Wait wait) {
  SHERD_SHARED(float, held, 64);
  device::simt::start_copy(held + threadIdx.x, from + threadIdx.x, static_cast<int>(threadIdx.x) < there);
  if (wait == Wait::early || wait == Wait::right) device::simt::finish_copies();
  if (wait != Wait::early) __syncthreads();
  if (wait == Wait::late) device::simt::finish_copies();
  to[threadIdx.x] = held[threadIdx.x ^ 1];
}

TEST(TensorCores, CopiesComeWhenTheyAreFinished) {
  std::vector<float> from(64), to(64);
  for (std::size_t i = 0; i < 64; ++i) from[i] = static_cast<float>(i + 1);
  launch(copy_kernel, 1, 64, 0, nullptr, from.data(), to.data(), 50, Wait::right);
  for (std::size_t i = 0; i < 64; ++i)
    EXPECT_EQ(to[i], (i ^ 1) < 50 ? static_cast<float>((i ^ 1) + 1) : 0.0f) << i;
  launch(copy_kernel, 1, 64, 0, nullptr, from.data(), to.data(), 64, Wait::none);
  for (const float value : to) EXPECT_TRUE(std::isnan(value));
  if (!finds_races()) GTEST_SKIP() << "a sanitizer watches this build";
  for (const Wait wait : {Wait::early, Wait::late})
    testing::expect_error(ErrorKind::usage, "race: thread",
                          [&] { launch(copy_kernel, 1, 64, 0, nullptr, from.data(), to.data(), 64, wait); });
}

template <class T>
__global__ void narrow_kernel(const float* x, unsigned* to) {
  to[threadIdx.x] = device::simt::narrow_pair<T>(x[2 * threadIdx.x], x[2 * threadIdx.x + 1]);
}
template <class T>
void expect_rounded(const std::vector<float>& x) {
  std::vector<unsigned> pairs(x.size() / 2);
  launch(narrow_kernel<T>, 1, static_cast<unsigned>(pairs.size()), 0, nullptr, x.data(), pairs.data());
  for (std::size_t i = 0; i < x.size(); ++i)
    EXPECT_EQ(pairs[i / 2] >> (i % 2 * 16) & 0xffffu, T(x[i]).bits) << x[i];
}

TEST(TensorCores, PairsAreRounded) {
  const std::vector<float> x = {1,          -2,    0x1.01p0f, 0x1.03p0f, 0x1.002p0f,
                                0x1.006p0f, 3e38f, INFINITY,  0,         -0.0f};
  expect_rounded<bf16>(x);
  expect_rounded<f16>(x);
}

}  // namespace
}  // namespace sherd::simt
