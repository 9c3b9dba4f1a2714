// Files of machines.
#include "config/machine.h"

#include <gtest/gtest.h>

#include <filesystem>

#include "support/expect_error.h"
#include "support/places.h"
#include "support/temp_folder.h"

namespace sherd::config {
namespace {

using testing::expect_error;

constexpr const char* whole = R"({
  "name": "a box", "source": "a page", "devices": 4, "memory": "80GB",
  "rates": [
    {"ranks": 1, "bandwidth": 2e12, "products": [{"dtype": "bf16", "peak": 312e12, "efficiency": 0.8,
      "measured": [[64, 128, 256, 1e12]]}], "families": [{"family": "norm", "bandwidth": 1e12}]},
    {"ranks": 4, "bandwidth": 1e12, "products": [{"dtype": "fp32", "peak": 1e12}], "overlap": 0.5}],
  "links": [{"name": "NVLink", "ranks": 4, "bandwidth": 2e11}, {"name": "Ethernet", "bandwidth": 1e9}],
  "host": {"memory": "1TB", "update": 1e11}, "drive": {"size": "4TB", "read": 1e10, "write": 5e9}})";

TEST(Machine, ReadsWhatItWrites) {
  const Machine machine = parse_machine(whole);
  EXPECT_EQ(machine.memory, 80'000'000'000u);
  EXPECT_EQ(machine.rates[0].products[0].measured[0], (MeasuredProduct{64, 128, 256, 1e12}));
  EXPECT_EQ(machine.rates[0].products[0].dtype, DType::bf16);
  EXPECT_EQ(machine.links[1].ranks, 0);
  EXPECT_EQ(parse_machine(dump(machine)), machine);
}

TEST(Machine, HasRatesForNumbersOfRanks) {
  const Machine machine = parse_machine(whole);
  EXPECT_EQ(machine.rates_of(1).bandwidth, 2e12);
  EXPECT_EQ(machine.rates_of(2).bandwidth, 2e12);
  EXPECT_EQ(machine.rates_of(3).bandwidth, 1e12);
  EXPECT_EQ(machine.rates_of(99).bandwidth, 1e12);
}

TEST(Machine, TheFilesOfTheProjectLoadAndNameTheirSources) {
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(SHERD_SOURCE_DIR "/configs/machines")) {
    const Machine machine = read_machine(entry.path().string());
    EXPECT_FALSE(machine.source.empty()) << entry.path();
    EXPECT_GT(machine.accelerator() ? machine.memory : machine.host.memory, std::uint64_t{8} << 30)
        << entry.path();
    EXPECT_EQ(parse_machine(dump(machine)), machine) << entry.path();
    ++files;
  }
  EXPECT_GE(files, 6);
}

TEST(Machine, BadFilesGetOneClearLine) {
  const auto refused = [](const std::string& text, const std::string& expected) {
    expect_error(ErrorKind::config, expected, [&] { parse_machine(text, "box.json"); });
  };
  refused("[]", "must hold a section");
  refused(R"({"name": "x"})", "rates");
  refused(R"({"name": "x", "rates": []})", "at least one entry");
  refused(R"({"name": "x", "rates": [{"bandwidth": 1, "products": []}]})", "no products");
  refused(R"({"name": "x", "rates": [{"bandwidth": 0, "products": [{"dtype": "bf16", "peak": 1}]}]})",
          "rates[0].bandwidth");
  refused(R"({"name": "x", "rates": [{"bandwith": 1}]})", "bandwidth");
  refused(R"({"name": "x", "rates": [{"bandwidth": 1, "products": [{"dtype": "int4", "peak": 1}]}]})",
          "dtype");
  refused(R"({"name": "x", "rates": [{"bandwidth": 1, "products": [{"dtype": "bf16", "peak": 1,
             "measured": [[1, 2, 3]]}]}]})",
          "four numbers");
  std::string links = whole;
  links.replace(links.find(R"("ranks": 4, "bandwidth": 2e11)"), 10, R"("ranks": 0)");
  refused(links, "'Ethernet' joins no more ranks");
  expect_error(ErrorKind::io, "cannot read the machine /nowhere/box.json",
               [] { read_machine("/nowhere/box.json"); });
}

}  // namespace
}  // namespace sherd::config
