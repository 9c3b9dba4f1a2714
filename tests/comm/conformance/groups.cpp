#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>

#include "tests/comm/conformance.h"

namespace sherd::comm::conformance {
namespace {

TEST_P(Conformance, SendAndReceiveInARing) {
  run([&](Communicator& comm) {
    if (comm.size() == 1) return;
    Tensors tensors(comm, device(comm));
    const int next = (comm.rank() + 1) % comm.size(),
              previous = (comm.rank() + comm.size() - 1) % comm.size();
    for (const std::int64_t n : {std::int64_t{0}, std::int64_t{1}, std::int64_t{1023}, std::int64_t{500009}})
      for (const bool shared : {false, true}) {
        const Tensor out = tensors.make(n, DType::f32, shared), in = tensors.make(n, DType::f32, false);
        tensors.fill<float>(out, comm.rank());
        // Everybody sends first: only asynchronous transfers may.
        Work sent = comm.send(out, next, {.label = "activations", .async = true});
        comm.receive(in, previous, {.label = "activations"}).wait();
        sent.wait();
        tensors.expect_bits<float>(
            in, [&](std::int64_t i) { return element<float>(previous, i); }, "ring");
      }
  });
}

TEST_P(Conformance, TransfersMatchInOrder) {
  run([&](Communicator& comm) {
    if (comm.size() == 1) return;
    Tensors tensors(comm, device(comm));
    const int peer = comm.rank() ^ 1;
    if (peer >= comm.size()) return;
    // More than fit a channel at a time, of mixed sizes and places; both directions at once.
    std::vector<Tensor> in, out;
    std::vector<Work> works;
    for (int k = 0; k < 40; ++k) {
      const std::int64_t n = k % 5 == 0 ? 150001 : k * 3;
      out.push_back(Tensor::empty(tensors.device(), {n}, DType::bf16)),
          in.push_back(Tensor::empty(tensors.device(), {n}, DType::bf16));
      tensors.fill<bf16>(out.back(), comm.rank(), k);
    }
    for (int k = 0; k < 40; ++k)
      works.push_back(comm.send(out[static_cast<std::size_t>(k)], peer, {.async = true}));
    for (int k = 0; k < 40; ++k)
      works.push_back(comm.receive(in[static_cast<std::size_t>(k)], peer, {.async = true}));
    for (Work& work : works) work.wait();
    for (int k = 0; k < 40; ++k) {
      EXPECT_TRUE(works[static_cast<std::size_t>(k)].done());
      tensors.expect_bits<bf16>(
          in[static_cast<std::size_t>(k)], [&](std::int64_t i) { return element<bf16>(peer, i, k); },
          cat("transfer ", k));
    }
  });
}

TEST_P(Conformance, AsynchronousCallsRunInOrder) {
  run([&](Communicator& comm) {
    Tensors tensors(comm, device(comm));
    const Tensor x = tensors.make(3000, DType::i64, true),
                 y = tensors.make(3000 * comm.size(), DType::i64, false);
    tensors.set<std::int64_t>(x, [](std::int64_t i) { return i; });
    std::vector<Work> works;
    for (int k = 0; k < 6; ++k)
      works.push_back(comm.all_reduce(x, ReduceOp::sum, 1, {.label = cat("turn ", k), .async = true}));
    // Synchronous: waits for those before it.
    comm.all_gather({{x, y}}, {.label = "after"});
    std::int64_t power = 1;
    for (int k = 0; k < 6; ++k) power *= comm.size();
    tensors.expect_bits<std::int64_t>(
        y, [&](std::int64_t i) { return i % 3000 * power; }, "order");
    for (Work& work : works) {
      EXPECT_TRUE(work.done());
      work.wait();
      work.wait();
    }
    Work nothing;
    nothing.wait();
    EXPECT_TRUE(nothing.done());
  });
}

/// Nobody leaves before the last has come. The ranks share a clock, for they are all on this machine.
TEST_P(Conformance, BarriersHoldEverybody) {
  run([&](Communicator& comm) {
    Tensors tensors(comm, device(comm));
    const Tensor x = tensors.make(1, DType::i64, false);
    const auto now = [] { return std::chrono::steady_clock::now().time_since_epoch().count(); };
    for (int late = 0; late < comm.size(); ++late) {
      if (comm.rank() == late) std::this_thread::sleep_for(std::chrono::milliseconds(20));
      tensors.set<std::int64_t>(x, [&](std::int64_t) { return now(); });
      comm.barrier({.label = "all"});
      const std::int64_t left = now();
      comm.all_reduce(x, ReduceOp::max).wait();
      EXPECT_GE(left, tensors.read(x).data<std::int64_t>()[0]) << "rank " << late << " came later";
    }
  });
}

TEST_P(Conformance, BarriersAndSumsFollowEachOther) {
  run([&](Communicator& comm) {
    Tensors tensors(comm, device(comm));
    const Tensor x = tensors.make(1, DType::i32, false);
    for (int k = 0; k < 200; ++k) {
      comm.barrier({.label = "again"});
      tensors.set<std::int32_t>(x, [&](std::int64_t) { return k * comm.rank(); });
      comm.all_reduce(x, ReduceOp::max).wait();
      ASSERT_EQ(tensors.read(x).data<std::int32_t>()[0], k * (comm.size() - 1));
    }
  });
}

TEST_P(Conformance, SplitMakesGroupsInKeyOrder) {
  run([&](Communicator& comm) {
    Tensors tensors(comm, device(comm));
    const int color = comm.rank() % 2;
    const auto part = comm.split(color, -comm.rank());
    ASSERT_NE(part, nullptr);
    const int size = (comm.size() + 1 - color) / 2;
    ASSERT_EQ(part->size(), size);
    EXPECT_EQ(part->rank(), size - 1 - comm.rank() / 2);
    // World rank of rank r of the part.
    const auto world = [&](int r) { return 2 * (size - 1 - r) + color; };
    for (const bool shared : {false, true})
      for (const std::int64_t n : {std::int64_t{5}, std::int64_t{40001}}) {
        const Tensor x = tensors.make(n, DType::f32, shared);  // the world's memory serves its parts too
        tensors.fill<float>(x, comm.rank());
        part->all_reduce(x, ReduceOp::sum, 1, {.label = "part"}).wait();
        tensors.expect_bits<float>(
            x,
            [&](std::int64_t i) {
              float sum = element<float>(world(0), i);
              for (int r = 1; r < size; ++r) sum += element<float>(world(r), i);
              return sum;
            },
            "split");
      }
    // Nested, and a rank that stays out.
    const auto lonely = part->split(part->rank() == 0 ? -1 : 3, 0);
    EXPECT_EQ(lonely == nullptr, part->rank() == 0);
    if (lonely) {
      EXPECT_EQ(lonely->size(), size - 1);
      EXPECT_EQ(lonely->rank(), part->rank() - 1);
      lonely->barrier();
      Tensors inner(*lonely, tensors.shared_device());
      const Tensor y = inner.make(10000, DType::i32, true);
      tensors.fill<std::int32_t>(y, lonely->rank());
      lonely->broadcast(y, 0).wait();
      tensors.expect_bits<std::int32_t>(
          y, [](std::int64_t i) { return element<std::int32_t>(0, i); }, "nested");
    }
    comm.barrier();
  });
}

TEST_P(Conformance, PartsAreGroupsInTheOrderGiven) {
  run([&](Communicator& comm) {
    Tensors tensors(comm, device(comm));
    // Odd ranks from the last to the first, then the even ones.
    std::vector<std::vector<int>> parts(1);
    for (int r = 0; r < comm.size(); r += 2) parts[0].push_back(r);
    if (comm.size() > 1) parts.emplace_back();
    for (int r = comm.size() - 1; r > 0; --r)
      if (r % 2) parts[1].push_back(r);
    const std::vector<int>& mine = parts[static_cast<std::size_t>(comm.rank() % 2)];
    const auto part = comm.part(parts);
    ASSERT_NE(part, nullptr);
    ASSERT_EQ(part->size(), static_cast<int>(mine.size()));
    ASSERT_EQ(mine[static_cast<std::size_t>(part->rank())], comm.rank());
    std::string members;
    for (const int r : mine) members += cat(members.empty() ? "" : ", ", r);
    if (part->size() > 1) {
      EXPECT_THAT(part->name(),
                  ::testing::HasSubstr(cat("(", mine.size(), " of ", comm.size(), ": ranks ", members, ")")));
    }
    const Tensor own = tensors.make(100, DType::i32, false),
                 all = tensors.make(100 * part->size(), DType::i32, false);
    tensors.fill<std::int32_t>(own, comm.rank());
    part->all_gather({{own, all}}).wait();
    tensors.expect_bits<std::int32_t>(
        all,
        [&](std::int64_t i) {
          return element<std::int32_t>(mine[static_cast<std::size_t>(i / 100)], i % 100);
        },
        "gathered in the part's order");

    // Nested: the part's first rank stays out.
    std::vector<int> rest;
    for (int r = part->size() - 1; r > 0; --r) rest.push_back(r);
    std::vector<std::vector<int>> others;
    if (!rest.empty()) others.push_back(rest);
    const auto nested = part->part(others);
    ASSERT_EQ(nested == nullptr, part->rank() == 0);
    if (nested) {
      EXPECT_EQ(rest[static_cast<std::size_t>(nested->rank())], part->rank());
      const Tensor x = tensors.make(7, DType::i32, false);
      tensors.fill<std::int32_t>(x, nested->rank());
      nested->broadcast(x, nested->size() - 1).wait();
      tensors.expect_bits<std::int32_t>(
          x, [&](std::int64_t i) { return element<std::int32_t>(nested->size() - 1, i); }, "nested");
    }
    comm.barrier();
  });
}

TEST_P(Conformance, PartsThatMakeNoSenseBreakNothing) {
  run([&](Communicator& comm) {
    const auto wrong = [&](const std::vector<std::vector<int>>& parts) {
      return error_of(ErrorKind::usage, [&] { comm.part(parts); });
    };
    EXPECT_THAT(wrong({{0}, {0}}), ::testing::HasSubstr("rank 0 is in two places"));
    EXPECT_THAT(wrong({{0, 0}}), ::testing::HasSubstr("rank 0 is in two places"));
    EXPECT_THAT(wrong({{0, comm.size()}}),
                ::testing::HasSubstr(cat("rank ", comm.size(), ", which is not one of")));
    EXPECT_THAT(wrong({{-1}}), ::testing::HasSubstr("rank -1"));
    EXPECT_THAT(wrong({{0}, {}}), ::testing::HasSubstr("part 1"));
    comm.barrier();
  });
}

TEST_P(Conformance, PartsThatDifferBetweenRanksAreTold) {
  if (ranks() == 1) GTEST_SKIP() << "needs a second rank";
  run([&](Communicator& comm) {
    const std::string told = error_of(ErrorKind::comm, [&] {
      comm.part(comm.rank() == 0 ? std::vector<std::vector<int>>{{0, 1}}
                                 : std::vector<std::vector<int>>{{1, 0}});
    });
    EXPECT_THAT(told,
                ::testing::AllOf(::testing::HasSubstr("parts {0, 1}"), ::testing::HasSubstr("parts {1, 0}")));
  });
}

/// Collectives of a group and of its part at the same time, from the groups' own threads.
TEST_P(Conformance, GroupsWorkSideBySide) {
  run([&](Communicator& comm) {
    Tensors tensors(comm, device(comm));
    const auto part = comm.split(comm.rank() / 2, comm.rank());
    const Tensor x = tensors.make(60000, DType::f32, true), y = tensors.make(60000, DType::f32, true);
    for (int k = 0; k < 3; ++k) {
      tensors.fill<float>(x, comm.rank()), tensors.fill<float>(y, part->rank(), 1);
      Work a = comm.all_reduce(x, ReduceOp::sum, 1, {.async = true});
      Work b = part->all_reduce(y, ReduceOp::sum, 1, {.async = true});
      b.wait(), a.wait();
      tensors.expect_bits<float>(
          x, [&](std::int64_t i) { return reference_sum<float>(comm.size(), i); }, "group");
      tensors.expect_bits<float>(
          y, [&](std::int64_t i) { return reference_sum<float>(part->size(), i, 1, 1); }, "part");
    }
  });
}

TEST_P(Conformance, MemoryIsChargedAndReused) {
  run([&](Communicator& comm) {
    auto device = device::make_cpu_device(1);
    const auto held = [&] {
      return device->ledger().current(device::Tier::device, device::Category::communication);
    };
    for (int k = 0; k < 20; ++k) {
      const device::Storage small = comm.allocate(*device, 1000, device::Category::communication);
      const device::Storage large = comm.allocate(*device, 3 << 20, device::Category::communication);
      EXPECT_EQ(held(), 1000u + (3u << 20));
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(small.data()) % 64, 0u);
      std::memset(small.data(), k, small.bytes());
      std::memset(large.data(), k, large.bytes());
    }
    EXPECT_EQ(held(), 0u);
    // Freed in another order than given, and outliving the rest.
    device::Storage kept = comm.allocate(*device, 100, device::Category::communication);
    device.reset();
    std::memset(kept.data(), 1, kept.bytes());
  });
}

TEST_P(Conformance, TrafficIsThePayloadSent) {
  run([&](Communicator& comm) {
    Tensors tensors(comm, device(comm));
    const auto n = static_cast<std::uint64_t>(comm.size());
    const Tensor x = tensors.make(840 * comm.size(), DType::f32, true),
                 shard = tensors.make(840, DType::f32, false);
    tensors.zero(x);
    tensors.zero(shard);
    const std::uint64_t bytes = x.bytes();
    comm.all_reduce(x);
    comm.all_gather({{shard, x}});
    comm.reduce_scatter({{x, shard, 0, 840}}, DType::f32, {.async = true}).wait();
    comm.reduce_scatter({{x, shard, 10, 20}}, DType::f32);
    comm.broadcast(x, 0);
    const Tensor y = tensors.make(840 * comm.size(), DType::f32, false);
    comm.all_to_all(x, y);
    comm.barrier();
    if (comm.size() > 1 && comm.rank() == 0) comm.send(shard, 1);
    if (comm.rank() == 1) comm.receive(shard, 0);
    comm.all_reduce(x.range(0, 1), ReduceOp::sum, 1, {.scalar = true});
    Traffic t = comm.traffic();
    EXPECT_EQ(t.all_reduce, 2 * bytes * (n - 1) / n);
    EXPECT_EQ(t.all_gather, bytes * (n - 1) / n);
    EXPECT_EQ(t.reduce_scatter, (bytes + 40 * n) * (n - 1) / n);
    EXPECT_EQ(t.broadcast, comm.rank() == 0 ? bytes * (n - 1) : 0);
    EXPECT_EQ(t.all_to_all, bytes * (n - 1) / n);
    EXPECT_EQ(t.p2p, n > 1 && comm.rank() == 0 ? shard.bytes() : 0);
    EXPECT_EQ(t.scalars, comm.rank() == 0 ? 4 * (n - 1) : n > 1 ? 4u : 0u);
    comm.reset_traffic();
    EXPECT_EQ(comm.traffic().all_reduce, 0u);
  });
}

}  // namespace
}  // namespace sherd::comm::conformance
