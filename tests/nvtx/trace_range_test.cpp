// The ranges that a profiler sees, recorded by an NVTX injection that is linked into this program.
#include "device/trace_range.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#define NVTX_NO_IMPL  // the types alone: this is the other side
#include <nvtx3/nvToolsExt.h>

#include <mutex>

#include "support/equality.h"
#include "support/temp_folder.h"

namespace {

/// Every range that was begun, as the path of ranges around it on its thread: "forward/forward h.0". A
/// profiler is the process's, and so is this.
std::mutex mutex;
std::vector<std::string> begun;                   // guarded by mutex
thread_local std::vector<std::string> under_way;  // of this thread, innermost last

int NVTX_API push(const char* message) {
  under_way.push_back(under_way.empty() ? message : under_way.back() + "/" + message);
  std::lock_guard lock(mutex);
  begun.push_back(under_way.back());
  return static_cast<int>(under_way.size()) - 1;
}

int NVTX_API pop() {
  if (under_way.empty()) return -2;
  under_way.pop_back();
  return static_cast<int>(under_way.size());
}

int NVTX_API inject(NvtxGetExportTableFunc_t get_table) {
  const auto* callbacks = static_cast<const NvtxExportTableCallbacks*>(get_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned size = 0;
  if (!callbacks || !callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE, &table, &size)) return 0;
  *table[NVTX_CBID_CORE_RangePushA] = reinterpret_cast<NvtxFunctionPointer>(push);
  *table[NVTX_CBID_CORE_RangePop] = reinterpret_cast<NvtxFunctionPointer>(pop);
  return 1;
}

std::vector<std::string> taken() {
  std::lock_guard lock(mutex);
  return std::exchange(begun, {});
}

}  // namespace

extern "C" NvtxInitializeInjectionNvtxFunc_t InitializeInjectionNvtx2_fnptr;
NvtxInitializeInjectionNvtxFunc_t InitializeInjectionNvtx2_fnptr = inject;

namespace sherd::test {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::StartsWith;

TEST(TraceRange, NestsAndIsCutOff) {
  taken();
  {
    const device::TraceRange outer("forward");
    const device::TraceRange inner("forward", "h.3");
  }
  { const device::TraceRange long_name(std::string(100, 'x'), std::string(100, 'y')); }
  EXPECT_THAT(taken(), ElementsAre("forward", "forward/forward h.3",
                                   std::string(100, 'x') + " " + std::string(26, 'y')));
  EXPECT_TRUE(under_way.empty());
}

TEST(TraceRange, NamesUnitsCollectivesAndOffloadOfTraining) {
  const sherd::testing::TempFolder folder;
  RunSpec spec;
  spec.stage = 3, spec.steps = 2, spec.offload_optimizer = "nvme", spec.nvme_path = folder.path();
  spec.offload_param = "nvme", spec.offload_param_extra = R"(, "max_in_cpu": 0)";
  taken();
  train_local(spec);
  const auto seen = taken();
  for (const char* name : {"forward/forward tokens + positions", "forward/forward blocks.0",
                           "backward/backward blocks.0", "update/update blocks.0"})
    EXPECT_THAT(seen, Contains(StartsWith(name)));
  using ::testing::HasSubstr;
  for (const char* part : {"all_gather", "reduce_scatter", "update/wait for NVMe", "read from NVMe"})
    EXPECT_THAT(seen, Contains(HasSubstr(part)));
}

}  // namespace
}  // namespace sherd::test
