// Collectives on tensors of GPUs (streams/), for ranks that share a card and for those that can only send
// bytes of the host; and how ranks come to one of these ways. NCCL's is in nccl/.
#include <chrono>
#include <cstring>
#include <vector>

#include "base/log.h"
#include "comm/exchange/gpu/gpu_route.h"
#include "comm/local/local.h"
#include "tests/comm/emulated_reduce.h"
#include "tests/comm/lazy_gpus.h"
#include "tests/comm/streams/gpu_streams.h"
#include "tests/comm/tcp_ranks.h"

namespace sherd::comm {
namespace {

using conformance::error_of;
using sherd::testing::LazyCudaDevice;
using streams::GpuTensors;
using streams::Rank;
using streams::StreamCase;
using ::testing::HasSubstr;

/// Runs the emulated kernels in the order of the stream, as a GPU would its own.
void reduce_lazily(device::Accelerator& gpu, device::Stream& stream, const ReduceSpec& how,
                   std::span<const std::byte* const> sources, std::span<std::byte* const> outs,
                   std::int64_t count) {
  const std::vector<const std::byte*> from(sources.begin(), sources.end());
  const std::vector<std::byte*> to(outs.begin(), outs.end());
  dynamic_cast<LazyCudaDevice&>(gpu).submit(stream, [=] {
    const auto cpu = device::make_cpu_device(1);
    emulated_reduce(*cpu, how, from, to, count);
  });
}

void on_shared_card(int ranks, const std::function<void(Communicator&)>& body) {
  run_local(ranks, LocalOptions{{.timeout_seconds = 60}, reduce_lazily}, body);
}

void on_processes(int ranks, const std::function<void(Communicator&)>& body) {
  on_tcp_ranks(ranks, {.timeout_seconds = 60, .shared_memory = false}, body);
}

INSTANTIATE_TEST_SUITE_P(Streams, GpuTensors,
                         ::testing::Values(StreamCase{"SharedCard", false, on_shared_card},
                                           StreamCase{"SharedCardAsync", true, on_shared_card},
                                           StreamCase{"Staged", false, on_processes},
                                           StreamCase{"StagedAsync", true, on_processes}),
                         [](const auto& test) { return test.param.name; });

/// After a failure its caller frees the tensors.
TEST(GpuWorker, LeavesNothingUnderWayInACallThatIsAbandoned) {
  const auto gpu = std::make_shared<LazyCudaDevice>();
  EventBoard marks(1);
  const auto worker = make_gpu_worker(gpu, reduce_lazily, marks, 0);
  const Tensor from = Tensor::empty(*gpu, {100}, DType::f32), to = Tensor::empty(*gpu, {100}, DType::f32);
  conformance::fill<float>(from, 0);
  worker->begin({}, 0);
  worker->copy(to.raw(), from.raw(), to.bytes());
  ASSERT_NE(std::memcmp(to.raw(), from.raw(), to.bytes()), 0) << "the device is not lazy";
  worker->drain();
  EXPECT_EQ(std::memcmp(to.raw(), from.raw(), to.bytes()), 0);
}

TEST(GpuWorker, IsAbandonedWhereACallFailsHalfWay) {
  const auto fails_late = [](device::Accelerator& gpu, device::Stream& stream, const ReduceSpec& how,
                             std::span<const std::byte* const> sources, std::span<std::byte* const> outs,
                             std::int64_t count) {
    thread_local int calls = 0;
    if (ThreadRank::current() == 1 && ++calls > 257)
      fail(ErrorKind::io, "the GPU has gone");  // in the second round
    reduce_by_processor(gpu, stream, how, sources, outs, count);
  };
  const auto start = std::chrono::steady_clock::now();
  EXPECT_THAT(
      error_of(ErrorKind::io,
               [&] {
                 run_local(2, LocalOptions{{.timeout_seconds = 60}, fails_late}, [](Communicator& comm) {
                   Rank rank(comm);
                   std::vector<ReducePiece> pieces;
                   for (int k = 0; k < 300; ++k) {
                     pieces.push_back({rank.on_gpu(8, DType::f32), rank.on_gpu(4, DType::f32), 0, 4});
                     conformance::fill<float>(pieces.back().full, comm.rank(), k);
                   }
                   EXPECT_THROW(comm.reduce_scatter(pieces, DType::f32), Error);
                   conformance::expect_bits<float>(
                       pieces[255].shard,
                       [&](std::int64_t i) {
                         return conformance::reference_sum<float>(2, 4 * comm.rank() + i, 1, 255);
                       },
                       "of the first round, without a wait");
                   fail(ErrorKind::io, "the GPU has gone");
                 });
               }),
      HasSubstr("the GPU has gone"));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30))
      << "the other rank heard of it only at its deadline";
}

TEST(Bind, RefusesRanksWithoutAGpuAmongOthers) {
  EXPECT_THAT(error_of(ErrorKind::io,
                       [] {
                         run_local(2, CommOptions{}, [](Communicator& comm) {
                           if (comm.rank() == 0)
                             comm.bind(std::make_shared<LazyCudaDevice>());
                           else
                             comm.bind(device::make_cpu_device(1));
                         });
                       }),
              ::testing::AllOf(HasSubstr("rank 1 has no GPU"), HasSubstr("device.type")));
}

TEST(Bind, NamesGpuMemoryInMismatches) {
  EXPECT_THAT(error_of(ErrorKind::comm,
                       [] {
                         on_shared_card(2, [](Communicator& comm) {
                           Rank rank(comm);
                           const Tensor x =
                               rank.comm.rank() ? rank.on_gpu(8, DType::f32) : rank.pinned(8, DType::f32);
                           rank.comm.all_reduce(x, ReduceOp::sum, 1, {.label = "loss"});
                         });
                       }),
              ::testing::AllOf(HasSubstr("mismatched calls"),
                               HasSubstr("rank 1 called all_reduce (sum) of 8 fp32 on a GPU")));
}

// ---- the plan ----

GpuCard card(std::uint64_t id, int rank = 0, bool nccl = true) {
  return {true, nccl, id, rank};
}

TEST(GpuPlan, TakesTheFastestWayThatAllRanksHave) {
  EXPECT_EQ(plan_gpu_traffic({{}, {}}, false).traffic, GpuTraffic::none);
  EXPECT_EQ(plan_gpu_traffic({card(0, 0, false)}, true).traffic, GpuTraffic::shared_card);
  EXPECT_EQ(plan_gpu_traffic({card(7), card(7)}, true).traffic, GpuTraffic::shared_card);
  EXPECT_EQ(plan_gpu_traffic({card(7), card(8), card(9)}, false).traffic, GpuTraffic::nccl);
  EXPECT_EQ(plan_gpu_traffic({card(7), card(8)}, true).traffic, GpuTraffic::nccl);
}

TEST(GpuPlan, SaysWhyTensorsAreStaged) {
  const GpuPlan shared = plan_gpu_traffic({card(1), card(2, 3), card(1, 5), card(2, 7)}, false);
  EXPECT_EQ(shared.traffic, GpuTraffic::staged);
  EXPECT_THAT(shared.why, HasSubstr("ranks 5, 7 share a GPU"));
  const GpuPlan bare = plan_gpu_traffic({card(1), card(2, 4, false)}, false);
  EXPECT_EQ(bare.traffic, GpuTraffic::staged);
  EXPECT_THAT(bare.why, HasSubstr("NCCL cannot be used on rank 4"));
}

}  // namespace
}  // namespace sherd::comm
