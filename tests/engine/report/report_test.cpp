#include "engine/report/report.h"

#include <gtest/gtest.h>

namespace sherd::engine {
namespace {

using device::Category;
using device::Ledger;
using device::Tier;

TEST(Human, BytesHaveThreeDigits) {
  EXPECT_EQ(human_bytes(0), "0 B");
  EXPECT_EQ(human_bytes(1023), "1023 B");
  EXPECT_EQ(human_bytes(1024), "1.00 KiB");
  EXPECT_EQ(human_bytes(12'900'000), "12.3 MiB");
  EXPECT_EQ(human_bytes(std::uint64_t{139} << 30), "139 GiB");
  EXPECT_EQ(human_bytes((std::uint64_t{1} << 30) - 1), "1.00 GiB");
  EXPECT_EQ(human_bytes(~std::uint64_t{0}), "16.0 EiB");
}

TEST(Human, CountsAndSeconds) {
  EXPECT_EQ(human_count(7), "7");
  EXPECT_EQ(human_count(0.25), "0.25");
  EXPECT_EQ(human_count(12'345), "12.3k");
  EXPECT_EQ(human_count(999'999), "1.00M");
  EXPECT_EQ(human_count(1.39e11), "139G");
  EXPECT_EQ(human_count(std::numeric_limits<double>::infinity()), "?");
  EXPECT_EQ(human_seconds(8.24), "8.2s");
  EXPECT_EQ(human_seconds(59.99), "1:00");
  EXPECT_EQ(human_seconds(125), "2:05");
  EXPECT_EQ(human_seconds(3725), "1:02:05");
  EXPECT_EQ(human_seconds(3 * 86400 + 4 * 3600), "3d 04h");
  EXPECT_EQ(human_seconds(std::numeric_limits<double>::quiet_NaN()), "?");
}

TEST(MemoryTable, ListsWhatWasHeld) {
  const auto device = device::make_meta_device(1);
  Ledger& ledger = device->ledger();
  ledger.charge(Tier::device, Category::parameters, 2048);
  ledger.charge(Tier::device, Category::activations, 4096);
  ledger.credit(Tier::device, Category::activations, 4096);
  ledger.charge(Tier::device, Category::gradients, 1024);
  ledger.charge(Tier::host, Category::optimizer, 512);
  ledger.set_limit(Tier::device, 1 << 20);
  const MemoryReport report = MemoryReport::of(*device);
  EXPECT_EQ(memory_table({&report, 1}),
            "memory                              now      peak\n"
            "-------------------------------------------------\n"
            "device parameters              2.00 KiB  2.00 KiB\n"
            "device gradients               1.00 KiB  1.00 KiB\n"
            "device activations                  0 B  4.00 KiB\n"
            "device total (limit 1.00 MiB)  3.00 KiB  6.00 KiB\n"
            "host optimizer                    512 B     512 B\n"
            "host total                        512 B     512 B\n"
            "memory held                              6.00 KiB\n");
}

TEST(MemoryTable, HoldsWhatLiesBetweenBlocks) {
  const auto device = device::make_cpu_device(1);
  constexpr std::size_t mib = std::size_t{1} << 20;
  constexpr std::size_t gap = 64;  // under AddressSanitizer each block has one behind it
  const auto held = [&] { return (MemoryReport::of(*device).held + 2 * gap) / mib * mib; };
  device::Storage first = device->allocate(3 * mib - gap, Category::activations, Tier::device);
  const device::Storage second = device->allocate(mib - gap, Category::activations, Tier::host);
  EXPECT_EQ(held(), 4 * mib);
  first = {};
  EXPECT_EQ(held(), 4 * mib) << "a hole is memory too";
  device->ledger().charge(Tier::host, Category::optimizer, 5 * mib);  // from another allocator
  EXPECT_EQ(held(), 9 * mib);
  device->ledger().credit(Tier::host, Category::optimizer, 5 * mib);
  device->ledger().charge(Tier::nvme, Category::optimizer, 5 * mib);
  EXPECT_EQ(MemoryReport::of(*device).tiers[1].total_peak, 6 * mib - gap);
  EXPECT_EQ(held(), 6 * mib) << "the host tier's peak; files are no memory";
  device->ledger().credit(Tier::nvme, Category::optimizer, 5 * mib);
}

TEST(MemoryTable, TakesTheLargestOfAllRanks) {
  const auto one = device::make_meta_device(1), other = device::make_meta_device(1);
  Ledger &a = one->ledger(), &b = other->ledger();
  a.charge(Tier::device, Category::parameters, 100);
  b.charge(Tier::device, Category::parameters, 300);
  a.charge(Tier::device, Category::gradients, 50);
  const MemoryReport ranks[] = {MemoryReport::of(*one), MemoryReport::of(*other)};
  const std::string table = memory_table(ranks);
  EXPECT_NE(table.find("largest of 2 ranks"), std::string::npos);
  EXPECT_NE(table.find("device parameters            300 B"), std::string::npos) << table;
  EXPECT_NE(table.find("device gradients              50 B"), std::string::npos) << table;
  const MemoryReport empty;
  EXPECT_NE(memory_table({&empty, 1}).find("nothing was allocated"), std::string::npos);
}

TEST(TrafficTable, DividesBySteps) {
  std::vector<comm::ProcessGroups::AxisTraffic> traffic{
      {comm::Axis::shard, {.all_gather = 10 * 1024, .scalars = 100}}};
  EXPECT_EQ(traffic_table(traffic, 10),
            "sent to other ranks    in all  per step\n"
            "---------------------------------------\n"
            "all-gather           10.0 KiB  1.00 KiB\n"
            "scalars                 100 B      10 B\n"
            "total                10.1 KiB  1.01 KiB\n");
  EXPECT_NE(traffic_table(traffic, 0).find("-\n"), std::string::npos);
  traffic.push_back({comm::Axis::replica, {.p2p = 500}});
  const std::string apart = traffic_table(traffic, 10);
  EXPECT_NE(apart.find("of it, shard group    10.1 KiB"), std::string::npos) << apart;
  EXPECT_NE(apart.find("of it, replica group     500 B"), std::string::npos) << apart;
}

}  // namespace
}  // namespace sherd::engine
