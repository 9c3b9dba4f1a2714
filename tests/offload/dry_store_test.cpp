#include <gtest/gtest.h>

#include <filesystem>
#include <vector>

#include "base/error.h"
#include "offload/store.h"
#include "support/temp_folder.h"

namespace sherd::offload {
namespace {

using device::Category;
using device::Tier;

TEST(DryStore, ChargesWhatARealOneChargesAndMakesNoFile) {
  sherd::testing::TempFolder folder;
  StoreOptions options;
  options.folder = folder.path();
  const auto books = [&](bool dry) {
    options.dry = dry;
    device::Ledger ledger;
    std::vector<std::uint64_t> out;
    {
      Store store(options, ledger);
      store.reserve("moments", 100'001, Category::optimizer);
      const Pages pages = store.pages(15'000, Category::workspace);
      for (const Tier tier : {Tier::host, Tier::nvme})
        for (int c = 0; c < device::category_count; ++c)
          out.push_back(ledger.current(tier, static_cast<Category>(c)));
    }
    EXPECT_EQ(ledger.current(Tier::host) + ledger.current(Tier::nvme), 0u);
    return out;
  };
  EXPECT_EQ(books(true), books(false));

  options.dry = true;
  options.folder = folder / "not" / "there";
  device::Ledger ledger;
  Store store(options, ledger);
  const Span span = store.reserve("a terabyte", std::uint64_t{1} << 40, Category::parameters);
  EXPECT_EQ(store.path(), "");
  EXPECT_FALSE(std::filesystem::exists(folder / "not"));
  EXPECT_EQ(span.name(), "a terabyte");
  EXPECT_EQ(ledger.current(Tier::nvme, Category::parameters), std::uint64_t{1} << 40);
}

TEST(DryStore, CountsTransfersAndLeavesMemoryAlone) {
  StoreOptions options;
  options.folder = "anywhere";
  options.dry = true;
  device::Ledger ledger;
  Store store(options, ledger);
  EXPECT_EQ(store.backend_name(), "dry");
  const Span span = store.reserve("a", 1000, Category::optimizer);
  std::vector<char> memory(1000, 'x');
  Io read = store.read(span, 0, memory.data(), 1000), write = store.write(span, 10, memory.data(), 90);
  EXPECT_TRUE(read.ready() && write.ready());
  read.wait();
  EXPECT_EQ(memory, std::vector<char>(1000, 'x'));
  EXPECT_EQ(store.bytes_read(), 1000u);
  EXPECT_EQ(store.bytes_written(), 90u);
  EXPECT_THROW(store.read(span, 999, memory.data(), 2), Error);
  const Pages pages = store.pages(4096, Category::workspace);
  EXPECT_FALSE(pages.registered());
  EXPECT_EQ(pages.data()[4095], std::byte{0});
}

}  // namespace
}  // namespace sherd::offload
