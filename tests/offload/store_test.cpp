#include "offload/store.h"

#include <gtest/gtest.h>

#include <cstring>
#include <optional>
#include <thread>
#include <vector>

#include "offload/store_fixture.h"
#include "support/expect_error.h"

namespace sherd::offload {
namespace {

using device::Category;
using device::Tier;
using sherd::testing::expect_error;

class StoreTest : public StoreFixture, public ::testing::WithParamInterface<StoreOptions::Backend> {
 protected:
  void SetUp() override {
    if (GetParam() == StoreOptions::Backend::io_uring && !uring_works()) GTEST_SKIP() << "no io_uring here";
    options.backend = GetParam();
  }
};

INSTANTIATE_TEST_SUITE_P(Backends, StoreTest,
                         ::testing::Values(StoreOptions::Backend::io_uring, StoreOptions::Backend::threads),
                         [](const auto& of) { return std::string(backend_text(of.param)); });

TEST_P(StoreTest, fresh_spans_are_zeros_and_keep_what_is_written) {
  Store store(options, ledger);
  EXPECT_EQ(store.backend_name().substr(0, 7),
            GetParam() == StoreOptions::Backend::threads ? "threads" : "io_urin");
  const Span a = store.reserve("a", 100'001, Category::optimizer),
             b = store.reserve("b", 9000, Category::parameters);
  EXPECT_EQ(a.name(), "a");
  EXPECT_EQ(b.bytes(), 9000u);
  EXPECT_EQ(read_all(store, a), std::vector<unsigned char>(100'001));
  const auto data = pattern(100'001, 7);
  store.write(a, 0, data.data(), data.size()).wait();
  EXPECT_EQ(read_all(store, a), data);
  EXPECT_EQ(read_all(store, b), std::vector<unsigned char>(9000)) << "a write went past the end of its span";
  EXPECT_EQ(store.bytes_written(), 100'001u);
  EXPECT_EQ(store.bytes_read(), 100'001u * 2 + 9000);
}

TEST_P(StoreTest, every_small_range_and_address_is_served) {
  Store store(options, ledger);
  const Span span = store.reserve("ragged", 3 * 4096 + 17, Category::optimizer);
  std::vector<unsigned char> model(span.bytes());
  for (const std::uint64_t offset : {0, 1, 511, 4095, 4096, 4097, 8192, 12287, 12288, 12304})
    for (const std::size_t bytes : {1, 2, 511, 4095, 4096, 4097, 8192, 12000}) {
      if (offset + bytes > span.bytes()) continue;
      const auto data = pattern(bytes + 3, offset * 31 + bytes);
      store.write(span, offset, data.data() + 3, bytes).wait();
      std::memcpy(model.data() + offset, data.data() + 3, bytes);
      std::vector<unsigned char> back(bytes + 2, 0xee);
      store.read(span, offset, back.data() + 1, bytes).wait();
      ASSERT_EQ(std::memcmp(back.data() + 1, model.data() + offset, bytes), 0) << offset << " " << bytes;
      ASSERT_EQ(back.front(), 0xee);
      ASSERT_EQ(back.back(), 0xee) << "a byte after the range was touched";
      ASSERT_EQ(read_all(store, span), model) << offset << " " << bytes;
    }
}

TEST_P(StoreTest, a_buffer_keeps_its_bytes_around_a_ragged_read) {
  Store store(options, ledger);
  const Span span = store.reserve("s", 200'000, Category::optimizer);
  const auto data = pattern(200'000, 3);
  store.write(span, 0, data.data(), data.size()).wait();
  const Pages buffer = store.pages(1 << 20, Category::optimizer);
  for (const std::size_t bytes : {4095, 4097, 65536 + 1, 199'999}) {
    std::memset(buffer.data(), 0xab, 1 << 20);
    store.read(span, 0, buffer.data() + 4096, bytes).wait();
    EXPECT_EQ(std::memcmp(buffer.data() + 4096, data.data(), bytes), 0);
    EXPECT_EQ(buffer.data()[4095], std::byte{0xab});
    EXPECT_EQ(buffer.data()[4096 + bytes], std::byte{0xab}) << bytes;
  }
}

TEST_P(StoreTest, transfers_that_share_pages_run_in_the_order_of_the_calls) {
  options.block_size = 8192;
  Store store(options, ledger);
  const Span span = store.reserve("s", 1 << 20, Category::optimizer);
  std::vector<std::vector<unsigned char>> data, back(40);
  for (int i = 0; i < 40; ++i) data.push_back(pattern(span.bytes(), i));
  std::vector<Io> all;
  for (std::size_t i = 0; i < 40; ++i) {
    back[i].resize(span.bytes());
    all.push_back(store.write(span, 0, data[i].data(), data[i].size()));
    all.push_back(store.read(span, 100, back[i].data(), 1000));
    all.push_back(store.read(span, span.bytes() - 50, back[i].data() + 1000, 50));
  }
  all.clear();  // the destructor waits
  store.read(span, 0, back[0].data() + 2000, 1).wait();
  for (std::size_t i = 0; i < 40; ++i) {
    EXPECT_EQ(std::memcmp(back[i].data(), data[i].data() + 100, 1000), 0) << i;
    EXPECT_EQ(std::memcmp(back[i].data() + 1000, data[i].data() + span.bytes() - 50, 50), 0) << i;
  }
}

TEST_P(StoreTest, a_deferred_read_gets_what_was_there_and_later_writes_wait_for_it) {
  Store store(options, ledger);
  const std::size_t bytes = 5 * 4096;
  const Span span = store.reserve("s", bytes, Category::optimizer);
  const auto before = pattern(bytes, 1), after = pattern(bytes, 2);
  Io first = store.write(span, 0, before.data(), bytes);
  DeferredRead kept = store.defer_read(span, 100, 2 * 4096);
  std::optional<DeferredRead> dropped = store.defer_read(span, 3 * 4096 + 8, 4096);
  first.wait();
  Io behind_kept = store.write(span, 0, after.data(), 3 * 4096),
     behind_dropped = store.write(span, 3 * 4096, after.data() + 3 * 4096, 2 * 4096);
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_FALSE(behind_kept.ready());
  EXPECT_FALSE(behind_dropped.ready());
  dropped.reset();
  behind_dropped.wait();
  EXPECT_FALSE(behind_kept.ready());
  std::vector<unsigned char> got(2 * 4096);
  kept.start(got.data()).wait();
  behind_kept.wait();
  EXPECT_EQ(got, std::vector(before.begin() + 100, before.begin() + 100 + 2 * 4096));
  EXPECT_EQ(read_all(store, span), after);
  kept.start(got.data()).wait();  // once
  EXPECT_EQ(got, std::vector(before.begin() + 100, before.begin() + 100 + 2 * 4096));
}

TEST_P(StoreTest, a_write_waits_for_a_deferred_read_until_the_deadline) {
  options.timeout_seconds = 0.2;
  Store store(options, ledger);
  const auto bytes = pattern(4096, 1);
  const Span span = store.reserve("s", 4096, Category::optimizer);
  DeferredRead forgotten = store.defer_read(span, 0, 4096);
  Io write = store.write(span, 0, bytes.data(), 4096);
  expect_error(ErrorKind::io, "did not end within 0.2 s", [&] { write.wait(); });
  std::vector<unsigned char> got(4096);
  expect_error(ErrorKind::io, "did not end within 0.2 s", [&] { forgotten.start(got.data()); });
}

TEST_P(StoreTest, serves_several_threads) {
  options.block_size = 16384;
  Store store(options, ledger);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      const Span span = store.reserve(cat("of ", t), 300'000, Category::optimizer);
      for (int i = 0; i < 10; ++i) {
        const auto data = pattern(300'000, t * 100 + i);
        store.write(span, 0, data.data(), data.size()).wait();
        ASSERT_EQ(read_all(store, span), data);
      }
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(ledger.current(Tier::nvme), 4 * 300'000u);
}

TEST_P(StoreTest, a_transfer_runs_without_its_caller) {
  Store store(options, ledger);
  const Span span = store.reserve("s", 8 << 20, Category::optimizer);
  const auto data = pattern(8 << 20, 1);
  Io io = store.write(span, 0, data.data(), data.size());
  const Deadline limit = soon();
  while (!io.ready() && !limit.passed()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_TRUE(io.ready());
}

TEST_P(StoreTest, the_file_goes_with_the_store) {
  std::filesystem::path path;
  {
    Store store(options, ledger);
    path = store.path();
    EXPECT_EQ(path.filename(), "rank_00003.swap");
    EXPECT_TRUE(std::filesystem::exists(path));
    store.reserve("s", 123, Category::optimizer);
    EXPECT_EQ(ledger.current(Tier::nvme, Category::optimizer), 123u);
    EXPECT_EQ(ledger.current(Tier::host, Category::workspace), Store::host_bytes(options));
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()))
      << "left: " << *std::filesystem::directory_iterator(folder.path());
  EXPECT_EQ(ledger.current(Tier::nvme), 0u);
  EXPECT_EQ(ledger.current(Tier::host), 0u);
}

TEST_P(StoreTest, a_span_larger_than_the_disk_is_refused_with_both_sizes) {
  Store store(options, ledger);
  expect_error(ErrorKind::io, "cannot reserve",
               [&] { store.reserve("vast", 1ull << 50, Category::optimizer); });
  expect_error(ErrorKind::io, "'vast'", [&] { store.reserve("vast", 1ull << 50, Category::optimizer); });
  EXPECT_EQ(ledger.current(Tier::nvme), 0u);
  const Span span = store.reserve("small", 5000, Category::optimizer);
  EXPECT_EQ(read_all(store, span), std::vector<unsigned char>(5000)) << "the store must go on";
  ledger.set_limit(Tier::nvme, 10'000);
  expect_error(ErrorKind::memory, "nvme", [&] { store.reserve("more", 5001, Category::optimizer); });
}

TEST_P(StoreTest, says_what_is_wrong_with_a_call) {
  Store store(options, ledger);
  const Span span = store.reserve("s", 100, Category::optimizer);
  char byte = 0;
  expect_error(ErrorKind::usage, "outside of 's', which has 100", [&] { store.read(span, 100, &byte, 1); });
  expect_error(ErrorKind::usage, "outside", [&] { store.write(span, ~0ull, &byte, 1); });
  expect_error(ErrorKind::usage, "no memory", [&] { store.write(span, 0, nullptr, 1); });
  store.read(span, 100, nullptr, 0).wait();
  store.read(Span(), 0, nullptr, 0).wait();
  Io().wait();
  EXPECT_TRUE(Io().ready());
  StoreOptions other = options;
  other.rank = 4;
  Store second(other, ledger);
  expect_error(ErrorKind::usage, "another store", [&] { second.read(span, 0, &byte, 1); });
}

TEST_F(StoreFixture, checksums_are_on_the_books) {
  options.checksums = true;
  {
    Store store(options, ledger);
    store.reserve("s", 10 * 4096 + 1, Category::optimizer);
    EXPECT_EQ(ledger.current(Tier::host, Category::workspace), Store::host_bytes(options) + 11 * 4);
  }
  EXPECT_EQ(ledger.current(Tier::host), 0u);
}

TEST_F(StoreFixture, options_that_make_no_sense_are_refused) {
  const auto refused = [&](auto change, const std::string& part) {
    StoreOptions bad = options;
    change(bad);
    expect_error(ErrorKind::config, part, [&] { Store(bad, ledger); });
  };
  refused([](StoreOptions& o) { o.block_size = 5000; }, "aio.block_size must be a multiple of 4096");
  refused([](StoreOptions& o) { o.block_size = 0; }, "aio.block_size");
  refused([](StoreOptions& o) { o.queue_depth = 0; }, "aio.queue_depth");
  refused([](StoreOptions& o) { o.thread_count = 0; }, "aio.thread_count");
  refused([](StoreOptions& o) { o.folder = ""; }, "nvme_path");
  refused([](StoreOptions& o) { o.timeout_seconds = 0; }, "timeout");
  EXPECT_EQ(ledger.current(Tier::host), 0u);
  sherd::testing::write_text(folder / "file", "");
  options.folder = folder / "file";
  expect_error(ErrorKind::io, "Choose another nvme_path", [&] { Store(options, ledger); });
}

TEST_F(StoreFixture, of_an_absolute_path_only_the_last_folder_is_made) {
  for (const char* mistyped : {"moutn/drive", "moutn/drive/", "moutn/./drive"}) {
    options.folder = folder / mistyped;
    expect_error(ErrorKind::io, cat("there is no folder '", (folder / "moutn").string(), "', and only"),
                 [&] { Store(options, ledger); });
  }
  EXPECT_FALSE(std::filesystem::exists(folder / "moutn"));
  for (const char* good : {"drive", "other/", "."}) {
    options.folder = folder / good;
    EXPECT_TRUE(std::filesystem::exists(Store(options, ledger).path().parent_path()));
  }
}

}  // namespace
}  // namespace sherd::offload
