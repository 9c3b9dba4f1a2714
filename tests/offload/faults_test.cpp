#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <optional>
#include <thread>
#include <vector>

#include "offload/file/swap_file.h"
#include "offload/store_fixture.h"
#include "support/expect_error.h"
#include "support/faulty_backend.h"

namespace sherd::offload {
namespace {

using device::Category;
using device::Tier;
using sherd::testing::expect_error;
using sherd::testing::Fate;
using sherd::testing::Faults;
using sherd::testing::FaultyBackend;
using Clock = std::chrono::steady_clock;

constexpr std::size_t span_bytes = 500'000;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// A store over a device that fails as a rule says, with a span of known content.
class FaultTest : public StoreFixture, public ::testing::WithParamInterface<StoreOptions::Backend> {
 protected:
  void SetUp() override {
    if (GetParam() == StoreOptions::Backend::io_uring && !uring_works()) GTEST_SKIP() << "no io_uring here";
    options.backend = GetParam();
    options.block_size = 65536;
    options.queue_depth = 4;
  }

  void open() {
    store.emplace(options, ledger, std::make_unique<FaultyBackend>(make_backend(options, true), faults));
    span = store->reserve("moments", span_bytes, Category::optimizer);
    data = pattern(span_bytes, 5);
    store->write(span, 0, data.data(), data.size()).wait();
  }

  /// A failed transfer breaks the store: no call may bring data any more.
  void expect_broken(const std::string& part) {
    char byte = 0;
    expect_error(ErrorKind::io, part, [&] { store->read(span, 0, &byte, 1); });
    expect_error(ErrorKind::io, part, [&] { store->write(span, 0, &byte, 1); });
    expect_error(ErrorKind::io, part, [&] { store->reserve("more", 1, Category::optimizer); });
  }

