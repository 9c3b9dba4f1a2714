#include <gmock/gmock.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <set>
#include <vector>

#include "support/expect_error.h"
#include "support/gpu/gpu.h"

namespace sherd::device {
namespace {

class CudaDeviceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    SHERD_NEEDS_GPU();
    device = make_cuda_device(
        {.ordinal = cuda_status().gpus.front().ordinal, .threads = 2, .timeout_seconds = 60});
  }
  std::vector<float> counting(std::size_t count) const {
    std::vector<float> out(count);
    for (std::size_t i = 0; i < count; ++i) out[i] = static_cast<float>(i);
    return out;
  }
  std::shared_ptr<Accelerator> device;
};

TEST_F(CudaDeviceTest, is_identified_unlike_any_other) {
  std::set<std::array<std::uint8_t, 16>> seen{{}};
  for (const CudaGpu& gpu : cuda_status().gpus) EXPECT_TRUE(seen.insert(gpu.uuid).second) << gpu.ordinal;
}

TEST_F(CudaDeviceTest, copies_there_and_back_through_pageable_and_pinned_memory) {
  const std::size_t bytes = (3 << 20) + 4;
  const std::vector<float> values = counting(bytes / 4);
  const Storage there = device->allocate(bytes, Category::workspace);
  const Storage host = device->allocate(bytes, Category::workspace, Tier::host);
  device->copy(there.data(), values.data(), bytes);
  device->copy(host.data(), there.data(), bytes);
  device->synchronize();
  EXPECT_EQ(std::memcmp(host.data(), values.data(), bytes), 0);
  std::vector<float> plain(values.size());
  device->zero(there.data(), 4 * sizeof(float));
  device->copy(plain.data(), there.data(), bytes);
  device->synchronize();
  EXPECT_EQ(plain[3], 0);
  EXPECT_EQ(plain[4], 4);
}

TEST_F(CudaDeviceTest, charges_the_ledger_and_reuses_freed_blocks) {
  const std::byte* first = nullptr;
  {
    const Storage block = device->allocate(5 << 20, Category::gradients);
    first = block.data();
    EXPECT_EQ(device->ledger().current(Tier::device, Category::gradients), 5u << 20);
  }
  EXPECT_EQ(device->ledger().current(Tier::device), 0u);
  EXPECT_EQ(device->allocate(5 << 20, Category::workspace).data(), first);
}

TEST_F(CudaDeviceTest, a_host_block_is_not_reused_while_a_copy_reads_it) {
  const std::size_t bytes = 256 << 20;
  const Storage there = device->allocate(bytes, Category::workspace);
  std::vector<std::uint8_t> seen(1);
  for (int round = 0; round < 8; ++round) {
    Storage host = device->allocate(bytes, Category::workspace, Tier::host);
    std::memset(host.data(), round + 1, bytes);
    device->copy(there.data(), host.data(), bytes);
    host = {};
    const Storage next = device->allocate(bytes, Category::workspace, Tier::host);
    std::memset(next.data(), 0xff, bytes);
    device->copy(seen.data(), there.data() + bytes - 1, 1);
    device->synchronize();
    ASSERT_EQ(seen[0], round + 1);
  }
}

TEST_F(CudaDeviceTest, memory_that_runs_out_names_bytes_category_and_holders) {
  const Storage held = device->allocate(64 << 20, Category::parameters);
  const std::size_t too_much = device->memory().total * 2;
  sherd::testing::expect_error(ErrorKind::memory, "more bytes for activations",
                               [&] { device->allocate(too_much, Category::activations); });
  sherd::testing::expect_error(ErrorKind::memory, "this rank holds: parameters 67108864",
                               [&] { device->allocate(too_much, Category::activations); });
  EXPECT_EQ(device->ledger().current(Tier::device, Category::activations), 0u);
  EXPECT_NE(device->allocate(1 << 20, Category::activations).data(), nullptr) << "it goes on after that";
}

TEST_F(CudaDeviceTest, kept_blocks_make_room_for_others) {
  const std::size_t most = device->memory().free / 10 * 6;
  device->allocate(most, Category::workspace);
  EXPECT_NE(device->allocate(most + (64 << 20), Category::workspace).data(), nullptr);
}

