// The conformance suite over processes, and what must happen when one of them dies. Every process of a
// launch, by mpirun or by launch.sh, runs this program; their tests go in step. See CMakeLists.txt for how it
// is started.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "base/deadline.h"
#include "comm/messages/port.h"
#include "comm/mpi/runtime.h"
#include "tests/comm/gpu/gpu_case.h"

namespace sherd::comm {
namespace {

/// SHERD_TEST_GPU in the environment: tensors lie on GPUs (gpu/processes_test.cpp).
bool on_gpus() {
  return std::getenv("SHERD_TEST_GPU") != nullptr;
}

}  // namespace

namespace conformance {
namespace {

/// The rank of this process, before it joins the others.
int launched_rank() {
  for (const char* name : {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK"})
    if (const char* text = std::getenv(name)) return std::atoi(text);
  return 0;
}

/// `machine`: of each rank; null for that on which it runs.
Case process_case(const char* name, bool shared_memory, int (*machine)(int rank) = nullptr) {
  Case out;
  out.name = name;
  out.ranks = launched_ranks();
  out.options.timeout_seconds = 60;
  out.options.shared_memory = shared_memory;
  out.one_machine = shared_memory && !machine;
  if (machine) out.options.machine = cat("machine ", machine(launched_rank()));
  out.run = [](const CommOptions& options, const std::function<void(Communicator&)>& body) {
    const LaunchedWorld joined = join_launched_world(options);
    body(*joined.world);
  };
  if (on_gpus()) gpu::use_gpus(out);
  return out;
}

/// The ways in which that many ranks exchange: with fewer, machines of two or of three ranks hold all.
std::vector<Case> process_cases() {
  std::vector<Case> cases{process_case("windows", true), process_case("messages", false)};
  if (launched_ranks() > 1)
    cases.push_back(process_case("interleaved", true, [](int rank) { return rank % 2; }));
  if (launched_ranks() > 2) cases.push_back(process_case("pairs", true, [](int rank) { return rank / 2; }));
  if (launched_ranks() > 3)
    cases.push_back(process_case("threeAndOne", true, [](int rank) { return rank / 3; }));
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Processes, Conformance, ::testing::ValuesIn(process_cases()),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace conformance

namespace {

using conformance::error_of;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

std::unique_ptr<Communicator> join(const CommOptions& options) {
  return join_launched_world(options).world;
}

/// Rank 1 dies by `die`; what the others do meanwhile must end long before the deadline with an error that
/// names it.
void expect_named(bool shared_memory, const std::function<void()>& die,
                  const std::function<void(Communicator&, device::Device&)>& meanwhile) {
  const auto world = join({.timeout_seconds = 60, .shared_memory = shared_memory});
  const auto device = on_gpus() ? conformance::gpu::gpu_of(world->rank()) : device::make_cpu_device(1);
  world->bind(device);
  world->barrier();
  if (world->rank() == 1) {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    die();
  }
  const auto start = std::chrono::steady_clock::now();
  const std::string text = error_of(ErrorKind::comm, [&] {
    meanwhile(*world, *device);
    device->synchronize();
  });
  EXPECT_THAT(text, AllOf(HasSubstr("rank 1"), HasSubstr("is dead")));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
  EXPECT_EQ(error_of(ErrorKind::comm, [&] { world->barrier(); }), text);
}

void leave() {
  _exit(0);
}
void get_killed() {
  raise(SIGKILL);
}
void reduce(Communicator& comm, device::Device& device, bool async) {
  const Tensor x = Tensor::zeros(device, {1 << 20}, DType::f32);
  CallOptions options;
  options.label = "gradients", options.async = async;
  comm.all_reduce(x, ReduceOp::sum, 1, options).wait();
}

TEST(Death, Exit) {
  expect_named(true, leave, [](Communicator& comm, device::Device&) { comm.barrier({.label = "epoch"}); });
}
TEST(Death, Kill) {
  expect_named(true, get_killed,
               [](Communicator& comm, device::Device& device) { reduce(comm, device, false); });
}
TEST(Death, KillAsync) {
  expect_named(true, get_killed,
               [](Communicator& comm, device::Device& device) { reduce(comm, device, true); });
}
TEST(Death, KillInSplit) {
  expect_named(true, get_killed, [](Communicator& comm, device::Device&) { comm.split(0, 0); });
}
TEST(Death, KillInPart) {
  std::unique_ptr<Communicator> part;
  const auto world = join({.timeout_seconds = 60});
  part = world->split(0, -world->rank());
  if (world->rank() == 1) get_killed();
  EXPECT_THAT(error_of(ErrorKind::comm, [&] { part->barrier(); }), HasSubstr("rank 1 is dead:"));
}
TEST(Death, KillAllocate) {
  expect_named(true, get_killed, [](Communicator& comm, device::Device& device) {
    comm.allocate(device, 100000, device::Category::communication);
  });
}
TEST(Death, KillMessages) {
  expect_named(false, get_killed,
               [](Communicator& comm, device::Device& device) { reduce(comm, device, false); });
}
TEST(Death, KillReceive) {
  expect_named(false, get_killed, [](Communicator& comm, device::Device& device) {
    const Tensor x = Tensor::zeros(device, {16}, DType::f32);
    comm.receive(x, 1);
  });
}

/// A rank whose program ends by an error tells the others why, and they it is who report it.
TEST(Death, Throw) {
  const auto world = join({.timeout_seconds = 60});
  if (world->rank() == 1) {
    world->abort("token 70000 is beyond the vocabulary");
    std::exit(7);
  }
  EXPECT_THAT(error_of(ErrorKind::comm, [&] { world->barrier(); }),
              AllOf(HasSubstr("rank 1 failed"), HasSubstr("70000")));
}

/// exit() in the middle of things, groups alive: the others hear of it at once, and end without waiting for
/// it.
TEST(Death, ExitWithGroups) {
  const auto world = join({.timeout_seconds = 60});
  const auto part = world->split(0, world->rank());
  if (world->rank() == 1) std::exit(5);
  const auto start = std::chrono::steady_clock::now();
  EXPECT_THAT(error_of(ErrorKind::comm, [&] { part->barrier(); }),
              AnyOf(HasSubstr("rank 1 has left"), HasSubstr("rank 1 is dead")));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(30));
}

/// Ranks know their places on this machine, launcher or not.
TEST(Place, IsKnown) {
  const LaunchedWorld joined = join_launched_world({.timeout_seconds = 60});
  EXPECT_EQ(joined.local_rank, joined.world->rank());
  EXPECT_EQ(joined.local_size, joined.world->size());
  EXPECT_EQ(launched_ranks(), joined.world->size());
}

/// Two machines of two ranks: by how many bytes all ranks together send between them, for each rank's shard
/// of `shard` bytes.
TEST(Processes, OneCopyCrossesToEachMachine) {
  if (launched_ranks() != 4 || on_gpus()) GTEST_SKIP() << "for four ranks with tensors of the host";
  CommOptions options{.timeout_seconds = 60};
  options.machine = cat("machine ", conformance::launched_rank() / 2);
  const auto world = join(options);
  const auto device = device::make_cpu_device(1);
  const std::int64_t n = 30011;
  const Tensor shard = Tensor::zeros(*device, {n}, DType::f32),
               full = Tensor::zeros(*device, {4 * n}, DType::f32),
               half = Tensor::zeros(*device, {4 * n}, DType::bf16),
               other = Tensor::zeros(*device, {4 * n}, DType::f32);
  const auto crossing = [&](const std::function<void()>& call) {
    world->reset_traffic();
    call();
    const Tensor sum = Tensor::zeros(*device, {1}, DType::i64);
    sum.data<std::int64_t>()[0] = static_cast<std::int64_t>(world->traffic().between_machines);
    world->all_reduce(sum).wait();
    return sum.data<std::int64_t>()[0];
  };
  const std::int64_t bytes = 4 * n;  // of a shard
  EXPECT_EQ(crossing([&] {
              world->all_gather({{shard, full}});
            }),
            4 * bytes)
      << "every shard once, not twice";
  EXPECT_EQ(crossing([&] { world->broadcast(full, 1); }), 4 * bytes) << "once";
  EXPECT_EQ(crossing([&] { world->all_to_all(full, other); }), 4 * 2 * bytes + 4 * 8 * 8)
      << "what is for the other machine, and every rank's counts";
  // To each owner of the first machine two parts, and one sum to each of the second's.
  EXPECT_EQ(crossing([&] {
              world->reduce_scatter({{full, shard, 0, n}}, DType::f32);
            }),
            (2 * 2 + 2 * 1) * bytes);
  // An owner's beginning travels ahead of it: no fewer bytes than two parts.
  EXPECT_EQ(crossing([&] {
              world->reduce_scatter({{full, shard, 0, n, shard}}, DType::f32);
            }),
            4 * 2 * bytes);
  EXPECT_EQ(crossing([&] { world->reduce_scatter({{half, shard, 0, n}}, DType::bf16); }), 4 * 2 * bytes / 2);
  // Sums, then every rank's part once more.
  EXPECT_EQ(crossing([&] { world->all_reduce(full); }), (2 * 2 + 2 * 1 + 4) * bytes);
  EXPECT_EQ(crossing([&] { world->barrier(); }), 2) << "a byte from each leader";
  EXPECT_EQ(crossing([&] {
              if (world->rank() == 0) world->send(shard, 1), world->send(shard, 2);
              if (world->rank() == 1 || world->rank() == 2) world->receive(shard, 0);
            }),
            bytes)
      << "of two transfers one stays on its machine";
}

/// The library under the messages is given its sums in requests, here several of them. They are of small
/// whole numbers, which no order changes.
TEST(Processes, NativeSumsOfSeveralRequests) {
  if (on_gpus()) GTEST_SKIP() << "for tensors of the host";
  const auto world = join({.timeout_seconds = 60, .shared_memory = false});
  const auto device = device::make_cpu_device(1);
  const std::int64_t ranks = world->size(), n = (16 << 20) / 4 / ranks + 1001, base = world->rank() * n;
  const Tensor full = Tensor::zeros(*device, {ranks * n}, DType::f32),
               shard = Tensor::zeros(*device, {n}, DType::f32);
  const auto part = [](std::int64_t rank, std::int64_t i) { return static_cast<float>((7 * i + rank) % 61); };
  const auto sum = [&](std::int64_t i) {
    float out = 0;
    for (std::int64_t r = 0; r < ranks; ++r) out += part(r, i);
    return out;
  };
  const auto onto = [](std::int64_t i) { return static_cast<float>(i % 31); };
  for (std::int64_t i = 0; i < full.numel(); ++i) full.data<float>()[i] = part(world->rank(), i);
  for (std::int64_t i = 0; i < n; ++i) shard.data<float>()[i] = onto(i);
  world->reduce_scatter({{full, shard, 5, n, shard}}, DType::f32, {.reduction = Reduction::native});
  conformance::expect_bits<float>(
      shard, [&](std::int64_t i) { return onto(i) + (i < 5 ? 0.0f : sum(base + i)); }, "reduce_scatter");
  world->all_reduce(full, ReduceOp::sum, 0.5, {.reduction = Reduction::native});
  conformance::expect_bits<float>(
      full, [&](std::int64_t i) { return 0.5f * sum(i); }, "all_reduce");
}

#ifndef SHERD_TEST_WITHOUT_MPI
/// MPI cannot take back a message that has met its receive, and writes on: then it says so. (It does where
/// ranks copy through memory that they share, by turns; comm.mpi.takeBack.)
TEST(Mpi, WritesNothingThatItSaysToHaveTakenBack) {
  const Patience patience{60, "testing"};
  const auto port = mpi::world_port(patience, "");
  ASSERT_EQ(port->size(), 2);
  constexpr std::size_t size = 8 << 20;
  constexpr int tag = 5, never = 6;
  std::vector<std::byte> memory(size, std::byte(port->rank()));
  const auto ends = [&](int request, double seconds) {
    const Deadline deadline = Deadline::after_seconds(seconds);
    bool done = false;
    while (!done && !deadline.passed()) done = port->test(request);
    return done;
  };
  if (port->rank() == 1) {
    const int sent = port->send(memory.data(), size, 0, tag);
    std::this_thread::sleep_for(std::chrono::seconds(2));  // nothing moves meanwhile
    const bool taken_back = port->from_first(0, patience) != 0;
    if (!ends(sent, taken_back ? 2 : 30)) {
      keep_for_good(std::move(memory));
      EXPECT_TRUE(taken_back) << "nobody takes it";
    }
    port->meet(patience);
    return;
  }
  std::vector<std::byte> other(size);
  const int arriving = port->receive(memory.data(), size, 1, tag),
            missing = port->receive(other.data(), size, 1, never);
  ends(arriving, 1);
  const bool taken_back = port->cancel(arriving);
  EXPECT_TRUE(port->cancel(missing)) << "nothing was sent";
  std::fill(memory.begin(), memory.end(), std::byte{2});
  port->from_first(taken_back, patience);
  port->meet(patience);
  const auto left = static_cast<std::size_t>(std::count(memory.begin(), memory.end(), std::byte{2}));
  EXPECT_TRUE(!taken_back || left == size) << size - left << " bytes were written";
}
#endif

/// A rank that never comes, though alive: nobody hangs, not even in MPI_Finalize.
TEST(Death, Stuck) {
  const auto world = join({.timeout_seconds = 3});  // also for all to come, on a busy machine
  if (world->rank() == 1) {
    std::this_thread::sleep_for(std::chrono::seconds(6));
    _exit(0);
  }
  EXPECT_THAT(error_of(ErrorKind::comm, [&] { world->barrier(); }),
              HasSubstr("rank 1 did not come within 3 s"));
}

}  // namespace
}  // namespace sherd::comm

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  const char* of_mpi = std::getenv("OMPI_COMM_WORLD_RANK");
  static const char* const rank = of_mpi ? of_mpi : std::getenv("RANK");
  if (rank && std::string(rank) != "0") {
    // One rank tells what passes; the others speak of failures only.
    class Failures : public ::testing::EmptyTestEventListener {
      void OnTestPartResult(const ::testing::TestPartResult& result) override {
        if (result.failed())
          std::printf("rank %s: %s:%d\n%s\n", rank, result.file_name() ? result.file_name() : "?",
                      result.line_number(), result.message());
      }
    };
    auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(new Failures);
  }
  const int status = RUN_ALL_TESTS();
  if (status == 0) std::printf("rank %s is well\n", rank ? rank : "0");
  std::fflush(stdout);
  return status;
}