  std::shared_ptr<Faults> faults = std::make_shared<Faults>(nullptr);
  std::optional<Store> store;
  Span span;
  std::vector<unsigned char> data;
};

INSTANTIATE_TEST_SUITE_P(Backends, FaultTest,
                         ::testing::Values(StoreOptions::Backend::io_uring, StoreOptions::Backend::threads),
                         [](const auto& of) { return std::string(backend_text(of.param)); });

TEST_P(FaultTest, an_unreadable_block_is_named) {
  open();
  faults->set_rule([](const IoRequest&, int before) { return Fate{.error = before == 2 ? EIO : 0}; });
  const std::string expected = cat("cannot read 'moments' at offset 131072 (rank 3, '",
                                   store->path().string(), "'): Input/output error. Check the disk");
  expect_error(ErrorKind::io, expected, [&] { read_all(*store, span); });
  expect_broken(expected);
  store.reset();
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST_P(FaultTest, a_lost_write_is_never_read_over) {
  open();
  faults->set_rule([](const IoRequest& request, int) { return Fate{.error = request.write ? EIO : 0}; });
  { Io unheeded = store->write(span, 0, data.data(), 4096); }
  expect_broken("cannot write 'moments' at offset 0 (rank 3");
}

TEST_P(FaultTest, a_full_disk_is_named) {
  open();
  faults->set_rule([](const IoRequest& request, int) { return Fate{.error = request.write ? ENOSPC : 0}; });
  expect_error(ErrorKind::io,
               "No space left on device. Free space there, or choose a larger disk with nvme_path",
               [&] { store->write(span, 0, data.data(), 4096).wait(); });
}

TEST_P(FaultTest, transfers_behind_a_failed_one_end_with_its_error) {
  open();
  const Span other = store->reserve("other", 1 << 20, Category::optimizer);
  // All are held: what is apart might otherwise end before the first one fails.
  faults->set_rule(
      [](const IoRequest&, int before) { return Fate{.error = before == 0 ? EIO : 0, .held = true}; });
  std::vector<unsigned char> first(span_bytes), second(span_bytes), third(1 << 20);
  Io failing = store->write(span, 0, first.data(), span_bytes);
  Io ordered = store->read(span, 0, second.data(), span_bytes),
     apart = store->read(other, 0, third.data(), 1 << 20);
  faults->release();
  expect_error(ErrorKind::io, "cannot write 'moments'", [&] { failing.wait(); });
  expect_error(ErrorKind::io, "cannot write 'moments'", [&] { failing.wait(); });
  expect_error(ErrorKind::io, "cannot write 'moments'", [&] { ordered.wait(); });
  expect_error(ErrorKind::io, "cannot write 'moments'", [&] { apart.wait(); });
}

TEST_P(FaultTest, short_transfers_go_on_where_they_ended) {
  faults->set_rule([](const IoRequest& request, int before) {
    constexpr int parts[] = {-1, 4096, 5000, 8192, 1, 12000, 4095};
    const std::int64_t part = parts[before % 7];
    return Fate{.moves = part < request.bytes ? part : -1};
  });
  open();
  EXPECT_EQ(read_all(*store, span), data);
  const auto patch = pattern(100'000, 9);
  store->write(span, 777, patch.data(), patch.size()).wait();
  std::memcpy(data.data() + 777, patch.data(), patch.size());
  EXPECT_EQ(read_all(*store, span), data);
  EXPECT_EQ(store->bytes_read(), 2 * span_bytes);
}

TEST_P(FaultTest, interruptions_are_tried_again) {
  faults->set_rule([](const IoRequest&, int before) {
    return Fate{.error = before % 3 == 0 ? EINTR : before % 3 == 1 ? EAGAIN : 0};
  });
  open();
  EXPECT_EQ(read_all(*store, span), data);
  faults->set_rule([](const IoRequest&, int) { return Fate{.error = EAGAIN}; });
  expect_error(ErrorKind::io, "Resource temporarily unavailable", [&] { read_all(*store, span); });
}

TEST_P(FaultTest, a_device_that_moves_nothing_is_an_error) {
  open();
  faults->set_rule([](const IoRequest&, int) { return Fate{.moves = 0}; });
  expect_error(ErrorKind::io, "the file ends there", [&] { read_all(*store, span); });
}

TEST_P(FaultTest, a_device_that_moves_parts_of_a_page_is_an_error) {
  open();
  faults->set_rule([](const IoRequest&, int) { return Fate{.moves = 100}; });
  expect_error(ErrorKind::io, "parts of a page only", [&] { read_all(*store, span); });
}

TEST_P(FaultTest, checksums_find_torn_lost_and_changed_pages) {
  options.checksums = true;
  const auto expect_found = [&](const Fate& on_write, const Fate& on_read, const std::string& offset) {
    faults->set_rule(nullptr);
    open();
    EXPECT_EQ(read_all(*store, span), data);
    EXPECT_EQ(read_all(*store, store->reserve("fresh", 10'000, Category::optimizer)),
              std::vector<unsigned char>(10'000));
    const auto changed = pattern(65536, 77);
    faults->set_rule([&](const IoRequest& request, int) {
      return request.write ? on_write : request.offset == 0 ? on_read : Fate{};
    });
    store->write(span, 65536, changed.data(), changed.size()).wait();
    expect_error(ErrorKind::data, cat("cannot read 'moments' at offset ", offset, " (rank 3"),
                 [&] { read_all(*store, span); });
    faults->set_rule(nullptr);
    char byte = 0;
    expect_error(ErrorKind::data, "CRC-32C", [&] { store->read(span, 0, &byte, 1); });
    store.reset();
  };
  expect_found({.moves = 8192, .lies = true}, {}, "73728");
  expect_found({.moves = 0, .lies = true}, {}, "65536");
  expect_found({}, {.flips = 5000}, "4096");
}

TEST_P(FaultTest, a_merge_verifies_what_it_fetches) {
  options.checksums = true;
  open();
  faults->set_rule([](const IoRequest& request, int) { return Fate{.flips = request.write ? -1 : 10}; });
  expect_error(ErrorKind::data, "at offset 4096", [&] { store->write(span, 5000, data.data(), 100).wait(); });
}

TEST_P(FaultTest, a_file_that_was_cut_off_is_found) {
  for (const std::uint64_t left : {std::uint64_t{0}, std::uint64_t{200'000}, std::uint64_t{span_bytes}}) {
    for (const bool write : {false, true}) {
      open();
      std::filesystem::resize_file(store->path(), left);
      std::vector<unsigned char> memory(span_bytes);
      try {
        if (write)
          store->write(span, 0, memory.data(), memory.size()).wait();
        else
          store->read(span, 0, memory.data(), memory.size()).wait();
        ADD_FAILURE() << "nothing was thrown";
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::io);
        EXPECT_THAT(error.what(),
                    ::testing::HasSubstr("was cut off under the run; it should have 507904 bytes"));
        EXPECT_THAT(error.what(), ::testing::HasSubstr("rank 3"));
        EXPECT_THAT(error.what(), ::testing::HasSubstr(store->path().string()));
      }
      store.reset();
    }
  }
  open();
  std::filesystem::resize_file(store->path(), 4096);
  expect_error(ErrorKind::io, "was cut off", [&] { store->reserve("more", 1 << 20, Category::optimizer); });
}

TEST_F(StoreFixture, a_file_that_grows_meanwhile_is_whole) {
  SwapFile file(folder.path(), 0, false);
  std::atomic<bool> stop = false;
  std::thread grows([&] {
    for (int i = 0; i < 2000; ++i) file.extend("a span", 4096);
    stop = true;
  });
  std::string found;
  while (!stop && found.empty()) found = file.damage();
  grows.join();
  EXPECT_EQ(found, "");
}

TEST_P(FaultTest, a_file_that_was_removed_is_found) {
  open();
  std::filesystem::remove_all(folder / "sherd-swap");
  expect_error(ErrorKind::io, "of rank 3 was removed under the run", [&] { read_all(*store, span); });
  expect_broken("was removed under the run");
}

TEST_P(FaultTest, a_slow_device_is_waited_for) {
  open();
  faults->set_rule([](const IoRequest&, int) { return Fate{.held = true}; });
  std::vector<unsigned char> memory(span_bytes);
  Io io = store->read(span, 0, memory.data(), memory.size());
  EXPECT_FALSE(io.ready());
  faults->release();
  io.wait();
  EXPECT_EQ(memory, data);
}

TEST_P(FaultTest, a_stuck_device_is_an_error_at_the_deadline_and_keeps_no_memory_of_ours) {
  open();
  store.reset();
  options.timeout_seconds = 2;
  open();
  faults->set_rule([](const IoRequest&, int) { return Fate{.held = true}; });
  Pages buffer = store->pages(span_bytes, Category::workspace);
  std::memset(buffer.data(), 1, span_bytes);
  auto plain = std::make_unique<std::vector<unsigned char>>(span_bytes, 2);
  auto start = Clock::now();
  {
    Io direct = store->read(span, 0, buffer.data(), span_bytes);
    Io copied = store->read(span, 0, plain->data(), span_bytes);
    expect_error(ErrorKind::io,
                 "reading 500000 bytes at offset 0 of 'moments' in '" + store->path().string() +
                     "' (rank 3) did not end within 2 s",
                 [&] { copied.wait(); });
    expect_error(ErrorKind::io, "did not end", [&] { direct.wait(); });
  }
  EXPECT_EQ(*plain, std::vector<unsigned char>(span_bytes, 2));
  plain.reset();  // AddressSanitizer watches what comes later
  buffer = {};    // the device still holds it
  expect_broken("did not end within 2 s");
  store.reset();
  EXPECT_LT(seconds_since(start), 15.0);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  faults->release();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
}

TEST_P(FaultTest, a_device_that_answers_after_everything_has_gone_does_no_harm) {
  options.timeout_seconds = 0.2;
  const auto held = std::make_shared<Faults>([](const IoRequest&, int) { return Fate{.held = true}; });
  {
    auto own_ledger = std::make_unique<device::Ledger>();
    Store stuck(options, *own_ledger, std::make_unique<FaultyBackend>(make_backend(options, true), held));
    const Span late = stuck.reserve("late", 1 << 20, Category::optimizer);
    const Pages buffer = stuck.pages(1 << 20, Category::workspace);
    Io io = stuck.write(late, 0, buffer.data(), 1 << 20);
  }
  held->release();
  std::this_thread::sleep_for(std::chrono::milliseconds(200));
}

/// A backend that throws at the first request, and then finds that it failed.
class BrokenBackend final : public IoBackend {
 public:
  std::string name() const override { return "broken"; }
  void attach(int) override {}
  int register_memory(std::span<std::byte>, std::string*) override { return -1; }
  void unregister_memory(int) noexcept override {}
  void submit(std::span<const IoRequest> requests) override {
    for (const IoRequest& request : requests) failed_.push_back({request.tag, -EIO});
    fail(ErrorKind::io, "no ring");
  }
  std::size_t reap(std::span<IoCompletion> completions, std::chrono::nanoseconds) override {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const std::size_t count = std::min(failed_.size(), completions.size());
    std::copy_n(failed_.begin(), count, completions.begin());
    failed_.clear();
    return count;
  }
  void wake() noexcept override {}

 private:
  std::vector<IoCompletion> failed_;
};

TEST_F(StoreFixture, a_backend_that_fails_breaks_the_store) {
  Store store(options, ledger, std::make_unique<BrokenBackend>());
  const Span span = store.reserve("s", 4096, Category::optimizer);
  expect_error(ErrorKind::io, "(rank 3) cannot go on: no ring", [&] { read_all(store, span); });
}

}  // namespace
}  // namespace sherd::offload
