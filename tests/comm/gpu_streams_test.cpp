// Collectives on tensors of GPUs, on devices that do everything as late as marks allow (support/lazy_cuda.h): a mark that is
// missing between two ranks, or between a rank's compute stream and its collectives, shows as wrong numbers. Once for ranks
// that share a card, once for ranks that can only send bytes of the host.
#include <cstring>
#include <vector>

#include "comm/exchange/gpu_route.h"
#include "comm/local/local.h"
#include "support/lazy_cuda.h"
#include "tests/comm/conformance.h"
#include "tests/comm/emulated_reduce.h"
#include "tests/comm/tcp_ranks.h"

namespace sherd::comm {
namespace {

using conformance::element;
using conformance::error_of;
using conformance::expect_bits;
using conformance::fill;
using conformance::reference_sum;
using conformance::with_type;
using device::Category;
using device::Tier;
using ::testing::HasSubstr;
using sherd::testing::LazyCudaDevice;

/// What kernels would do, by the emulated ones, in the order of the stream.
void reduce_lazily(device::CudaDevice& gpu, device::Stream& stream, const Reduction& how,
                   std::span<const std::byte* const> sources, std::span<std::byte* const> outs,
                   std::int64_t count) {
  const std::vector<const std::byte*> from(sources.begin(), sources.end());
  const std::vector<std::byte*> to(outs.begin(), outs.end());
  dynamic_cast<LazyCudaDevice&>(gpu).submit(stream, [=] {
    const auto cpu = device::make_cpu_device(1);
    emulated_reduce(*cpu, how, from, to, count);
  });
}

/// One rank with its tensors on a lazy GPU.
class Rank {
 public:
  explicit Rank(Communicator& world) : comm(world), gpu(std::make_shared<LazyCudaDevice>()) { comm.bind(gpu); }

  Tensor on_gpu(std::int64_t n, DType dtype) { return Tensor::empty(*gpu, {n}, dtype); }
  Tensor pinned(std::int64_t n, DType dtype) {
    return Tensor::empty(*gpu, {n}, dtype, Category::communication, Tier::host);
  }
  /// A kernel on the compute stream that writes this rank's test data.
  template <class T>
  void produce(const Tensor& x, int salt = 0) {
    gpu->submit(gpu->compute_stream(), [x, salt, r = comm.rank()] { fill<T>(x, r, salt); });
  }
  /// What a later kernel of the compute stream sees.
  Tensor seen(const Tensor& x) {
    const Tensor out = pinned(x.numel(), x.dtype());
    gpu->copy(out.raw(), x.raw(), x.bytes());
    gpu->synchronize();
    return out;
  }
  /// What the tensor's next user on the compute stream does.
  void overwrite(const Tensor& x) {
    gpu->submit(gpu->compute_stream(), [x] { std::memset(x.raw(), 0x77, x.bytes()); });
  }

