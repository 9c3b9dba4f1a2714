#include "tensor/cuda/cudnn/attention_graph.h"

#include <cudnn_graph.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "support/full_suite.h"
#include "tensor/cuda/cudnn/cudnn_functions.h"
#include "tensor/cuda/cudnn/plan_cache.h"
#include "tensor/cuda/workspace.h"

namespace sherd::tensor::SHERD_CUDA::cudnn {
namespace {

/// GPUs as cuDNN describes them to itself (CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION).
std::string description(const std::string& name, int version, int processors, int shared, int cache,
                        std::int64_t memory) {
  return cat(
      R"({"maxGridSize":[2147483647,65535,65535],"maxBlockSize":[1024,1024,64],"regsPerBlock":65536,)",
      R"("multiProcessorCount":)", processors, R"(,"warpSize":32,"maxSharedMemoryPerBlock":49152,)",
      R"("maxSharedMemoryPerBlockOptin":)", shared, R"(,"reservedSharedMemoryPerBlock":1024,)",
      R"("maxRegistersPerSM":65536,"maxCtasPerSM":32,"maxThreadsPerBlock":1024,"maxThreadsPerSM":2048,)",
      R"("pciDeviceId":0,"isTccDriver":0,"supportCoopLaunch":1,"smClockRateKHz":1500000,)",
      R"("memClockRateKHz":2000000,"l2CacheSize":)", cache, R"(,"deviceName":")", name, R"(","deviceVer":)",
      version, R"(,"driverVer":13000,"cudaDeviceId":0,"totalGlobalMem":)", memory, "}");
}
const std::string a100 = description("NVIDIA A100", 800, 108, 166912, 41943040, 42949672960);
const std::string h200 = description("NVIDIA H200", 900, 132, 232448, 62914560, 150754934784);

struct Found {
  int planned = 0;  ///< configurations that cuDNN compiled, up to loading them where there is no driver
  bool no_driver = false;      ///< not even a stub of one
  std::int64_t workspace = 0;  ///< bytes that the first configuration wants
};

Found plan(const OperationGraph& graph, const std::string& gpu) {
  Descriptor device(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR);
  device.set(CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR,
             static_cast<std::int64_t>(gpu.size()), gpu.data());
  device.finalize();
  std::vector<cudnnBackendDescriptor_t> operations;
  for (const Descriptor& operation : graph.operations()) operations.push_back(operation.raw());
  Descriptor whole(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
  whole.set(CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR,
            static_cast<std::int64_t>(operations.size()), operations.data());
  whole.finalize();
  Descriptor heuristic(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
  heuristic.set(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, whole);
  heuristic.set(CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, CUDNN_HEUR_MODE_A);
  heuristic.set(CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, device);
  heuristic.finalize();
  Descriptor configuration(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
  cudnnBackendDescriptor_t raw = configuration.raw();
  std::int64_t count = 0;
  check(cudnnBackendGetAttribute(heuristic.raw(), CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                 CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &count, &raw),
        "name its proposals");
  char said[4096] = "";
  cudnnGetLastErrorString(said, sizeof said);
  Found found;
  found.no_driver = count == 0 && std::string(said).find("libcuda == nullptr") != std::string::npos;
  if (count == 0) return found;
  check(cudnnBackendGetAttribute(configuration.raw(), CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE, CUDNN_TYPE_INT64,
                                 1, &count, &found.workspace),
        "tell its workspace");
  Descriptor made(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
  made.set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, configuration);
  made.set(CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP, device);
  const cudnnStatus_t status = cudnnBackendFinalize(made.raw());
  found.planned += status == CUDNN_STATUS_SUCCESS || status == CUDNN_STATUS_EXECUTION_FAILED_CUDA_DRIVER;
  return found;
}

struct Heads {
  std::int64_t batch, seq, heads, kv_heads, dim;
};

class AttentionGraph : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Gpu, AttentionGraph, ::testing::Bool(),
                         [](const auto& test) { return test.param ? "H200" : "A100"; });

TEST_P(AttentionGraph, IsOneThatCudnnRecognisesAndCompiles) {
  if (cudnnGetVersion() < 90800)
    GTEST_SKIP() << "cuDNN " << cudnnGetVersion() << " plans for present GPUs only";
  int shape = 0;
  for (const Heads& h : {Heads{2, 1024, 8, 8, 64}, Heads{2, 1024, 8, 2, 128}, Heads{1, 1024, 8, 2, 128},
                         Heads{4, 512, 4, 1, 64}, Heads{1, 1000, 2, 2, 80}}) {
    // In part the repeatable backward of each shape on each GPU, its other graphs on one.
    const bool forward = test::full_suite() || (++shape + GetParam()) % 2 == 0,
               fast = test::full_suite() || !forward;
    for (const bool causal : {true, false}) {
      // Compiling takes seconds: each shape once on each GPU, causal on one of them, unless all is asked for.
      if (!test::full_suite() && causal != ((h.seq + h.dim + GetParam()) % 2 == 0)) continue;
      AttentionExtents e;
      e.batch = h.batch, e.seq = h.seq, e.heads = h.heads, e.kv_heads = h.kv_heads, e.dim = h.dim;
      const GraphSlice slice = slice_of(e, regroups(e) && h.batch > 1);
      const std::string& gpu = GetParam() ? h200 : a100;
      std::int64_t workspace = 0;
      // A dry run charges this for it (workspace.h).
      const auto booked = [&](bool repeatable) {
        return static_cast<std::int64_t>(cudnn_backward_workspace(slice.batch, slice.heads, slice.kv_heads,
                                                                  slice.seq, slice.dim, repeatable));
      };
      const auto expect_planned = [&](const OperationGraph& graph, const char* what) {
        const Found found = plan(graph, gpu);
        if (found.no_driver)
          GTEST_SKIP() << "cuDNN compiles nothing without libcuda.so.1, be it the toolkit's stub";
        workspace = found.workspace;
        EXPECT_GT(found.planned, 0) << what << ", heads " << h.heads << "/" << h.kv_heads << " of " << h.dim
                                    << ", causal " << causal;
      };
      for (const cudnnDataType_t type : {CUDNN_DATA_BFLOAT16, CUDNN_DATA_HALF}) {
        if (!forward) break;
        // In part each shape in one type, and each type on each GPU.
        if (!test::full_suite() && (type == CUDNN_DATA_HALF) != (h.dim == 128)) continue;
        expect_planned(forward_graph(slice, type, causal), "forward");
      }
      if (forward) {
        EXPECT_LE(workspace, 256) << "forward";
      }
      expect_planned(backward_graph(slice, CUDNN_DATA_BFLOAT16, causal, true), "repeatable backward");
      EXPECT_LE(workspace, booked(true)) << "heads " << h.heads << "/" << h.kv_heads << " of " << h.dim;
      EXPECT_GE(workspace, booked(true) - 256) << "heads " << h.heads << "/" << h.kv_heads << " of " << h.dim;
      if (fast) {
        expect_planned(backward_graph(slice, CUDNN_DATA_BFLOAT16, causal, false), "fast backward");
        EXPECT_LE(workspace, booked(false))
            << "fast, heads " << h.heads << "/" << h.kv_heads << " of " << h.dim;
      }
      if (IsSkipped()) return;
    }
  }
}

TEST(AttentionSlice, KnowsWhetherItsSuccessorsAreAligned) {
  AttentionExtents e;
  e.dim = 8, e.batch = 4;
  int aligned = 0, odd = 0;
  for (const std::int64_t seq : {3, 4, 6, 7})
    for (const std::int64_t heads : {1, 2, 4, 6})
      for (const std::int64_t kv_heads : {heads, (heads + 1) / 2})
        for (const std::int64_t part : {4, 2}) {
          e.seq = seq, e.heads = heads, e.kv_heads = kv_heads;
          if (heads % kv_heads != 0) continue;
          GraphSlice slice = slice_of(e, false);
          slice.batch = std::min(slice.batch, part);
          bool all = true;  // lse has four bytes per row of a head
          for (std::int64_t row = 0; row < e.batch * heads * seq; row += slice.batch * slice.heads * seq)
            all = all && row % 4 == 0;
          const bool said = stays_aligned(e, slice);
          EXPECT_TRUE(all || !said) << heads << "/" << kv_heads << " x " << seq;
          said ? ++aligned : ++odd;
        }
  EXPECT_GT(aligned, 0);
  EXPECT_GT(odd, 0);
}

TEST(AttentionSlice, HasOneStrideFromQueryHeadToQueryHead) {
  AttentionExtents e;
  e.batch = 3, e.seq = 100, e.heads = 6, e.kv_heads = 2, e.dim = 16;
  const GraphSlice grouped = slice_of(e, false);
  EXPECT_EQ(grouped.batch, 2);
  EXPECT_EQ(grouped.heads, 3);
  EXPECT_EQ(grouped.kv_heads, 1);
  for (std::int64_t g = 0; g < 2; ++g)
    for (std::int64_t r = 0; r < 3; ++r)
      EXPECT_EQ(g * grouped.batch_stride + r * grouped.head_stride, e.query_col(g, r));
  EXPECT_EQ(grouped.batch_stride, e.key_col(1) - e.key_col(0));
  EXPECT_EQ(grouped.out_batch_stride, 3 * 16);
  const GraphSlice by_kind = slice_of(e, true);
  EXPECT_EQ(by_kind.batch, 3);
  EXPECT_EQ(by_kind.heads, 6);
  EXPECT_EQ(by_kind.kv_heads, 2);
  EXPECT_EQ(by_kind.head_stride, 16);
  EXPECT_EQ(by_kind.kv_stride, 16);
  EXPECT_EQ(by_kind.batch_stride, 100 * e.width());
  e.kv_heads = 6;
  const GraphSlice whole = slice_of(e, false);
  EXPECT_EQ(whole.batch, 3);
  EXPECT_EQ(whole.batch_stride, 100 * e.width());
  for (std::int64_t h = 0; h < 6; ++h) {
    EXPECT_EQ(h * whole.head_stride, e.query_col(h, 0));
    EXPECT_EQ(h * whole.kv_stride, e.key_col(h) - e.key_col(0));
  }
}

TEST(PlanCache, MakesEachPlanOnceForAllThreads) {
  PlanCache<int, int> cache;
  std::atomic<int> made = 0, refused = 0;
  const auto find = [&](int key) {
    return cache.find(
        key,
        [&] {
          ++made;
          std::this_thread::sleep_for(std::chrono::milliseconds(20));  // others come meanwhile
          if (key < 0) fail(ErrorKind::io, "no kernel");
          return std::make_unique<int>(key);
        },
        [&](const Error&) { ++refused; });
  };
  std::vector<std::thread> threads;
  std::vector<const int*> found(8);
  for (std::size_t i = 0; i < found.size(); ++i) threads.emplace_back([&, i] { found[i] = find(7); });
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(made, 1);
  ASSERT_NE(found[0], nullptr);
  EXPECT_EQ(*found[0], 7);
  for (const int* each : found) EXPECT_EQ(each, found[0]);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(find(-1), nullptr);
  EXPECT_EQ(made, 2) << "what cannot be made is not tried again";
  EXPECT_EQ(refused, 1) << "and said once";
}

TEST(PlanCache, KeepsNoErrorOfMemory) {
  PlanCache<int, int> cache;
  bool full = true;
  const auto find = [&] {
    return cache.find(
        1,
        [&] {
          if (full) fail(ErrorKind::memory, "no room");
          return std::make_unique<int>(1);
        },
        [](const Error&) { ADD_FAILURE(); });
  };
  EXPECT_THROW(find(), Error);
  full = false;
  EXPECT_NE(find(), nullptr);
}

}  // namespace
}  // namespace sherd::tensor::SHERD_CUDA::cudnn
