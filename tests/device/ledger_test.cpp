#include "device/ledger.h"

#include <gtest/gtest.h>

#include <limits>
#include <thread>
#include <vector>

#include "support/expect_error.h"

namespace sherd::device {
namespace {

TEST(Ledger, keeps_tiers_and_categories_apart_and_remembers_peaks) {
  Ledger ledger;
  ledger.charge(Tier::device, Category::parameters, 100);
  ledger.charge(Tier::device, Category::gradients, 50);
  ledger.charge(Tier::host, Category::optimizer, 7);
  ledger.credit(Tier::device, Category::parameters, 60);
  EXPECT_EQ(ledger.current(Tier::device), 90u);
  EXPECT_EQ(ledger.current(Tier::device, Category::parameters), 40u);
  EXPECT_EQ(ledger.peak(Tier::device), 150u);
  EXPECT_EQ(ledger.peak(Tier::device, Category::parameters), 100u);
  EXPECT_EQ(ledger.current(Tier::host), 7u);
  EXPECT_EQ(ledger.current(Tier::nvme), 0u);
  ledger.reset_peaks();
  EXPECT_EQ(ledger.peak(Tier::device), 90u);
  EXPECT_EQ(ledger.peak(Tier::device, Category::parameters), 40u);
}

TEST(Ledger, moves_between_categories_without_a_change_of_the_total) {
  Ledger ledger;
  ledger.charge(Tier::device, Category::activations, 100);
  ledger.reclassify(Tier::device, Category::activations, Category::communication, 30);
  EXPECT_EQ(ledger.current(Tier::device), 100u);
  EXPECT_EQ(ledger.peak(Tier::device), 100u);
  EXPECT_EQ(ledger.current(Tier::device, Category::activations), 70u);
  EXPECT_EQ(ledger.peak(Tier::device, Category::communication), 30u);
}

TEST(Ledger, refuses_to_pass_a_limit_and_names_the_holders) {
  Ledger ledger;
  ledger.set_limit(Tier::device, 1000);
  EXPECT_EQ(ledger.limit(Tier::device), 1000u);
  ledger.charge(Tier::device, Category::parameters, 600);
  ledger.charge(Tier::device, Category::activations, 400);
  sherd::testing::expect_error(ErrorKind::memory, "out of device memory: 1 more bytes for workspace",
                               [&] { ledger.charge(Tier::device, Category::workspace, 1); });
  sherd::testing::expect_error(ErrorKind::memory, "parameters 600, activations 400",
                               [&] { ledger.charge(Tier::device, Category::workspace, 1); });
  EXPECT_EQ(ledger.current(Tier::device), 1000u) << "a refused charge must leave no trace";
  EXPECT_EQ(ledger.peak(Tier::device), 1000u);
  ledger.charge(Tier::host, Category::optimizer, 5000);
  ledger.set_limit(Tier::device, 0);
  ledger.charge(Tier::device, Category::workspace, 1 << 20);
}

TEST(Ledger, refuses_sizes_that_would_wrap) {
  Ledger ledger;
  ledger.set_limit(Tier::device, 1000);
  ledger.charge(Tier::device, Category::parameters, 10);
  sherd::testing::expect_error(ErrorKind::memory, "out of device memory", [&] {
    ledger.charge(Tier::device, Category::parameters, std::numeric_limits<std::uint64_t>::max() - 5);
  });
}

TEST(Ledger, balances_when_many_threads_charge_it) {
  Ledger ledger;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      for (int i = 0; i < 2000; ++i) {
        ledger.charge(Tier::device, Category::workspace, 3);
        ledger.credit(Tier::device, Category::workspace, 3);
      }
    });
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(ledger.current(Tier::device), 0u);
  EXPECT_LE(ledger.peak(Tier::device), 12u);
  EXPECT_GE(ledger.peak(Tier::device), 3u);
}

}  // namespace
}  // namespace sherd::device
