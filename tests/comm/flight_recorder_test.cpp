// What a rank's recorder knows of its calls, also of those that hang, and when it tells.
#include "comm/flight_recorder.h"

#include <atomic>
#include <chrono>
#include <latch>
#include <mutex>
#include <thread>

#include "comm/process_groups.h"
#include "tests/comm/conformance.h"

namespace sherd::comm {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

Tensor numbers(device::Device& device, std::int64_t count) {
  return Tensor::of<float>(device, {count}, std::vector<float>(static_cast<std::size_t>(count), 1));
}

const RecordedCall& call_of(const FlightRecord& record, const std::string& label) {
  for (const RecordedCall& call : record.calls)
    if (call.label == label) return call;
  static const RecordedCall none;
  ADD_FAILURE() << "no call '" << label << "'";
  return none;
}

/// Looks at a record again and again until it is as `ready` wants, for at most five seconds.
template <class Ready>
FlightRecord wait_for(const FlightRecorder& recorder, const Ready& ready) {
  FlightRecord record = recorder.record();
  for (int i = 0; i < 5000 && !ready(record); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    record = recorder.record();
  }
  return record;
}

TEST(FlightRecorder, NumbersCallsByGroupAndTransfersByPair) {
  const auto host = device::make_cpu_device(1);
  std::mutex mutex;
  run_local(2, {}, [&](Communicator& world) {
    const auto half = world.split(0, 1 - world.rank());  // of the same ranks, in the other order
    half->set_purpose("data");
    const Tensor x = numbers(*host, 3), all = numbers(*host, 6);
    world.all_reduce(x, ReduceOp::sum, 1, {.label = "first"});
    half->all_gather({{x, all}}, {.label = "gathered"});
    world.all_reduce(x, ReduceOp::sum, 1, {.label = "second"});
    const int other = 1 - world.rank();
    for (const char* label : {"there", "again"}) {
      if (world.rank() == 0)
        world.send(x, other, {.label = label});
      else
        world.receive(x, other, {.label = label});
    }
    if (world.rank() == 0)
      world.receive(x, other, {.label = "back"});
    else
      world.send(x, other, {.label = "back"});
    const FlightRecord record = world.flight_recorder()->record();
    std::lock_guard lock(mutex);
    EXPECT_EQ(call_of(record, "back").sequence, 1u) << "of its pair and direction";
    EXPECT_EQ(record.rank, world.rank());
    EXPECT_EQ(record.world_size, 2);
    ASSERT_EQ(record.groups.size(), 2u);
    EXPECT_EQ(record.groups[0].id, "world");
    EXPECT_EQ(record.groups[1].id, "world.1");
    EXPECT_EQ(record.groups[1].purpose, "data");
    EXPECT_THAT(record.groups[0].ranks, ElementsAre(0, 1));
    EXPECT_THAT(record.groups[1].ranks, ElementsAre(1, 0));
    EXPECT_EQ(record.groups[0].issued, 3u) << "the split and two sums";
    EXPECT_EQ(record.groups[0].finished, 3u);
    EXPECT_EQ(record.groups[1].finished, 1u);
    EXPECT_EQ(call_of(record, "first").sequence, 2u);
    EXPECT_EQ(call_of(record, "second").sequence, 3u);
    EXPECT_EQ(call_of(record, "second").bytes, 12u);
    const RecordedCall& gathered = call_of(record, "gathered");
    EXPECT_EQ(gathered.sequence, 1u);
    EXPECT_EQ(gathered.group, 1u);
    EXPECT_EQ(gathered.bytes, 24u);
    EXPECT_EQ(gathered.kind, Collective::all_gather);
    const RecordedCall& again = call_of(record, "again");
    EXPECT_EQ(again.sequence, 2u);
    EXPECT_EQ(again.peer, other);
    EXPECT_EQ(again.kind, world.rank() == 0 ? Collective::send : Collective::receive);
    for (const RecordedCall& call : record.calls) {
      EXPECT_EQ(call.state, CallState::done) << call.label;
      EXPECT_LE(call.issued_us, call.begun_us);
      EXPECT_LE(call.begun_us, call.ended_us);
      EXPECT_GT(call.issued_us, 0);
    }
  });
}

TEST(FlightRecorder, TellsWhoIsMissingWhileACallHangs) {
  const auto host = device::make_cpu_device(1);
  std::latch seen(1);
  run_local(3, {}, [&](Communicator& world) {
    const Tensor x = numbers(*host, 4);
    if (world.rank() == 2) {
      seen.wait();
      world.all_reduce(x, ReduceOp::sum, 1, {.label = "late"});
      return;
    }
    if (world.rank() == 1) return void(world.all_reduce(x, ReduceOp::sum, 1, {.label = "late"}));
    Work work = world.all_reduce(x, ReduceOp::sum, 1, {.label = "late", .async = true});
    Work behind = world.all_reduce(numbers(*host, 1), ReduceOp::sum, 1, {.label = "behind", .async = true});
    const FlightRecord record = wait_for(*world.flight_recorder(), [](const FlightRecord& now) {
      return !now.calls.empty() && now.calls[0].missing == std::vector<int>{2};
    });
    EXPECT_EQ(call_of(record, "late").state, CallState::under_way);
    EXPECT_THAT(call_of(record, "late").missing, ElementsAre(2));
    EXPECT_EQ(call_of(record, "late").missing_count, 1);
    EXPECT_EQ(call_of(record, "late").ended_us, 0);
    EXPECT_EQ(call_of(record, "behind").state, CallState::issued);
    EXPECT_EQ(call_of(record, "behind").begun_us, 0);
    EXPECT_EQ(record.groups[0].issued, 2u);
    EXPECT_EQ(record.groups[0].finished, 0u);
    seen.count_down();
    work.wait();
    EXPECT_EQ(call_of(world.flight_recorder()->record(), "late").state, CallState::done);
    world.abort("enough");  // of the call that no other makes
    EXPECT_ANY_THROW(behind.wait());
  });
}

TEST(FlightRecorder, IsToldOnceWhereACallFails) {
  const auto host = device::make_cpu_device(1);
  std::atomic<int> told{0};
  std::mutex mutex;
  std::vector<std::string> reasons;
  std::vector<FlightRecord> records;
  EXPECT_ANY_THROW(run_local(2, {.timeout_seconds = 0.2}, [&](Communicator& world) {
    FlightRecorder& recorder = *world.flight_recorder();
    recorder.on_failure([&](const std::string& reason) {
      std::lock_guard lock(mutex);
      reasons.push_back(reason), records.push_back(recorder.record()), ++told;
    });
    const auto part = world.part({{0, 1}});
    if (world.rank() == 0) part->all_reduce(numbers(*host, 1), ReduceOp::sum, 1, {.label = "alone"});
    if (world.rank() == 1)
      while (told == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    world.barrier();
  }));
  ASSERT_GE(told, 1);
  EXPECT_LE(told, 2) << "once for each rank";
  EXPECT_THAT(reasons[0], HasSubstr("rank 1 did not come"));
  EXPECT_EQ(call_of(records[0], "alone").state, CallState::failed);
  EXPECT_THAT(call_of(records[0], "alone").missing, ElementsAre(1));
}

// ---- the ring ----

FlightRecorder::Issued sum(std::string_view label) {
  return {.kind = Collective::all_reduce, .bytes = 4, .label = label};
}

TEST(FlightRecorder, KeepsTheLastCallsAndThoseUnderWay) {
  FlightRecorder recorder;
  const auto slow = recorder.add("world", "slow", {0, 1}, 0),
             busy = recorder.add("world.1", "busy", {0, 1}, 0);
  const auto open = recorder.issue(*slow, sum("open"));
  open.begin();
  for (int i = 0; i < 1000; ++i) {
    const auto ticket = recorder.issue(*busy, sum("x"));
    ticket.begin(), ticket.end(true);
  }
  const FlightRecord record = recorder.record();
  EXPECT_EQ(record.calls.size(), FlightRecorder::kept);
  EXPECT_EQ(record.calls[0].label, "open");
  EXPECT_EQ(record.calls[0].state, CallState::under_way);
  EXPECT_EQ(record.calls.back().sequence, 1000u);
  EXPECT_EQ(record.calls[1].sequence, 1000u - FlightRecorder::kept + 2);
  EXPECT_EQ(record.groups[1].finished, 1000u);
  open.end(false);
  EXPECT_EQ(recorder.record().calls[0].state, CallState::failed);
  EXPECT_EQ(recorder.record().groups[0].finished, 0u) << "what has failed has not finished";
}

TEST(FlightRecorder, ATicketWhosePlaceIsTakenChangesNothing) {
  FlightRecorder recorder;
  const auto group = recorder.add("world", "all", {0, 1}, 0);
  std::vector<FlightRecorder::Ticket> open;
  for (std::size_t i = 0; i < 2 * FlightRecorder::kept; ++i) open.push_back(recorder.issue(*group, sum("x")));
  open.front().begin();
  const std::vector<int> ranks{1};
  open.front().wait_for(ranks);
  open.front().end(true);
  for (const RecordedCall& call : recorder.record().calls) {
    EXPECT_EQ(call.state, CallState::issued);
    EXPECT_EQ(call.begun_us, 0);
    EXPECT_EQ(call.ended_us, 0);
    EXPECT_THAT(call.missing, IsEmpty());
  }
}

TEST(FlightRecorder, LongLabelsAndListsAreCut) {
  FlightRecorder recorder;
  const auto group = recorder.add("world", "all", {0, 1}, 1);
  const auto ticket = recorder.issue(*group, sum(std::string(200, 'x')));
  const std::vector<int> ranks{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11};
  ticket.begin(), ticket.wait_for(ranks);
  const FlightRecord record = recorder.record();
  EXPECT_EQ(record.rank, 1);
  EXPECT_EQ(record.calls[0].label, std::string(63, 'x'));
  EXPECT_THAT(record.calls[0].missing, ElementsAre(1, 2, 3, 4, 5, 6, 7, 8));
  EXPECT_EQ(record.calls[0].missing_count, 11);
}

/// Threads issue on groups of their own while another reads: each entry that is told is of one call.
TEST(FlightRecorder, ReadersSeeWholeEntries) {
  FlightRecorder recorder;
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int t = 1; t <= 2; ++t)
    threads.emplace_back([&, t] {
      const auto group = recorder.add(std::string("g") + std::to_string(t), "g", {0, 1}, 0);
      for (std::uint64_t i = 1; !stop; ++i) {
        const std::string label = std::to_string(t * 1'000'000 + static_cast<int>(i));
        const auto ticket = recorder.issue(*group, {.kind = Collective::all_reduce,
                                                    .bytes = static_cast<std::uint64_t>(t) * 1'000'000 + i,
                                                    .label = label});
        ticket.begin(), ticket.end(true);
      }
    });
  int seen = 0, mixed = 0;
  for (int i = 0; i < 100'000 && seen < 50'000; ++i)
    for (const RecordedCall& call : recorder.record().calls) {
      ++seen;
      mixed += call.label != std::to_string(call.bytes) || call.bytes % 1'000'000 != call.sequence;
    }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(seen, 1000);
  EXPECT_EQ(mixed, 0);
}

}  // namespace
}  // namespace sherd::comm
