// Activations on NVMe: what comes back is what was kept, in whatever order, through few buffers.
#include "engine/step/recompute.h"

#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

#include "offload/io_backend.h"
#include "support/cpu_fixture.h"
#include "support/expect_error.h"
#include "support/faulty_backend.h"
#include "support/temp_folder.h"

namespace sherd::engine {
namespace {

using device::Category;
using device::Tier;
using tensor::Tensor;
using Restore = autograd::SavedInputs::Restore;

class SavedInputsOnNvmeTest : public ::testing::Test {
 protected:
  SavedInputsOnNvmeTest() : device_(device::make_cpu_device(1)), kernels_(tensor::make_kernels(*device_)) {
    options_.folder = folder_.path();
    options_.timeout_seconds = 20;
  }
  Tensor value(int number, std::int64_t rows) const {
    std::vector<float> numbers(static_cast<std::size_t>(rows * 1000));
    std::iota(numbers.begin(), numbers.end(), static_cast<float>(number * 100'000));
    return Tensor::of<float>(*device_, {rows, 1000}, numbers);
  }
  void expect_value(const Restore& restore, int number, std::int64_t rows) const {
    const Tensor back = restore(), expected = value(number, rows);
    ASSERT_EQ(back.shape(), expected.shape());
    EXPECT_EQ(std::memcmp(back.raw(), expected.raw(), expected.bytes()), 0) << number;
  }

  sherd::testing::TempFolder folder_;
  std::shared_ptr<device::Device> device_;
  std::unique_ptr<tensor::Kernels> kernels_;
  offload::StoreOptions options_;
};

TEST_F(SavedInputsOnNvmeTest, BringBackWhatWasSavedThroughFewBuffers) {
  offload::Store store(options_, device_->ledger());
  SavedInputsOnNvme inputs(*kernels_, store, 3);
  const std::uint64_t before = device_->ledger().current(Tier::host, Category::activations);
  constexpr int count = 12;
  std::uint64_t bytes = 0, nvme = 0;
  const auto rows = [](int i) { return 1 + i % 2; };
  // Backwards, as one micro-batch's backward wants it; as it came; and in an order that nobody expects.
  const std::vector<std::function<int(int)>> orders{
      [](int i) { return count - 1 - i; }, [](int i) { return count - 1 - i; }, [](int i) { return i; },
      [](int i) { return i; }, [](int i) { return i * 5 % count; }};
  for (const auto& order : orders) {
    std::vector<Restore> kept;
    for (int i = 0; i < count; ++i) kept.push_back(inputs.save(value(i, rows(i)))), bytes += 4000 * rows(i);
    for (int i = 0; i < count; ++i) {
      expect_value(kept[order(i)], order(i), rows(order(i)));
      kept[order(i)] = nullptr;
    }
    EXPECT_EQ(store.bytes_written(), bytes);
    if (nvme == 0) nvme = device_->ledger().current(Tier::nvme, Category::activations);
  }
  EXPECT_EQ(device_->ledger().current(Tier::nvme, Category::activations), nvme);  // spans are used again
  EXPECT_EQ(nvme, 4000u * 18);
  EXPECT_LE(device_->ledger().peak(Tier::host, Category::activations) - before, 3u * (8000 + 4096));
  EXPECT_LE(store.bytes_read(), bytes);  // nothing is read twice
}

TEST_F(SavedInputsOnNvmeTest, ReadAheadOfTheirUse) {
  offload::Store store(options_, device_->ledger());
  SavedInputsOnNvme inputs(*kernels_, store, 4);
  for (int round = 0; round < 2; ++round) {
    std::vector<Restore> kept;
    for (int i = 0; i < 10; ++i) kept.push_back(inputs.save(value(i, 2)));
    for (int i = 0; i < 10; ++i) {
      const std::uint64_t read = store.bytes_read();
      expect_value(kept[i], i, 2);
      kept[i] = nullptr;
      if (i != 2) continue;
      // In the second round the next two come without being asked for.
      const auto start = std::chrono::steady_clock::now();
      while (round == 1 && store.bytes_read() < read + 8000 &&
             std::chrono::steady_clock::now() - start < std::chrono::seconds(10)) {
      }
      EXPECT_GE(store.bytes_read(), read + (round == 1 ? 8000u : 0u));
    }
  }
}

TEST_F(SavedInputsOnNvmeTest, ALostWriteIsAnErrorThatNamesTheDrive) {
  const auto faults = std::make_shared<sherd::testing::Faults>([](const offload::IoRequest& request, int) {
    return sherd::testing::Fate{.error = request.write ? 5 : 0};
  });
  offload::Store store(
      options_, device_->ledger(),
      std::make_unique<sherd::testing::FaultyBackend>(offload::make_thread_backend(options_), faults));
  SavedInputsOnNvme inputs(*kernels_, store, 2);
  const Restore kept = inputs.save(value(1, 2));
  try {
    kept();
    ADD_FAILURE() << "nobody noticed";
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::io);
    EXPECT_NE(std::string(error.what()).find("activation checkpoint 0"), std::string::npos) << error.what();
  }
}

TEST_F(SavedInputsOnNvmeTest, GoOnAfterHostMemoryWasShort) {
  offload::Store store(options_, device_->ledger());
  SavedInputsOnNvme inputs(*kernels_, store, 2);
  device_->ledger().set_limit(Tier::host, device_->ledger().current(Tier::host) + 100);
  for (int i = 0; i < 5; ++i) EXPECT_THROW((void)inputs.save(value(i, 1)), Error);
  device_->ledger().set_limit(Tier::host, 0);
  const std::vector<Restore> kept{inputs.save(value(1, 1)), inputs.save(value(2, 1))};
  expect_value(kept[0], 1, 1);
  expect_value(kept[1], 2, 1);
}

}  // namespace
}  // namespace sherd::engine
