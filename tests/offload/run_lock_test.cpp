#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <memory>
#include <optional>

#include "offload/store_fixture.h"
#include "support/expect_error.h"
#include "support/other_process.h"

namespace sherd::offload {
namespace {

namespace fs = std::filesystem;
using device::Category;
using sherd::testing::expect_error;
using sherd::testing::OtherProcess;
using sherd::testing::read_text;
using sherd::testing::write_text;
using ::testing::HasSubstr;
using ::testing::Not;

class RunLockTest : public StoreFixture {
 protected:
  /// A store that has something in its file.
  std::unique_ptr<Store> used_store() {
    auto store = std::make_unique<Store>(options, ledger);
    const Span span = store->reserve("of the other run", 100'000, Category::optimizer);
    const auto data = pattern(100'000, 1);
    store->write(span, 0, data.data(), data.size()).wait();
    return store;
  }
};

TEST_F(RunLockTest, a_second_store_on_the_same_file_is_refused) {
  Store store(options, ledger);
  expect_error(ErrorKind::io, cat("'", store.path().string(), "' is in use by another store of this process"),
               [&] { Store(options, ledger); });
  options.folder /= ".";
  expect_error(ErrorKind::io, "by another store of this process", [&] { Store(options, ledger); });
  EXPECT_TRUE(fs::exists(store.path())) << "the refused one must leave the file alone";
  EXPECT_EQ(ledger.current(device::Tier::host), Store::host_bytes(options));
}

TEST_F(RunLockTest, another_live_run_is_refused_and_a_killed_one_taken_over) {
  OtherProcess other([&] { return used_store(); });
  expect_error(ErrorKind::io, cat("in use by process ", other.pid(), " on host"),
               [&] { Store(options, ledger); });
  expect_error(ErrorKind::io, "two runs cannot share it", [&] { Store(options, ledger); });
  other.kill();
  const fs::path left = folder / "sherd-swap" / "rank_00003.swap";
  ASSERT_GT(fs::file_size(left), 100'000u);
  ::testing::internal::CaptureStderr();
  std::optional<Store> store(std::in_place, options, ledger);
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(
      log, HasSubstr(cat("taking over '", left.string(), "' (106496 bytes), left by process ", other.pid())));
  const Span span = store->reserve("mine", 100'000, Category::optimizer);
  EXPECT_EQ(read_all(*store, span), std::vector<unsigned char>(100'000))
      << "what the dead run wrote is visible";
  store.reset();
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST_F(RunLockTest, a_file_without_a_lock_is_taken_over_too) {
  fs::create_directories(folder / "sherd-swap");
  write_text(folder / "sherd-swap/rank_00003.swap", std::string(20'000, 'x'));
  write_text(folder / "sherd-swap/rank_00003.lock", "");
  Store store(options, ledger);
  EXPECT_EQ(read_all(store, store.reserve("s", 20'000, Category::optimizer)),
            std::vector<unsigned char>(20'000));
  EXPECT_THAT(read_text(folder / "sherd-swap/rank_00003.lock"), HasSubstr(cat("process ", ::getpid())));
}

TEST_F(RunLockTest, ranks_share_a_folder_that_goes_with_the_last) {
  std::optional<Store> first(std::in_place, options, ledger);
  options.rank = 0;
  std::optional<Store> second(std::in_place, options, ledger);
  EXPECT_NE(first->path(), second->path());
  first.reset();
  EXPECT_TRUE(fs::exists(second->path()));
  second.reset();
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST_F(RunLockTest, missing_folders_are_made_and_a_relative_one_survives_a_change_of_folder) {
  const fs::path before = fs::current_path();
  fs::current_path(folder.path());
  options.folder = "a/b";
  std::optional<Store> store(std::in_place, options, ledger);
  fs::current_path(before);
  EXPECT_TRUE(fs::exists(folder / "a/b/sherd-swap/rank_00003.swap"));
  store.reset();
  EXPECT_FALSE(fs::exists(folder / "a/b/sherd-swap"));
}

}  // namespace
}  // namespace sherd::offload
