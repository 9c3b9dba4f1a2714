// A rank that throws, hangs or dies in the middle of a schedule, before an instruction of its list. All
// others end within the deadline, each with an error that says who; nothing of the step stays in memory,
// nothing that was saved is lost, and where training may go on it does, with the bits of a run that nothing
// befell.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "support/equality_processes.h"
#include "support/full_suite.h"
#include "tests/comm/tcp_ranks.h"

namespace sherd::test {
namespace {

using sharding::Instruction;
using sherd::testing::TempFolder;
using ::testing::HasSubstr;
using Clock = std::chrono::steady_clock;
using Op = Instruction::Op;

RunSpec pipeline(int stages, const char* schedule) {
  RunSpec spec;
  spec.ranks = spec.pipeline = stages, spec.schedule = schedule;
  spec.layers = 6, spec.hidden = 16, spec.stage = 1;
  spec.steps = 6, spec.accumulation = 6;
  return spec;
}

struct Place {
  const char* name;
  const char* schedule;
  Op op;
  std::int64_t micro_batch = 3;
};
const Place failing_places[] = {{"forward", "1f1b", Op::forward},
                                {"backward", "1f1b", Op::backward},
                                {"send_activation", "gpipe", Op::send_activation},
                                {"send_gradient", "gpipe", Op::send_gradient},
                                {"receive_gradient", "1f1b", Op::receive_gradient},
                                {"weight_gradients", "zero_bubble", Op::weight_gradients}};

struct StageStart {
  const char* name;
  StartRanks start;
  bool sees_waits = true;  ///< ranks see for whom others wait
};

StartRanks stages_over_tcp(bool shared_memory) {
  return [=](int ranks, comm::CommOptions options, const auto& body) {
    options.shared_memory = shared_memory;
    comm::on_tcp_ranks(ranks, options, body);
  };
}
const StageStart stage_starts[] = {{"local", [](int ranks, const comm::CommOptions& options,
                                                const auto& body) { comm::run_local(ranks, options, body); }},
                                   {"tcp", stages_over_tcp(true)},
                                   {"tcp_messages", stages_over_tcp(false), false}};

/// The error that each rank's training threw; empty: none.
std::vector<std::string> errors_of(
    const StageStart& variant, const RunSpec& spec, double timeout,
    const std::function<void()>& at_end = [] {}) {
  std::vector<std::string> errors(static_cast<std::size_t>(spec.ranks));
  const auto tells = [&](int ranks, comm::CommOptions options, const auto& body) {
    options.timeout_seconds = timeout;
    variant.start(ranks, options, [&](comm::Communicator& world) {
      try {
        body(world);
      } catch (const Error& error) {
        errors[static_cast<std::size_t>(world.rank())] = error.what();
        world.abort(error.what());  // as launch_ranks() does
        at_end();
        throw;
      }
    });
  };
  EXPECT_THROW(train_on(tells, spec), Error);
  return errors;
}

class FailingStage : public ::testing::TestWithParam<std::tuple<int, int>> {};

TEST_P(FailingStage, EndsAllWithOneError) {
  const auto& [place_index, variant] = GetParam();
  const Place& place = failing_places[place_index];
  RunSpec spec = pipeline(4, place.schedule);
  constexpr int failing = 1;
  spec.before_instruction = [&](int rank, int step, const Instruction& i) {
    if (rank == failing && step == 1 && i.op == place.op && i.micro_batch == place.micro_batch)
      fail(ErrorKind::data, "shard 17 is cut short");
  };
  const auto start = Clock::now();
  const auto errors = errors_of(stage_starts[variant], spec, 60);
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(30));
  EXPECT_EQ(errors[failing], "shard 17 is cut short");
  for (int rank = 0; rank < spec.ranks; ++rank) {
    if (rank == failing) continue;
    const std::string& text = errors[static_cast<std::size_t>(rank)];
    EXPECT_THAT(text, HasSubstr("rank 1 failed: shard 17 is cut short")) << "on rank " << rank;
  }
}

std::vector<std::tuple<int, int>> failing_stages() {
  std::vector<std::tuple<int, int>> out;
  for (int place = 0; place < std::ssize(failing_places); ++place)
    for (int variant = 0; variant < std::ssize(stage_starts); ++variant)
      if (full_suite() || place % std::ssize(stage_starts) == variant) out.emplace_back(place, variant);
  return out;
}
INSTANTIATE_TEST_SUITE_P(In, FailingStage, ::testing::ValuesIn(failing_stages()), [](const auto& test) {
  return cat(failing_places[std::get<0>(test.param)].name, "_over_",
             stage_starts[std::get<1>(test.param)].name);
});

/// Two pipelines side by side: the other one hears of the failure through the ranks that share
/// data-parallel groups.
TEST(FailingStages, EndOtherPipelinesToo) {
  for (const StageStart& variant : stage_starts) {
    SCOPED_TRACE(variant.name);
    RunSpec spec = pipeline(2, "1f1b");
    spec.ranks = 4;
    spec.before_instruction = [&](int rank, int step, const Instruction& i) {
      if (rank == 3 && step == 1 && i.op == Op::backward && i.micro_batch == 2)
        fail(ErrorKind::data, "shard 17");
    };
    const auto errors = errors_of(variant, spec, 60);
    for (int rank = 0; rank < 3; ++rank)
      EXPECT_THAT(errors[static_cast<std::size_t>(rank)], HasSubstr("rank 3 ")) << "on rank " << rank;
  }
}

class HangingStage : public ::testing::TestWithParam<int> {};

/// The others find out at the deadline. Nobody blames a rank that waits itself.
TEST_P(HangingStage, IsNamedByAll) {
  const StageStart& variant = stage_starts[GetParam()];
  constexpr int hanging = 2;
  for (const Op op : {Op::forward, Op::backward}) {
    if (!full_suite() && (op == Op::forward) != (GetParam() == 1)) continue;  // waits
    RunSpec spec = pipeline(4, "1f1b");
    std::atomic<int> ended{0};
    spec.before_instruction = [&](int rank, int step, const Instruction& i) {
      if (rank != hanging || step != 1 || i.op != op || i.micro_batch != 2) return;
      for (const auto patience = Deadline::after_seconds(30); ended < 3 && !patience.passed();)
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
      fail(ErrorKind::usage, "awake again");
    };
    const auto start = Clock::now();
    const auto errors = errors_of(variant, spec, 2, [&] { ++ended; });
    EXPECT_LT(Clock::now() - start, std::chrono::seconds(15));
    for (int rank = 0; rank < spec.ranks; ++rank) {
      if (rank == hanging) continue;
      const std::string& text = errors[static_cast<std::size_t>(rank)];
      EXPECT_THAT(text, HasSubstr("did not come within 2 s")) << "on rank " << rank;
      if (variant.sees_waits) {
        EXPECT_THAT(text, HasSubstr("rank 2 did not come")) << "on rank " << rank;
      }
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Over, HangingStage, ::testing::Range(0, 3),
                         [](const auto& test) { return std::string(stage_starts[test.param].name); });

/// A process that is killed in its second step, in the middle of the list.
TEST(KilledStage, EndsAllWithOneError) {
  struct Kind {
    const char* op;
    bool shared_memory;
    const char* machines;
  };
  for (const Kind& kind :
       {Kind{"forward", true, ""}, Kind{"backward", false, ""}, Kind{"send_activation", true, "0101"}}) {
    SCOPED_TRACE(kind.op);
    const TempFolder folder;
    RunSpec spec = pipeline(4, "1f1b");
    spec.steps = 1000;
    const Processes how{
        .launcher = tcp_launcher(spec.ranks), .shared_memory = kind.shared_memory, .machines = kind.machines};
    const std::string told = (folder / "told").string();
    const auto start = Clock::now();
    const std::string command = cat(processes_command(how, spec, (folder / "bits").string(), folder),
                                    " killed=2 killed_in=", kind.op, " 2>", told);
    EXPECT_NE(std::system(command.c_str()), 0);
    EXPECT_LT(Clock::now() - start, std::chrono::seconds(30));
    std::ifstream in(told);
    int errors = 0;
    for (std::string line; std::getline(in, line);) {
      if (line.find("error: ") == std::string::npos) continue;
      ++errors;
      EXPECT_THAT(line, HasSubstr("rank 2 is dead"));
    }
    EXPECT_EQ(errors, 3) << "one from each rank that lives\n" << sherd::testing::read_text(told);
  }
}

/// A checkpoint saved before a rank failed is whole: another run goes on from there, with the same bits.
TEST(FailingStages, LoseNothingThatWasSaved) {
  const TempFolder folder;
  RunSpec spec = pipeline(3, "1f1b");
  const RunResult want = train_local(spec);
  spec.directory = folder.path().string();
  train_local(spec, 0, 3);
  RunSpec failing = spec;
  failing.before_instruction = [](int rank, int step, const Instruction& i) {
    if (rank == 2 && step == 4 && i.op == Op::backward && i.micro_batch == 1)
      fail(ErrorKind::data, "shard 17");
  };
  EXPECT_THROW(train_local(failing, 3, 6), Error);
  const RunResult rest = train_local(spec, 3, 6);
  for (int step = 3; step < 6; ++step)
    EXPECT_EQ(rest.losses[static_cast<std::size_t>(step) - 3], want.losses[static_cast<std::size_t>(step)]);
  EXPECT_TRUE(rest.masters == want.masters);
}

/// Bytes that exchanges may keep of a step that failed, until a checkpoint is loaded or the engine goes:
/// fp32 sums of parameters that stages share, which replicas may still be sending each other.
std::uint64_t sums_under_way(Engine& engine) {
  std::uint64_t bytes = 64;  // and what goes behind the last of them
  for (const sharding::Segment* segment : engine.sharded().trainable_segments())
    if (segment->groups().over_stages)
      bytes += static_cast<std::uint64_t>(segment->layout().shard()) * sizeof(float);
  return bytes;
}

/// On all ranks, whichever failed, a step that failed leaves no more in memory than was there before it, but
/// for sums of replicas that are under way.
TEST(FailingStages, LeaveNothingInMemory) {
  for (const Place& place : failing_places) {
    SCOPED_TRACE(place.name);
    RunSpec spec = pipeline(3, place.schedule);
    spec.before_instruction = [&](int rank, int step, const Instruction& i) {
      if (rank != 1 || step != 1 || i.op != place.op || i.micro_batch != place.micro_batch) return;
      std::this_thread::sleep_for(std::chrono::milliseconds(100));  // the others get as far as they can
      fail(ErrorKind::data, "shard 17");
    };
    using Held = std::map<std::pair<device::Category, device::Tier>, std::uint64_t>;
    const auto held = [](Engine& engine) {
      Held out;
      for (const auto category :
           {device::Category::activations, device::Category::communication, device::Category::workspace})
        for (int i = 0; i < device::tier_count; ++i) {
          const auto tier = static_cast<device::Tier>(i);
          out[{category, tier}] = engine.device().ledger().current(tier, category);
        }
      return out;
    };
    std::mutex mutex;
    std::map<Engine*, Held> before;
    int failures = 0;
    spec.between_steps = [&](Engine& engine) {
      const std::lock_guard lock(mutex);
      before[&engine] = held(engine);
    };
    spec.when_failed = [&](Engine& engine) {
      const std::lock_guard lock(mutex);
      for (const auto& [kind, bytes] : held(engine)) {
        const bool exchanged = kind.first == device::Category::communication;
        EXPECT_LE(bytes, before.at(&engine).at(kind) + (exchanged ? sums_under_way(engine) : 0))
            << name_of(kind.first) << " in the tier " << name_of(kind.second);
      }
      ++failures;
    };
    EXPECT_THROW(train_local(spec), Error);
    EXPECT_EQ(failures, 3);
  }
}

/// On one rank a step that fails before its first backward can be made again, and one that fails later goes
/// on from a checkpoint.
TEST(FailingSchedule, GoesOnWithTheSameBits) {
  struct Fault {
    const char* schedule;
    Op op;
    bool again;  ///< without a checkpoint
  };
  for (const Fault& fault : {Fault{"layered", Op::forward, true}, Fault{"layered", Op::backward, false},
                             Fault{"gpipe", Op::forward, true}, Fault{"gpipe", Op::backward, false},
                             Fault{"zero_bubble", Op::weight_gradients, false}}) {
    SCOPED_TRACE(cat(fault.schedule, ", ", static_cast<int>(fault.op)));
    const TempFolder folder;
    RunSpec spec = pipeline(1, fault.schedule);
    spec.stage = 3, spec.steps = 4;
    const RunResult want = train_local(spec);
    int step = 0, failures = 0;
    spec.before_instruction = [&](int, int, const Instruction& i) {
      if (step == 2 && i.op == fault.op && i.micro_batch == 2 && failures++ == 0)
        fail(ErrorKind::data, "shard 17");
    };
    RunResult got;
    const auto dist = std::make_shared<Distributed>(comm::make_self({}), 0, 1);
    const auto engine = make_engine(dist, spec);
    Before before(spec, 0);
    engine->set_observer(&before);
    const auto make_step = [&] {
      int micro = 0;
      const auto& report = engine->train_batch(
          [&] { return synthetic_batch(engine->device(), 2, 24, 101, step, micro++, 0); });
      got.losses.push_back(report.loss), got.norms.push_back(report.grad_norm);
      got.scales.push_back(report.loss_scale);
    };
    for (; step < spec.steps; ++step) {
      engine->save_checkpoint(folder.path().string());
      try {
        make_step();
      } catch (const Error& error) {
        EXPECT_THAT(error.what(), HasSubstr("shard 17"));
        if (!fault.again) {
          EXPECT_THROW(make_step(), Error);  // before it has its weights back
          engine->load_checkpoint(folder.path().string());
        }
        make_step();
      }
    }
    EXPECT_EQ(failures > 0, true);
    collect_weights(*engine, got);
    EXPECT_TRUE(got.bits() == want.bits());
  }
}

}  // namespace
}  // namespace sherd::test
