#include "offload/buffer_pool.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "offload/store_fixture.h"
#include "support/expect_error.h"

namespace sherd::offload {
namespace {

using device::Category;
using device::Tier;
using sherd::testing::expect_error;

class BufferPoolTest : public StoreFixture {};

TEST_F(BufferPoolTest, gives_zeroed_pages_and_charges_whole_ones) {
  options.timeout_seconds = 5;
  Store store(options, ledger);
  {
    BufferPool pool(store, ledger, 3, 10'000, Category::gradients);
    EXPECT_EQ(pool.count(), 3);
    EXPECT_EQ(pool.bytes(), 10'000u);
    EXPECT_EQ(BufferPool::host_bytes(3, 10'000), 3 * 12'288u);
    EXPECT_EQ(ledger.current(Tier::host, Category::gradients), 3 * 12'288u);
    std::vector<Buffer> all;
    for (int i = 0; i < 3; ++i) {
      all.push_back(pool.try_acquire());
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(all.back().data()) % 4096, 0u);
      EXPECT_EQ(all.back().bytes(), 10'000u);
      for (std::size_t k = 0; k < 10'000; ++k) ASSERT_EQ(all.back().data()[k], std::byte{0});
      std::memset(all.back().data(), i + 1, 10'000);
    }
    for (int i = 0; i < 3; ++i)
      for (std::size_t k = 0; k < 10'000; ++k)
        ASSERT_EQ(all[static_cast<std::size_t>(i)].data()[k], std::byte(i + 1));
    EXPECT_FALSE(pool.try_acquire());
    all.pop_back();
    all.push_back(pool.try_acquire());
    EXPECT_TRUE(all.back());
    Buffer moved = std::move(all[0]);
    EXPECT_FALSE(all[0]);
    EXPECT_EQ(all[0].data(), nullptr);
    moved = std::move(all[1]);
    all[0] = pool.try_acquire();
    EXPECT_TRUE(all[0]) << "what was held before goes back";
    moved.release();
    EXPECT_FALSE(moved);
    EXPECT_TRUE(pool.try_acquire());
  }
  EXPECT_EQ(ledger.current(Tier::host, Category::gradients), 0u);
}

TEST_F(BufferPoolTest, a_buffer_is_given_again_only_when_its_transfers_have_ended) {
  options.block_size = 4096;
  options.queue_depth = 1;
  Store store(options, ledger);
  BufferPool pool(store, ledger, 1, 1 << 20, Category::optimizer);
  const Span span = store.reserve("s", 1 << 20, Category::optimizer);
  for (int i = 1; i <= 5; ++i) {
    Buffer buffer = pool.try_acquire();
    std::memset(buffer.data(), i, buffer.bytes());
    Io io = store.write(span, 0, buffer.data(), buffer.bytes());
    buffer.release();
    Buffer again;
    for (const Deadline limit = soon(); !again && !limit.passed();) again = pool.try_acquire();
    ASSERT_TRUE(again);
    std::memset(again.data(), 0xff, again.bytes());
    again.release();
    io.wait();
    EXPECT_EQ(read_all(store, span), std::vector<unsigned char>(1 << 20, static_cast<unsigned char>(i)));
  }
}

TEST_F(BufferPoolTest, serves_many_threads) {
  Store store(options, ledger);
  BufferPool pool(store, ledger, 3, 4096, Category::optimizer);
  std::vector<std::thread> threads;
  for (int t = 0; t < 6; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < 200; ++i) {
        const Buffer buffer = pool.try_acquire();
        if (!buffer) continue;
        std::memset(buffer.data(), t, 4096);
        ASSERT_EQ(buffer.data()[4095], static_cast<std::byte>(t));
      }
    });
  for (auto& thread : threads) thread.join();
  std::vector<Buffer> all;
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(all.emplace_back(pool.try_acquire()));
}

TEST_F(BufferPoolTest, buffers_outlive_pool_and_store) {
  Buffer buffer;
  {
    Store store(options, ledger);
    BufferPool pool(store, ledger, 2, 8192, Category::optimizer);
    buffer = pool.try_acquire();
  }
  std::memset(buffer.data(), 1, 8192);
  EXPECT_EQ(ledger.current(Tier::host, Category::optimizer), 2 * 8192u) << "the memory is still there";
  buffer.release();
  EXPECT_EQ(ledger.current(Tier::host), 0u);
}

/// Counts requests that go straight to the memory that was registered last.
class Watch final : public IoBackend {
 public:
  Watch(std::unique_ptr<IoBackend> device, std::shared_ptr<std::atomic<int>> seen)
      : device_(std::move(device)), seen_(std::move(seen)) {}
  std::string name() const override { return device_->name(); }
  void attach(int descriptor) override { device_->attach(descriptor); }
  int register_memory(std::span<std::byte> memory, std::string* why) override {
    begin_ = memory.data(), end_ = memory.data() + memory.size();
    return device_->register_memory(memory, why);
  }
  void unregister_memory(int handle) noexcept override { device_->unregister_memory(handle); }
  void submit(std::span<const IoRequest> requests) override {
    for (const IoRequest& request : requests) *seen_ += request.memory >= begin_ && request.memory < end_;
    device_->submit(requests);
  }
  std::size_t reap(std::span<IoCompletion> completions, std::chrono::nanoseconds patience) override {
    return device_->reap(completions, patience);
  }
  void wake() noexcept override { device_->wake(); }

 private:
  std::unique_ptr<IoBackend> device_;
  std::shared_ptr<std::atomic<int>> seen_;
  std::atomic<std::byte*> begin_ = nullptr, end_ = nullptr;
};

TEST_F(BufferPoolTest, serves_two_stores_directly) {
  const auto seen = std::make_shared<std::atomic<int>>(0);
  Store first(options, ledger);
  options.rank = 4;
  Store second(options, ledger, std::make_unique<Watch>(make_backend(options, true), seen));
  BufferPool pool(first, ledger, 1, 1 << 20, Category::optimizer);
  pool.lend_to(second);
  Buffer buffer = pool.try_acquire();
  std::memset(buffer.data(), 7, buffer.bytes());
  const Span a = first.reserve("a", 1 << 20, Category::optimizer);
  const Span b = second.reserve("b", 1 << 20, Category::optimizer);
  first.write(a, 0, buffer.data(), buffer.bytes()).wait();
  second.write(b, 0, buffer.data(), buffer.bytes()).wait();
  EXPECT_EQ(*seen, 1) << "one whole request from the pool's own memory";
  EXPECT_EQ(read_all(first, a), read_all(second, b));
}

TEST_F(BufferPoolTest, lent_storage_travels_directly_and_stays_while_it_is_used) {
  const auto seen = std::make_shared<std::atomic<int>>(0);
  Store store(options, ledger, std::make_unique<Watch>(make_backend(options, true), seen));
  const auto data = pattern(4 << 20, 6);
  const auto memory = std::shared_ptr<void>(std::aligned_alloc(4096, 4 << 20), &std::free);
  bool freed = false;
  device::Storage storage({static_cast<std::byte*>(memory.get()), 4 << 20},
                          [&](device::MemoryBlock) { freed = true; });
  std::memcpy(storage.data(), data.data(), data.size());
  const Span span = store.reserve("s", 4 << 20, Category::optimizer);
  {
    Loan loan = store.lend(storage);
    expect_error(ErrorKind::usage, "lent to the store already", [&] { store.lend(storage); });
    store.write(span, 0, storage.data(), storage.bytes()).wait();
    EXPECT_EQ(*seen, 4) << "a request for each MiB of it";
    Io io = store.write(span, 0, storage.data(), storage.bytes());
    storage = {};
    loan = {};  // the transfer keeps what it uses
    io.wait();
  }
  EXPECT_TRUE(freed);
  EXPECT_EQ(read_all(store, span), data);
  store.write(span, 0, memory.get(), 4 << 20).wait();
  EXPECT_EQ(*seen, 8) << "memory that was taken back is copied";
}

TEST_F(BufferPoolTest, keeps_to_the_ledger) {
  Store store(options, ledger);
  ledger.set_limit(Tier::host, Store::host_bytes(options) + 8192);
  BufferPool fits(store, ledger, 2, 4096, Category::optimizer);
  expect_error(ErrorKind::memory, "out of host memory",
               [&] { BufferPool(store, ledger, 1, 1, Category::optimizer); });
  expect_error(ErrorKind::usage, "a pool of 0 buffers",
               [&] { BufferPool(store, ledger, 0, 1, Category::optimizer); });
}

}  // namespace
}  // namespace sherd::offload
