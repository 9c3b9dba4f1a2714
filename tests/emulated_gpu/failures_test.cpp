// What only an emulated GPU can do on demand: break in the middle of a step, lack pools of
// memory, refuse graphs, be one of two.
#include <gmock/gmock.h>

#include <cstdlib>

#include "emulated_gpu/card.h"
#include "support/equality.h"
#include "support/full_suite.h"
#include "support/gpu/gpu.h"
#include "support/temp_folder.h"

namespace sherd::test {
namespace {

namespace card = emulated_gpu;
using ::testing::AllOf;
using ::testing::HasSubstr;

RunSpec small() {
  RunSpec spec;
  spec.device = "cuda";
  spec.ranks = 1, spec.steps = 3, spec.stage = 2, spec.accumulation = 2, spec.layers = 2;
  return spec;
}

/// Variables of the environment while it lives.
struct Setting {
  Setting(const char* name, const char* value) : name_(name) { setenv(name, value, 1); }
  ~Setting() { unsetenv(name_); }
  const char* name_;
};

class BrokenGpu : public ::testing::Test {
 protected:
  void TearDown() override { card::mend(); }
};

/// Wherever a card fails, the run ends with an error that names it and the next step, or had its result
/// before; and so do all destructors.
TEST_F(BrokenGpu, ends_a_run_with_an_error_wherever_it_breaks) {
  sherd::testing::TempFolder folder;
  for (const char* optimizer : {"none", "cpu", "nvme"})
    for (const bool graphs : {false, true}) {
      RunSpec spec = small();
      spec.offload_optimizer = optimizer, spec.nvme_path = folder.path(), spec.graphs = graphs;
      const std::size_t before = card::works_run();
      const auto expected = train_local(spec).bits();
      const std::size_t all = card::works_run() - before;
      ASSERT_GT(all, 100u);
      int errors = 0;
      const int parts = full_suite() ? 8 : 3;
      for (int part = 0; part < parts; ++part) {
        SCOPED_TRACE(cat("optimizer on ", optimizer, ", graphs ", graphs, ", part ", part));
        card::break_after(all * static_cast<std::size_t>(part + 1) / static_cast<std::size_t>(parts + 1));
        try {
          EXPECT_TRUE(train_local(spec).bits() == expected);
        } catch (const Error& error) {
          ++errors;
          EXPECT_THAT(error.what(), AllOf(HasSubstr("cudaErrorIllegalAddress"),
                                          HasSubstr("resume from the last checkpoint")));
        }
        EXPECT_TRUE(card::broken());
        card::mend();
      }
      EXPECT_GT(errors, parts / 2);
    }
}

TEST(EmulatedGpu, is_begun_only_where_a_rank_works) {
  const Setting two("SHERD_EMULATED_GPUS", "2");
  ASSERT_FALSE(card::has_context(1)) << "this test comes first to it";
  const bool before = card::has_context(0);
  {
    const auto device = device::make_cuda_device({.ordinal = 1, .threads = 2, .timeout_seconds = 60});
    const device::Storage there = device->allocate(1 << 20, device::Category::workspace);
    device::Storage host = device->allocate(1 << 20, device::Category::workspace, device::Tier::host);
    device::Stream copies = device->make_stream();
    device->copy(there.data(), host.data(), 1 << 20);
    // Threads that never chose a card stand on the first.
    std::thread([&] {
      copies.wait(device->compute_stream().record());
      device->copy_on(copies, host.data(), there.data(), 1 << 20);
      copies.record().wait(Deadline::after_seconds(60), "a copy");
      host = {};
    }).join();
    device->synchronize();
  }
  EXPECT_TRUE(card::has_context(1));
  EXPECT_EQ(card::has_context(0), before);
}

TEST(EmulatedGpu, lets_other_cards_into_its_pool_of_memory) {
  const auto let_in = [] {
    const std::size_t before = card::counts().peers;
    const auto device = device::make_cuda_device({.ordinal = 0, .threads = 1, .timeout_seconds = 60});
    return card::counts().peers - before;
  };
  EXPECT_EQ(let_in(), 0u);
  const Setting three("SHERD_EMULATED_GPUS", "3");
  EXPECT_EQ(let_in(), 2u);
}

TEST(EmulatedGpu, without_pools_of_memory_trains_to_the_same_bits) {
  RunSpec spec = small();
  const RunResult expected = train_local(spec);
  const Setting none("SHERD_EMULATED_GPU_WITHOUT_POOLS", "1");
  for (const bool graphs : {false, true}) {
    spec.graphs = graphs;
    EXPECT_TRUE(train_local(spec).bits() == expected.bits()) << graphs;
  }
}

TEST(EmulatedGpu, that_makes_no_graphs_trains_without) {
  RunSpec spec = small();
  const RunResult expected = train_local(spec);
  const Setting none("SHERD_EMULATED_GPU_WITHOUT_GRAPHS", "1");
  spec.graphs = true;
  ::testing::internal::CaptureStderr();
  const RunResult result = train_local(spec);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              HasSubstr("device.cuda_graphs: some work runs without a graph"));
  EXPECT_TRUE(result.bits() == expected.bits());
  EXPECT_EQ(result.graphs.back().launches, 0u);
}

}  // namespace
}  // namespace sherd::test
