#include "offload/store.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "offload/store_fixture.h"
#include "support/expect_error.h"

namespace sherd::offload {
namespace {

using device::Category;
using device::Tier;
using sherd::testing::expect_error;

class PagesTest : public StoreFixture {};

TEST_F(PagesTest, are_zeroed_and_charged_whole) {
  Store store(options, ledger);
  {
    const Pages pages = store.pages(10'000, Category::gradients);
    EXPECT_EQ(ledger.current(Tier::host, Category::gradients), 12'288u);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(pages.data()) % 4096, 0u);
    for (std::size_t k = 0; k < 12'288; ++k) ASSERT_EQ(pages.data()[k], std::byte{0});
  }
  EXPECT_EQ(ledger.current(Tier::host, Category::gradients), 0u);
}

TEST_F(PagesTest, stay_while_transfers_use_them) {
  options.block_size = 4096;
  options.queue_depth = 1;
  Store store(options, ledger);
  const Span span = store.reserve("s", 1 << 20, Category::optimizer);
  Pages pages = store.pages(1 << 20, Category::optimizer);
  std::memset(pages.data(), 7, 1 << 20);
  Io io = store.write(span, 0, pages.data(), 1 << 20);
  pages = {};
  io.wait();
  EXPECT_EQ(read_all(store, span), std::vector<unsigned char>(1 << 20, 7));
}

TEST_F(PagesTest, outlive_the_store) {
  Pages pages;
  {
    Store store(options, ledger);
    pages = store.pages(16'384, Category::optimizer);
  }
  std::memset(pages.data(), 1, 16'384);
  EXPECT_EQ(ledger.current(Tier::host, Category::optimizer), 16'384u) << "the memory is still there";
  pages = {};
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

TEST_F(PagesTest, travel_directly) {
  const auto seen = std::make_shared<std::atomic<int>>(0);
  Store store(options, ledger, std::make_unique<Watch>(make_backend(options, true), seen));
  const Pages pages = store.pages(1 << 20, Category::optimizer);
  std::memset(pages.data(), 7, 1 << 20);
  const Span span = store.reserve("s", 1 << 20, Category::optimizer);
  store.write(span, 0, pages.data(), 1 << 20).wait();
  EXPECT_EQ(*seen, 1) << "one whole request from their own memory";
  EXPECT_EQ(read_all(store, span), std::vector<unsigned char>(1 << 20, 7));
}

TEST_F(PagesTest, lent_storage_travels_directly_and_stays_while_it_is_used) {
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

TEST_F(PagesTest, keep_to_the_ledger) {
  Store store(options, ledger);
  ledger.set_limit(Tier::host, Store::host_bytes(options) + 8192);
  const Pages fit = store.pages(8192, Category::optimizer);
  expect_error(ErrorKind::memory, "out of host memory", [&] { store.pages(1, Category::optimizer); });
}

}  // namespace
}  // namespace sherd::offload