  Communicator& comm;
  std::shared_ptr<LazyCudaDevice> gpu;
};

void on_shared_card(int ranks, const std::function<void(Rank&)>& body) {
  run_local(ranks, LocalOptions{{.timeout_seconds = 60}, reduce_lazily}, [&](Communicator& comm) {
    set_flush_denormals();
    Rank rank(comm);
    body(rank);
    comm.barrier();
  });
}

void on_processes(int ranks, const std::function<void(Rank&)>& body) {
  on_tcp_ranks(ranks, {.timeout_seconds = 60, .shared_memory = false}, [&](Communicator& comm) {
    set_flush_denormals();
    Rank rank(comm);
    body(rank);
    comm.barrier();
  });
}

struct Way {
  bool shared_card, async;
};

class GpuTensors : public ::testing::TestWithParam<Way> {
 protected:
  void on_ranks(int ranks, const std::function<void(Rank&)>& body) const {
    (GetParam().shared_card ? on_shared_card : on_processes)(ranks, body);
  }
  CallOptions options(const char* label) const {
    CallOptions out;
    out.label = label, out.async = GetParam().async;
    return out;
  }
};

TEST_P(GpuTensors, GathersInTheOrderOfTheStreams) {
  on_ranks(3, [&](Rank& rank) {
    for (int round = 0; round < 3; ++round) {
      const std::int64_t n = 1000 + round;
      const Tensor shard = rank.on_gpu(n, DType::f32), full = rank.on_gpu(3 * n, DType::f32);
      rank.produce<float>(shard, round);
      rank.comm.all_gather({{shard, full}}, options("weights")).wait();
      rank.overwrite(shard);
      expect_bits<float>(
          rank.seen(full), [&](std::int64_t i) { return element<float>(static_cast<int>(i / n), i % n, round); },
          "gathered");
    }
  });
}

TEST_P(GpuTensors, ReducesToTheBitsOfTheProcessor) {
  on_ranks(4, [&](Rank& rank) {
    const std::int64_t n = 4099, begin = 100, end = 4001;
    for (const DType out : {DType::f32, DType::bf16}) {
      const Tensor full = rank.on_gpu(4 * n, DType::bf16), shard = rank.on_gpu(n, out);
      rank.produce<bf16>(full);
      rank.gpu->zero(shard.raw(), shard.bytes());
      for (int twice = 0; twice < 2; ++twice)
        rank.comm.reduce_scatter({{full, shard, begin, end, twice == 1}}, 0.25, DType::bf16, options("gradients"))
            .wait();
      rank.overwrite(full);
      const Tensor got = rank.seen(shard);
      with_type(out, [&]<class T>() {
        expect_bits<T>(
            got,
            [&](std::int64_t i) {
              if (i < begin || i >= end) return T(0.0f);
              const auto once = static_cast<float>(bf16(reference_sum<bf16>(4, rank.comm.rank() * n + i, 0.25)));
              if constexpr (std::is_integral_v<T>)
                return T{};
              else
                return T(static_cast<float>(T(once)) + once);
            },
            "reduced");
      });
    }
  });
}

TEST_P(GpuTensors, AllReducesEveryType) {
  on_ranks(3, [&](Rank& rank) {
    for (const DType dtype : conformance::dtypes())
      for (const std::int64_t n : {std::int64_t{0}, std::int64_t{1}, std::int64_t{1003}})
        with_type(dtype, [&]<class T>() {
          const Tensor x = rank.on_gpu(n, dtype);
          rank.produce<T>(x);
          rank.comm.all_reduce(x, ReduceOp::sum, 1, options("sum")).wait();
          expect_bits<T>(
              rank.seen(x), [&](std::int64_t i) { return T(reference_sum<T>(3, i)); }, cat(name_of(dtype), " ", n));
        });
  });
}

TEST_P(GpuTensors, BroadcastsAndDealsOut) {
  on_ranks(3, [&](Rank& rank) {
    const Tensor x = rank.on_gpu(777, DType::i32);
    rank.produce<std::int32_t>(x);
    rank.comm.broadcast(x, 1, options("table")).wait();
    expect_bits<std::int32_t>(
        rank.seen(x), [](std::int64_t i) { return element<std::int32_t>(1, i); }, "broadcast");

    const Tensor in = rank.on_gpu(30, DType::f32), out = rank.on_gpu(30, DType::f32);
    rank.produce<float>(in);
    rank.comm.all_to_all(in, out, {}, {}, options("tokens")).wait();
    rank.overwrite(in);
    expect_bits<float>(
        rank.seen(out),
        [&](std::int64_t i) { return element<float>(static_cast<int>(i / 10), rank.comm.rank() * 10 + i % 10); },
        "all_to_all");
  });
}

TEST_P(GpuTensors, TensorsOfTheHostAreReadyForTheProcessor) {
  on_ranks(2, [&](Rank& rank) {
    // A shard in page-locked memory, gathered onto the card, may be written as soon as wait() returns.
    const Tensor shard = rank.pinned(500, DType::f32), full = rank.on_gpu(1000, DType::f32);
    fill<float>(shard, rank.comm.rank());
    rank.comm.all_gather({{shard, full}}, options("offloaded")).wait();
    std::memset(shard.raw(), 0x11, shard.bytes());
    const auto expected = [](std::int64_t i) { return element<float>(static_cast<int>(i / 500), i % 500); };
    expect_bits<float>(rank.seen(full), expected, "from the host");

    // Host tensors alone: what the compute stream still writes is waited for.
    const Tensor x = rank.pinned(64, DType::f32), y = rank.on_gpu(64, DType::f32);
    rank.produce<float>(y);
    rank.gpu->copy(x.raw(), y.raw(), y.bytes());
    rank.comm.all_reduce(x, ReduceOp::sum, 1, options("norm")).wait();
    expect_bits<float>(
        x, [](std::int64_t i) { return reference_sum<float>(2, i); }, "on the host");
  });
}

TEST_P(GpuTensors, SplitsAndTransfers) {
  on_ranks(4, [&](Rank& rank) {
    const auto part = rank.comm.split(rank.comm.rank() % 2, 0);
    const Tensor x = rank.on_gpu(100, DType::f32);
    rank.produce<float>(x);
    part->all_reduce(x, ReduceOp::max, 1, options("part")).wait();
    const int first = rank.comm.rank() % 2;
    expect_bits<float>(
        rank.seen(x),
        [&](std::int64_t i) { return std::max(element<float>(first, i), element<float>(first + 2, i)); }, "max");

    const Tensor mine = rank.on_gpu(5000, DType::f32), theirs = rank.on_gpu(5000, DType::f32);
    rank.produce<float>(mine, 7);
    const int next = (rank.comm.rank() + 1) % 4, before = (rank.comm.rank() + 3) % 4;
    CallOptions sending = options("ring");
    sending.async = true;
    Work sent = rank.comm.send(mine, next, sending);
    rank.comm.receive(theirs, before, options("ring")).wait();
    sent.wait();
    rank.overwrite(mine);
    expect_bits<float>(
        rank.seen(theirs), [&](std::int64_t i) { return element<float>(before, i, 7); }, "received");
  });
}

TEST_P(GpuTensors, FailuresLeaveNoStreamBehind) {
  try {
    on_ranks(2, [&](Rank& rank) {
      const Tensor x = rank.on_gpu(100000, DType::f32);
      rank.produce<float>(x);
      Work work = rank.comm.all_reduce(x, ReduceOp::sum, 1, options("first"));
      if (rank.comm.rank() == 1) {
        rank.comm.abort("a bad token");
        fail(ErrorKind::data, "a bad token");
      }
      work.wait();
      rank.comm.all_reduce(x, ReduceOp::sum, 1, options("second")).wait();
    });
    ADD_FAILURE() << "the error got lost";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), HasSubstr("a bad token"));
  }
}

