#include "tests/comm/streams/gpu_streams.h"

#include <algorithm>
#include <cstring>
#include <thread>

namespace sherd::comm::streams {
namespace {

using conformance::element;
using conformance::expect_bits;
using conformance::fill;
using conformance::reference_fold;
using conformance::reference_sum;
using conformance::with_type;
using ::testing::HasSubstr;

TEST_P(GpuTensors, GathersInTheOrderOfTheStreams) {
  on_ranks(3, [&](Rank& rank) {
    for (int round = 0; round < 3; ++round) {
      const std::int64_t n = 1000 + round;
      const Tensor shard = rank.on_gpu(n, DType::f32), full = rank.on_gpu(3 * n, DType::f32);
      rank.produce<float>(shard, round);
      rank.comm.all_gather({{shard, full}}, options("weights")).wait();
      rank.overwrite(shard);
      expect_bits<float>(
          rank.seen(full),
          [&](std::int64_t i) { return element<float>(static_cast<int>(i / n), i % n, round); }, "gathered");
    }
  });
}

TEST_P(GpuTensors, ReducesToTheBitsOfTheProcessor) {
  on_ranks(4, [&](Rank& rank) {
    const std::int64_t n = 4099, begin = 100, end = 4001;
    for (const DType out : {DType::f32, DType::bf16})
      for (const DType rounding : {DType::bf16, DType::f16}) {
        const Tensor full = rank.on_gpu(4 * n, DType::bf16), shard = rank.on_gpu(n, out);
        const Tensor begun = rank.on_gpu(n, DType::f32);
        rank.produce<bf16>(full), rank.produce<float>(begun, 5);
        rank.gpu->zero(shard.raw(), shard.bytes());
        rank.comm.reduce_scatter({{full, shard, begin, end, begun}}, rounding, options("gradients")).wait();
        rank.comm.reduce_scatter({{full, shard, begin, end, shard}}, rounding, options("gradients")).wait();
        rank.overwrite(full);
        const Tensor got = rank.seen(shard);
        with_type(out, [&]<class T>() {
          expect_bits<T>(
              got,
              [&](std::int64_t i) {
                if (i < begin || i >= end) return T(0.0f);
                const std::int64_t at = rank.comm.rank() * n + i;
                const float onto = element<float>(rank.comm.rank(), i, 5);
                if constexpr (std::is_integral_v<T>) {
                  return T{};
                } else {
                  const auto once = static_cast<float>(T(reference_fold<bf16>(4, at, rounding, &onto)));
                  return T(reference_fold<bf16>(4, at, rounding, &once));
                }
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
              rank.seen(x), [&](std::int64_t i) { return T(reference_sum<T>(3, i)); },
              cat(name_of(dtype), " ", n));
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
        [&](std::int64_t i) {
          return element<float>(static_cast<int>(i / 10), rank.comm.rank() * 10 + i % 10);
        },
        "all_to_all");
  });
}

TEST_P(GpuTensors, TensorsOfTheHostAreReadyForTheProcessor) {
  for (const int ranks : {1, 2})  // lazy devices copy each other's memory at once
    on_ranks(ranks, [&](Rank& rank) {
      // A shard in page-locked memory, gathered onto the card, may be written as soon as wait() returns.
      const Tensor shard = rank.pinned(500, DType::f32), full = rank.on_gpu(500 * ranks, DType::f32);
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
          x, [&](std::int64_t i) { return reference_sum<float>(ranks, i); }, "on the host");
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
        [&](std::int64_t i) { return std::max(element<float>(first, i), element<float>(first + 2, i)); },
        "max");

    const Tensor mine = rank.on_gpu(5000, DType::f32), theirs = rank.on_gpu(5000, DType::f32);
    rank.produce<float>(mine, 7);
    const int next = (rank.comm.rank() + 1) % 4, before = (rank.comm.rank() + 3) % 4;
    CallOptions sending = options("ring");
    sending.async = true;
    Work sent = rank.comm.send(mine, next, sending);
    rank.overwrite(theirs);  // by a kernel before the call, however late it runs
    Work received = rank.comm.receive(theirs, before, sending);
    while (!received.done()) std::this_thread::yield();
    received.wait();
    sent.wait();
    rank.overwrite(mine);
    expect_bits<float>(
        rank.seen(theirs), [&](std::int64_t i) { return element<float>(before, i, 7); }, "received");
  });
}

TEST_P(GpuTensors, TransfersOfTheHostAwaitTheComputeStream) {
  on_ranks(2, [&](Rank& rank) {
    const int other = 1 - rank.comm.rank();
    const Tensor made = rank.on_gpu(300, DType::f32), kept = rank.on_gpu(300, DType::f32);
    const Tensor out = rank.pinned(300, DType::f32), in = rank.pinned(300, DType::f32);
    rank.produce<float>(made);
    rank.gpu->copy(out.raw(), made.raw(), out.bytes());
    fill<float>(in, rank.comm.rank(), 9);
    rank.gpu->copy(kept.raw(), in.raw(), in.bytes());
    CallOptions sending = options("host");
    sending.async = true;
    Work sent = rank.comm.send(out, other, sending);
    rank.comm.receive(in, other, options("host")).wait();
    sent.wait();
    expect_bits<float>(
        in, [&](std::int64_t i) { return element<float>(other, i); }, "received");
    expect_bits<float>(
        rank.seen(kept), [&](std::int64_t i) { return element<float>(rank.comm.rank(), i, 9); },
        "copied before");
  });
}

TEST_P(GpuTensors, CallsThatNobodyWaitsForKeepTheirTensors) {
  on_ranks(2, [&](Rank& rank) {
    const std::int64_t n = 5000;
    {
      const Tensor x = rank.on_gpu(n, DType::f32);
      rank.gpu->submit(rank.gpu->compute_stream(), [data = x.data<float>()] { std::fill_n(data, n, 1.0f); });
      CallOptions dropped = options("dropped");
      dropped.async = true;
      rank.comm.all_reduce(x, ReduceOp::sum, 1, dropped);
    }
    rank.comm.barrier();  // the call has been queued by now
    const Tensor y = rank.on_gpu(n, DType::f32), z = rank.on_gpu(n, DType::f32);
    rank.produce<float>(y, 3), rank.produce<float>(z, 4);
    rank.comm.all_reduce(z, ReduceOp::sum, 1, options("next")).wait();
    expect_bits<float>(
        rank.seen(z), [](std::int64_t i) { return reference_sum<float>(2, i, 1, 4); }, "next");
    expect_bits<float>(
        rank.seen(y), [&](std::int64_t i) { return element<float>(rank.comm.rank(), i, 3); }, "reused");
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

}  // namespace
}  // namespace sherd::comm::streams
