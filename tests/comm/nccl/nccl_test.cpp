// NCCL's communicator and route (src/comm/nccl) on lazy GPUs over a library that stands for NCCL
// (fake_nccl.cpp): the conformance suite, the order of streams, and what becomes of ranks that fail, hang or
// call different things.
#include <nccl.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <thread>

#include "comm/cuda/reduce.h"
#include "comm/nccl/nccl_comm.h"
#include "comm/nccl/nccl_route.h"
#include "tests/comm/lazy_gpus.h"
#include "tests/comm/nccl/fake_nccl.h"
#include "tests/comm/streams/gpu_streams.h"
#include "tests/comm/tcp_ranks.h"

namespace sherd::comm {

// In the place of the room's own, which ask a driver.

std::uint64_t nccl_card(device::Accelerator& gpu) {
  return reinterpret_cast<std::uintptr_t>(&gpu);  // each rank has a card of its own
}
void reduce_on_gpu(device::Accelerator& gpu, device::Stream& stream, const ReduceSpec& how,
                   std::span<const std::byte* const> sources, std::span<std::byte* const> outs,
                   std::int64_t count) {
  reduce_by_processor(gpu, stream, how, sources, outs, count);
}

namespace conformance {
namespace {

Case nccl(int ranks, bool shared_memory) {
  Case out;
  out.name = cat(shared_memory ? "windows" : "messages", ranks);
  out.ranks = ranks;
  out.queues = true;
  out.options.timeout_seconds = 60;
  out.options.shared_memory = out.one_machine = shared_memory;
  out.device = [](Communicator&) { return std::make_shared<sherd::testing::LazyCudaDevice>(); };
  out.run = [ranks](const CommOptions& options, const std::function<void(Communicator&)>& body) {
    on_tcp_ranks(ranks, options, body);
  };
  return out;
}

INSTANTIATE_TEST_SUITE_P(Nccl, Conformance,
                         ::testing::Values(nccl(1, true), nccl(2, true), nccl(3, true), nccl(4, true),
                                           nccl(2, false), nccl(3, false)),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace conformance

namespace streams {
namespace {

void over_nccl(int ranks, const std::function<void(Communicator&)>& body) {
  on_tcp_ranks(ranks, {.timeout_seconds = 60}, body);
}

INSTANTIATE_TEST_SUITE_P(Nccl, GpuTensors,
                         ::testing::Values(StreamCase{"Sync", false, over_nccl},
                                           StreamCase{"Async", true, over_nccl}),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace streams

namespace {

using conformance::error_of;
using conformance::expect_bits;
using conformance::reference_sum;
using streams::Rank;
using ::testing::AllOf;
using ::testing::HasSubstr;

void on_ranks(int ranks, double timeout, const std::function<void(Rank&)>& body) {
  fake_nccl::take_counts();
  on_tcp_ranks(ranks, {.timeout_seconds = timeout}, [&](Communicator& comm) {
    Rank rank(comm);
    body(rank);
  });
}

/// More than the parts' memory takes at a time, so that it travels in several pieces.
TEST(Nccl, SumsLongTensorsInPieces) {
  on_ranks(2, 60, [](Rank& rank) {
    const std::int64_t n = (std::int64_t{64} << 20) / 4 + 4321;
    const Tensor x = rank.on_gpu(n, DType::f32);
    rank.produce<float>(x);
    rank.comm.all_reduce(x).wait();
    expect_bits<float>(
        rank.seen(x), [](std::int64_t i) { return reference_sum<float>(2, i); }, "long");
  });
}

TEST(Nccl, RecordsACallAsDoneWhenTheGpuIs) {
  on_ranks(2, 60, [](Rank& rank) {
    const Tensor x = rank.on_gpu(1000, DType::f32);
    rank.produce<float>(x);
    rank.comm.all_reduce(x, ReduceOp::sum, 1, {.label = "sum"}).wait();
    const auto state = [&] {
      for (const RecordedCall& call : rank.comm.flight_recorder()->record().calls)
        if (call.label == "sum") return call.state;
      return CallState::failed;
    };
    EXPECT_EQ(state(), CallState::under_way) << "the GPU has not begun";
    rank.seen(x);
    for (const auto patience = Deadline::after_seconds(30); !patience.passed() && state() != CallState::done;)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_EQ(state(), CallState::done);
  });
}

TEST(Nccl, SumsItselfOnlyWhereToldTo) {
  for (const Reduction reduction : {Reduction::ordered, Reduction::native}) {
    fake_nccl::take_counts();
    on_ranks(3, 60, [&](Rank& rank) {
      const Tensor x = rank.on_gpu(300, DType::bf16), shard = rank.on_gpu(100, DType::f32);
      rank.produce<bf16>(x);
      CallOptions options;
      options.reduction = reduction;
      rank.comm.reduce_scatter({{x, shard, 0, 100}}, DType::bf16, options).wait();
      rank.comm.all_reduce(x, ReduceOp::sum, 1, options).wait();
      rank.gpu->synchronize();
    });
    EXPECT_EQ(fake_nccl::take_counts().sums, reduction == Reduction::native ? 6 : 0);
  }
}

TEST(Nccl, LeavesInOrderAfterCallsThatTheGpuIsStillInTheMiddleOf) {
  on_ranks(3, 60, [](Rank& rank) {
    const Tensor x = rank.on_gpu(1000, DType::f32);
    rank.produce<float>(x);
    rank.comm.all_reduce(x);
    const auto part = rank.comm.split(0, 0);
    part->all_reduce(x);
  });
  const auto counts = fake_nccl::take_counts();
  EXPECT_EQ(counts.made, 6);
  EXPECT_EQ(counts.destroyed, 6);
  EXPECT_EQ(counts.aborted, 0);
}

/// Not only that rank, whose peers would wait for it.
TEST(Nccl, ARankThatCannotLoadTheLibraryTellsAll) {
  on_tcp_ranks(3, {.timeout_seconds = 60}, [](Communicator& comm) {
    fake_nccl::remove(comm.rank() == 2);
    EXPECT_THAT(error_of(ErrorKind::comm, [&] { Rank rank(comm); }),
                AllOf(HasSubstr("rank 2"), HasSubstr("NCCL cannot be loaded")));
    fake_nccl::remove(false);
  });
}

/// NCCL would wait for a peer that does not come any more.
TEST(Nccl, LeavesAFailedGroupWithoutItsPeers) {
  on_ranks(2, 60, [](Rank& rank) {
    const Tensor x = rank.on_gpu(1000, DType::f32);
    rank.produce<float>(x);
    rank.comm.all_reduce(x);
    rank.gpu->synchronize();
    rank.comm.barrier();
    if (rank.comm.rank() == 1) return rank.comm.abort("a bad token");
    EXPECT_THAT(error_of(ErrorKind::comm, [&] { rank.comm.barrier(); }), HasSubstr("a bad token"));
  });
  EXPECT_EQ(fake_nccl::take_counts().aborted, 2);
}

/// A call that the host takes part in meets the other ranks there: not beside what the group's thread does.
TEST(Nccl, CallsOfTheHostWaitForThoseThatAreQueued) {
  on_ranks(3, 60, [](Rank& rank) {
    const Tensor x = rank.pinned(200'000, DType::f32), full = rank.pinned(3 * 5000, DType::f32);
    const Tensor shard = rank.on_gpu(5000, DType::f32);
    conformance::fill<float>(x, rank.comm.rank());
    rank.produce<float>(shard, 1);
    std::vector<Work> works;
    for (int k = 0; k < 3; ++k) works.push_back(rank.comm.all_reduce(x, ReduceOp::max, 1, {.async = true}));
    rank.comm.all_gather({{shard, full}}).wait();
    for (Work& work : works) work.wait();
    expect_bits<float>(
        full,
        [](std::int64_t i) { return conformance::element<float>(static_cast<int>(i / 5000), i % 5000, 1); },
        "mixed");
  });
}

TEST(Nccl, AnErrorOfTheLibraryEndsTheGroup) {
  on_ranks(2, 60, [](Rank& rank) {
    const Tensor x = rank.on_gpu(1000, DType::f32);
    rank.comm.all_reduce(x).wait();
    rank.gpu->synchronize();
    rank.comm.barrier();
    if (rank.comm.rank() == 0) fake_nccl::break_rank(1);
    const auto said = error_of(ErrorKind::comm, [&] {
      for (;; std::this_thread::sleep_for(std::chrono::milliseconds(1))) {
        rank.comm.all_reduce(x, ReduceOp::sum, 1, {.label = "gradients"});
        rank.gpu->synchronize();
      }
    });
    EXPECT_THAT(said, AllOf(HasSubstr("rank 1"), HasSubstr("gradients"), HasSubstr("network error"),
                            HasSubstr("NCCL_DEBUG")));
    EXPECT_EQ(error_of(ErrorKind::comm, [&] { rank.comm.barrier(); }), said);
  });
  fake_nccl::break_rank(-1);
  const auto counts = fake_nccl::take_counts();
  EXPECT_EQ(counts.aborted, 2);
  EXPECT_EQ(counts.destroyed, 0);
}

/// The watcher of a queued call sees its error, and whoever waits for the GPU is told.
TEST(Nccl, AnErrorOfAQueuedCallReachesWhoWaitsForTheGpu) {
  on_ranks(1, 60, [](Rank& rank) {
    const Tensor x = rank.on_gpu(1000, DType::f32);
    rank.produce<float>(x);
    fake_nccl::break_rank(0);
    rank.comm.all_reduce(x, ReduceOp::sum, 1, {.label = "loss"});
    std::string said;
    for (const auto patience = Deadline::after_seconds(30); said.empty() && !patience.passed();
         std::this_thread::sleep_for(std::chrono::milliseconds(5))) {
      try {
        rank.gpu->check();
      } catch (const Error& error) {
        said = error.what();
      }
    }
    EXPECT_THAT(said, AllOf(HasSubstr("\"loss\""), HasSubstr("network error")));
    EXPECT_EQ(error_of(ErrorKind::comm, [&] { rank.gpu->synchronize(); }), said);
    EXPECT_EQ(error_of(ErrorKind::comm, [&] { rank.comm.barrier(); }), said);
  });
  fake_nccl::break_rank(-1);
}

/// The only rank of a group, whose GPU never comes to the end of a call.
struct Stuck : device::StreamQueue {
  struct Event : device::StreamEvent {
    bool reached() const override { return false; }
  };
  std::shared_ptr<const device::StreamEvent> record() override { return std::make_shared<Event>(); }
  void follow(const device::StreamEvent&) override {}
  void* native() override { return nullptr; }
  void call(const device::LibraryCall&) override {}
  void launch(const device::KernelLaunch&) override {}
};
class Alone final : public Backend {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  int world_rank(int) const override { return 5; }
  const std::string& name() const override { return name_; }
  double timeout_seconds() const override { return 0.3; }
  void run(Call&) override {}
  void start(Call&) override {}
  bool advance(Call&) override { return true; }
  void await(const std::function<bool()>&, const std::vector<Call*>&) override {}
  void wake() noexcept override {}
  device::Storage allocate(device::Device& device, std::size_t bytes, device::Category category,
                           device::Tier tier) override {
    return device.allocate(bytes, category, tier);
  }
  std::unique_ptr<Backend> split(int, int) override { return nullptr; }
  void look_after_peers() noexcept override { ++looks; }
  std::vector<int> not_announced(std::uint64_t number) override {
    return number > announced ? std::vector<int>{0} : std::vector<int>{};
  }
  void fail(const std::string& reason) noexcept override {
    std::lock_guard lock(mutex_);
    if (failure_.empty()) failure_ = reason;
  }
  std::string failure() const override {
    std::lock_guard lock(mutex_);
    return failure_;
  }
  std::uint64_t announced = 0;
  std::atomic<int> looks{0};

 private:
  std::string name_ = "alone";
  mutable std::mutex mutex_;
  std::string failure_;
};

class NcclWatch : public ::testing::TestWithParam<bool> {};

TEST_P(NcclWatch, EndsACallOfTheGpuThatDoesNotEnd) {
  fake_nccl::take_counts();
  Alone host;
  host.announced = GetParam() ? 1 : 0;
  FlightRecorder recorder;
  const auto group = recorder.add("world", "nccl", {5}, 5);
  const auto gpu = std::make_shared<sherd::testing::LazyCudaDevice>();
  {
    const auto comm = NcclComm::create(host, gpu);
    Call call;
    call.kind = Collective::barrier, call.label = "last";
    call.done = device::Stream(std::make_unique<Stuck>()).record();
    call.record = recorder.issue(*group, {.kind = call.kind, .label = call.label});
    call.record.begin();
    comm->watch(call, 1);
  }  // which waits for the call
  const RecordedCall recorded = recorder.record().calls.at(0);
  EXPECT_EQ(recorded.state, CallState::under_way) << "the GPU is in it still";
  EXPECT_EQ(recorded.missing, GetParam() ? std::vector<int>() : std::vector<int>{5});
  EXPECT_THAT(host.failure(),
              HasSubstr(GetParam() ? "did not end within 0.3 s on rank 5"
                                   : "rank 5 did not come within 0.3 s, while rank 5 waited"));
  EXPECT_THAT(host.failure(), HasSubstr("\"last\""));
  EXPECT_GT(host.looks, 0) << "nobody looked whether a peer had died";
  EXPECT_EQ(fake_nccl::take_counts().aborted, 1);
}

TEST_P(NcclWatch, EndsACallWhoseGroupHasFailed) {
  Alone host;
  const auto gpu = std::make_shared<sherd::testing::LazyCudaDevice>();
  const auto comm = NcclComm::create(host, gpu);
  Call call;
  call.kind = Collective::barrier;
  call.ready = call.done = device::Stream(std::make_unique<Stuck>()).record();  // no deadline runs yet
  comm->watch(call, 1);
  fake_nccl::take_counts();
  host.fail("a bad token");
  for (const auto patience = Deadline::after_seconds(30); !patience.passed();
       std::this_thread::sleep_for(std::chrono::milliseconds(5)))
    if (fake_nccl::Counts seen = fake_nccl::take_counts(); seen.aborted) return;
  ADD_FAILURE() << "the GPU would hang";
}

/// While the library sets up what a call needs, its thread waits itself.
TEST(Nccl, LooksAfterPeersWhileTheLibrarySetsUp) {
  Alone host;
  host.announced = 1;
  const auto gpu = std::make_shared<sherd::testing::LazyCudaDevice>();
  const auto comm = NcclComm::create(host, gpu);
  device::Stream stream = gpu->make_stream(true);
  Call call;
  call.kind = Collective::barrier;
  std::byte byte{};
  fake_nccl::hang(true);
  const auto said = error_of(ErrorKind::comm, [&] {
    comm->submit(call, 1, [&](ncclComm_t on) {
      ncclBroadcast(&byte, &byte, 1, ncclInt8, 0, on, static_cast<cudaStream_t>(stream.native()));
    });
  });
  fake_nccl::hang(false);
  EXPECT_THAT(said, HasSubstr("did not end within 0.3 s"));
  EXPECT_GT(host.looks, 0);
}

INSTANTIATE_TEST_SUITE_P(RanksThatCame, NcclWatch, ::testing::Bool());

/// All ranks have come, and yet nothing ends: a GPU or a link is at fault.
TEST(Nccl, ACallThatHangsIsToldFromARankThatIsMissing) {
  on_ranks(2, 3, [](Rank& rank) {  // also for all to meet, on a busy machine
    const Tensor x = rank.on_gpu(1000, DType::f32);
    rank.comm.barrier();  // all have set their groups up
    fake_nccl::hang(true);
    const auto start = std::chrono::steady_clock::now();
    const auto said =
        error_of(ErrorKind::comm, [&] { rank.comm.all_reduce(x, ReduceOp::sum, 1, {.label = "loss"}); });
    EXPECT_THAT(said, AllOf(HasSubstr("\"loss\""), HasSubstr("did not end within 3 s"),
                            HasSubstr("have come to it")));
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
  });
  fake_nccl::hang(false);
}

/// The NCCL of the tests keeps ranks in step, so they are no further apart here than one call.
TEST(Nccl, NamesTheFirstCallThatDiffers) {
  for (const bool shared_memory : {true, false})
    on_tcp_ranks(3, {.timeout_seconds = 30, .shared_memory = shared_memory}, [](Communicator& comm) {
      Rank rank(comm);
      const Tensor x = rank.on_gpu(64, DType::f32);
      const auto said = error_of(ErrorKind::comm, [&] {
        for (int k = 0; k < 20; ++k) {
          const bool odd = k == 17 && comm.rank() == 2;
          comm.all_reduce(odd ? x.range(0, 63) : x, ReduceOp::sum, 1, {.label = cat("bucket ", k)});
        }
        rank.gpu->synchronize();
        comm.barrier();
      });
      EXPECT_THAT(said, AllOf(HasSubstr("mismatched calls"),
                              HasSubstr("rank 2 called all_reduce (sum) of 63 fp32 on a GPU"),
                              HasSubstr("of 64 fp32 on a GPU \"bucket 17\"")));
    });
}

/// A call of which one rank alone has a tensor in the host's memory travels another way.
TEST(Nccl, NamesCallsThatTravelDifferentWays) {
  on_ranks(2, 30, [](Rank& rank) {
    const Tensor full = rank.comm.rank() ? rank.on_gpu(20, DType::f32) : rank.pinned(20, DType::f32);
    const Tensor shard = rank.on_gpu(10, DType::f32);
    const auto said = error_of(ErrorKind::comm, [&] {
      rank.comm.barrier();  // all have left earlier calls, which a failure would end as well
      rank.comm.all_gather({{shard, full}});
      rank.gpu->synchronize();
      rank.comm.barrier();
    });
    EXPECT_THAT(said, AllOf(HasSubstr("mismatched calls"), HasSubstr("through the host")));
  });
}

}  // namespace
}  // namespace sherd::comm