INSTANTIATE_TEST_SUITE_P(Streams, GpuTensors,
                         ::testing::Values(Way{true, false}, Way{true, true}, Way{false, false}, Way{false, true}),
                         [](const auto& test) {
                           return cat(test.param.shared_card ? "SharedCard" : "Staged",
                                      test.param.async ? "Async" : "");
                         });

TEST(Bind, RefusesRanksWithoutAGpuAmongOthers) {
  EXPECT_THAT(error_of(ErrorKind::config,
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
                         on_shared_card(2, [](Rank& rank) {
                           const Tensor x = rank.comm.rank() ? rank.on_gpu(8, DType::f32) : rank.pinned(8, DType::f32);
                           rank.comm.all_reduce(x, ReduceOp::sum, 1, {.label = "loss"});
                         });
                       }),
              ::testing::AllOf(HasSubstr("mismatched calls"), HasSubstr("rank 1 called all_reduce (sum) of 8 fp32 on a GPU")));
}

// ---- the plan ----

GpuCard card(std::uint64_t id, bool nccl = true) {
  return {true, nccl, id};
}

TEST(GpuPlan, TakesTheFastestWayThatAllRanksHave) {
  EXPECT_EQ(plan_gpu_traffic({{}, {}}, false).traffic, GpuTraffic::none);
  EXPECT_EQ(plan_gpu_traffic({card(0, false)}, true).traffic, GpuTraffic::shared_card);
  EXPECT_EQ(plan_gpu_traffic({card(7), card(7)}, true).traffic, GpuTraffic::shared_card);
  EXPECT_EQ(plan_gpu_traffic({card(7), card(8), card(9)}, false).traffic, GpuTraffic::nccl);
  EXPECT_EQ(plan_gpu_traffic({card(7), card(8)}, true).traffic, GpuTraffic::nccl);
}

TEST(GpuPlan, SaysWhyTensorsAreStaged) {
  const GpuPlan shared = plan_gpu_traffic({card(1), card(2), card(1), card(2)}, false);
  EXPECT_EQ(shared.traffic, GpuTraffic::staged);
  EXPECT_THAT(shared.why, HasSubstr("ranks 2, 3 share a GPU"));
  const GpuPlan bare = plan_gpu_traffic({card(1), card(2, false)}, false);
  EXPECT_EQ(bare.traffic, GpuTraffic::staged);
  EXPECT_THAT(bare.why, HasSubstr("NCCL cannot be used on rank 1"));
}

}  // namespace
}  // namespace sherd::comm