TEST_F(CudaDeviceTest, a_copy_stream_follows_the_compute_stream_and_back) {
  const std::size_t bytes = 64 << 20;
  const std::vector<float> values = counting(bytes / 4);
  Stream copies = device->make_stream(true);
  const Storage there = device->allocate(bytes, Category::workspace);
  Storage host = device->allocate(bytes, Category::workspace, Tier::host);
  for (int round = 0; round < 5; ++round) {
    device->zero(there.data(), bytes);
    device->copy(there.data(), values.data(), bytes);
    copies.wait(device->compute_stream().record());
    device->copy_on(copies, host.data(), there.data(), bytes);
    const Event done = copies.record();
    done.wait(Deadline::after_seconds(60), "a copy");
    ASSERT_EQ(std::memcmp(host.data(), values.data(), bytes), 0);
    device->compute_stream().wait(done);
  }
}

TEST_F(CudaDeviceTest, pinned_memory_of_others_is_copied_from) {
  std::vector<float> values = counting(1 << 20);
  const auto pinned = device->pin(values.data(), values.size() * 4);
  const Storage there = device->allocate(values.size() * 4, Category::workspace);
  device->copy(there.data(), values.data(), values.size() * 4);
  std::vector<float> back(values.size());
  device->copy(back.data(), there.data(), back.size() * 4);
  device->synchronize();
  EXPECT_EQ(back, values);
}

TEST_F(CudaDeviceTest, memory_of_others_may_go_as_soon_as_it_is_not_pinned) {
  for (const bool graphs : {false, true}) {
    device = make_cuda_device({.ordinal = cuda_status().gpus.front().ordinal,
                               .threads = 2,
                               .timeout_seconds = 60,
                               .graphs = graphs});
    const std::vector<float> expected = counting(1 << 20);
    std::vector<float> values = expected;
    const Storage there = device->allocate(values.size() * 4, Category::workspace);
    auto pinned = device->pin(values.data(), values.size() * 4);
    device->copy(there.data(), values.data(), values.size() * 4);
    pinned.reset();
    std::fill(values.begin(), values.end(), -1.0f);
    device->copy(values.data(), there.data(), values.size() * 4);
    device->synchronize();
    EXPECT_TRUE(values == expected) << graphs;
  }
}

TEST_F(CudaDeviceTest, synchronize_calls_the_checks_while_they_are_registered) {
  int calls = 0;
  auto handle = device->after_synchronize([&] { ++calls; });
  device->synchronize();
  EXPECT_EQ(calls, 1);
  handle.reset();
  device->synchronize();
  EXPECT_EQ(calls, 1);
}

TEST_F(CudaDeviceTest, copies_and_zeros_come_out_of_graphs_as_in_order) {
  device = make_cuda_device(
      {.ordinal = cuda_status().gpus.front().ordinal, .threads = 2, .timeout_seconds = 60, .graphs = true});
  const std::size_t bytes = 1 << 20;
  const std::vector<float> values = counting(bytes / 4);
  const Storage a = device->allocate(bytes, Category::workspace),
                b = device->allocate(bytes, Category::workspace);
  const Storage host = device->allocate(bytes, Category::workspace, Tier::host);
  for (int round = 0; round < 4; ++round) {
    const float first = static_cast<float>(round) + 0.5f;
    std::memcpy(host.data(), values.data(), bytes);
    std::memcpy(host.data() + bytes - sizeof first, &first, sizeof first);
    device->copy(a.data(), host.data(), bytes);
    device->zero(b.data(), bytes);
    device->copy(b.data() + bytes / 2, a.data() + bytes / 2, bytes / 2);
    device->zero(a.data(), bytes / 2);
    device->copy(host.data(), b.data(), bytes);
    device->zero(host.data() + bytes / 2, 2 * sizeof first);  // no work of a graph
    device->end_sequence();
    device->synchronize();
    const auto* out = reinterpret_cast<const float*>(host.data());
    EXPECT_EQ(out[0], 0);
    EXPECT_EQ(out[bytes / 8], 0);
    EXPECT_EQ(out[bytes / 8 + 2], values[bytes / 8 + 2]);
    EXPECT_EQ(out[bytes / 4 - 2], values[bytes / 4 - 2]);
    EXPECT_EQ(out[bytes / 4 - 1], first);
  }
  EXPECT_EQ(device->graph_counts().launches, 3u);
}

TEST_F(CudaDeviceTest, memory_may_outlive_the_device) {
  Storage there = device->allocate(1 << 20, Category::workspace);
  Storage host = device->allocate(1 << 20, Category::workspace, Tier::host);
  device.reset();
  std::memset(host.data(), 1, host.bytes());
  there = {}, host = {};
}

}  // namespace
}  // namespace sherd::device
