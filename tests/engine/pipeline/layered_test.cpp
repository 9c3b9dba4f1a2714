// Layered accumulation: the bits of `accumulate`, parameters that come twice per step, and an update that
// ends beside the next step's forward.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>

#include "support/equality.h"
#include "support/expect_error.h"
#include "support/temp_folder.h"
#include "tests/comm/tcp_ranks.h"

namespace sherd::test {
namespace {

using sherd::testing::TempFolder;

class Layered : public ::testing::Test {
 protected:
  RunSpec base(int stage, int ranks) const {
    RunSpec spec;
    spec.stage = stage, spec.ranks = ranks, spec.steps = 5, spec.accumulation = 3, spec.tied = false;
    spec.recompute = "full", spec.bucket = 8192, spec.nvme_path = folder_.path();
    return spec;
  }
  RunSpec on_nvme(int ranks) const {
    RunSpec spec = base(3, ranks);
    spec.offload_param = spec.offload_optimizer = "nvme";
    spec.offload_param_extra = R"(, "max_in_cpu": 0, "buffer_count": 2)";
    spec.sub_group = 4096;  // several chunks per block
    return spec;
  }
  static RunResult run(RunSpec spec, const char* schedule) {
    spec.schedule = schedule;
    return train_local(spec);
  }
  static void expect_same_bits(const RunSpec& spec) {
    const RunResult layered = run(spec, "layered"), accumulated = run(spec, "accumulate");
    EXPECT_EQ(layered.losses, accumulated.losses);
    EXPECT_EQ(layered.skipped, accumulated.skipped);
    EXPECT_TRUE(layered.bits() == accumulated.bits());
  }

  TempFolder folder_;
};

class LayeredPlacements : public Layered, public ::testing::WithParamInterface<std::tuple<int, int>> {};

TEST_P(LayeredPlacements, GiveTheBitsOfAccumulate) {
  const auto [stage, ranks] = GetParam();
  RunSpec spec = base(stage, ranks);
  const std::vector<std::string> tiers =
      stage == 0 ? std::vector<std::string>{"none"} : std::vector<std::string>{"none", "cpu", "nvme"};
  for (const std::string& tier : tiers)
    for (const bool clips : {true, false}) {
      SCOPED_TRACE(cat(tier, clips ? ", clipping" : ""));
      spec.offload_optimizer = tier, spec.clipping = clips ? 0.5 : 0, spec.check_overflow = clips;
      spec.offload_param = stage == 3 ? tier : "none";
      spec.offload_param_extra = spec.offload_param == "nvme" ? R"(, "max_in_cpu": 0)" : "";
      expect_same_bits(spec);
    }
}

INSTANTIATE_TEST_SUITE_P(Layered, LayeredPlacements,
                         ::testing::Combine(::testing::Values(0, 1, 2, 3), ::testing::Values(1, 2)),
                         [](const auto& test) {
                           return cat("stage", std::get<0>(test.param), "_ranks", std::get<1>(test.param));
                         });

TEST_F(Layered, WhateverMovesUnitsAndStates) {
  for (const char* recompute : {"none", "full"})
    for (const char* buffers :
         {R"(, "buffer_count": 1)", R"(, "pipeline_read": false, "pipeline_write": false)",
          R"(, "buffer_count": 6, "ratio": 0.5)"})
      for (const bool clips : {true, false}) {
        SCOPED_TRACE(cat(recompute, buffers, clips));
        RunSpec spec = on_nvme(2);
        spec.recompute = recompute, spec.offload_extra = buffers, spec.persistence = clips ? 100 : 0;
        spec.clipping = clips ? 0.5 : 0, spec.check_overflow = clips, spec.overlap = clips;
        spec.split_masters = !clips;
        spec.offload_param_extra =
            clips ? R"(, "max_in_cpu": 9000)" : R"(, "max_in_cpu": 0, "buffer_count": 1)";
        expect_same_bits(spec);
      }
}

TEST_F(Layered, SkipsStepsThatOverflow) {
  RunSpec spec = on_nvme(2);
  spec.dtype = "fp16", spec.loss_scale_window = 1, spec.steps = 16;
  EXPECT_GT(run(spec, "layered").skipped, 0);
  expect_same_bits(spec);
}

/// Parameters that an update leaves for the next step's forward go to the other ranks then.
TEST_F(Layered, PublishesLateOverSockets) {
  for (const int stage : {1, 3})
    for (const bool shared_memory : {true, false}) {
      SCOPED_TRACE(cat("stage ", stage, shared_memory ? "" : ", messages"));
      RunSpec spec = base(stage, 2);
      spec.overlap = true, spec.offload_optimizer = "nvme", spec.sub_group = 4096;
      if (stage == 3) spec.persistence = 100;  // biases and norms
      const auto over_tcp = [=](int ranks, comm::CommOptions options, const auto& body) {
        options.shared_memory = shared_memory;
        comm::on_tcp_ranks(ranks, options, body);
      };
      const RunResult want = run(spec, "accumulate");
      spec.schedule = "layered";
      EXPECT_TRUE(train_on(over_tcp, spec).bits() == want.bits());
    }
}

TEST_F(Layered, ResumesInTheMiddleOfAnUpdate) {
  for (const int ranks : {1, 2}) {
    RunSpec spec = on_nvme(ranks);
    const RunResult straight = run(spec, "layered");
    spec.resume_at = 3, spec.directory = (folder_.path() / cat("checkpoints", ranks)).string();
    EXPECT_TRUE(run(spec, "layered").bits() == straight.bits());
  }
}

TEST_F(Layered, TiedEmbeddingsAgreeToRounding) {
  RunSpec spec = on_nvme(1);
  spec.tied = true, spec.dtype = "fp32";
  const RunResult layered = run(spec, "layered"), accumulated = run(spec, "accumulate");
  for (std::size_t i = 0; i < layered.losses.size(); ++i) {
    EXPECT_NEAR(layered.losses[i], accumulated.losses[i], 1e-5);
    EXPECT_NEAR(layered.norms[i] / accumulated.norms[i], 1, 1e-4);
  }
  EXPECT_TRUE(run(spec, "layered").bits() == layered.bits());
}

/// A step moves parameters once for backward, and with the optimizer's states once for the update, which
/// hands new ones to the next forward. The last part's backward follows at once, and uses the parameters of
/// forward. A tied table, and all that the first part has, comes once more, for the last part.
TEST_F(Layered, ReadsParametersAndStatesAsOftenAsAStepNeedsThem) {
  for (const auto& [ranks, accumulation, tied] :
       {std::tuple{1, 1, false}, {1, 4, false}, {2, 1, false}, {2, 4, false}, {1, 4, true}, {2, 1, true}}) {
    SCOPED_TRACE(cat(ranks, " ranks, accumulation ", accumulation, tied ? ", tied" : ""));
    RunSpec spec = on_nvme(ranks);
    spec.accumulation = accumulation, spec.schedule = "layered", spec.tied = tied;
    if (tied)
      spec.offload_param_extra = R"(, "max_in_cpu": 0, "buffer_count": 4)";  // so that each is handed over
    launch_ranks(ranks, [&, tied = tied](DistributedPtr dist) {
      auto engine = make_engine(dist, spec);
      const std::vector<sharding::Unit*> of_first = engine->sharded().units_of({0, 1});
      ASSERT_EQ(of_first.size(), 1u);
      std::uint64_t parameters = 0, states = 0, last = 0, again = 0;
      for (const auto& unit : engine->sharded().units())
        for (const auto* segment : unit->stored_segments(engine->dist().world())) {
          const auto bytes = [](const sharding::StateBuffer& state) {
            return static_cast<std::uint64_t>(state.end() - state.begin()) * size_of(state.dtype());
          };
          parameters += bytes(segment->parameters());
          if (unit->index() + 2 >= static_cast<int>(engine->sharded().units().size()))
            last += bytes(segment->parameters());
          if (tied && unit.get() == of_first.front()) again += bytes(segment->parameters());
          states += bytes(segment->masters());
          for (const auto& moment : segment->moments()) states += bytes(moment);
        }
      const auto step = [&](int number) {
        const engine::IoBytes before = engine->io_bytes();
        const std::int64_t gathers = engine->sharded().residency_stats().gathers;
        int micro = 0;
        engine->train_batch(
            [&] { return synthetic_batch(engine->device(), 2, 24, 101, number, micro++, dist->rank()); });
        const auto units = static_cast<std::int64_t>(engine->sharded().units().size());
        EXPECT_EQ(engine->sharded().residency_stats().gathers - gathers, 2 * units - 2 + tied);
        engine::IoBytes moved = engine->io_bytes();
        moved.read -= before.read, moved.written -= before.written;
        return moved;
      };
      const auto end = [&] {
        const engine::IoBytes before = engine->io_bytes();
        engine->synchronize();
        engine::IoBytes moved = engine->io_bytes();
        moved.read -= before.read, moved.written -= before.written;
        return moved;
      };
      // The first step's forward reads what nobody hands over, and nothing is updated before it. What is
      // read ahead of its decision is the update's.
      const engine::IoBytes first = step(0), first_end = end();
      EXPECT_EQ(first.read + first_end.read, 2 * parameters - last + again + parameters + states);
      EXPECT_EQ(first.written + first_end.written, parameters + states);
      std::uint64_t read = 0, written = 0;
      constexpr std::uint64_t steps = 4;
      for (std::uint64_t i = 0; i < steps; ++i) {
        const engine::IoBytes moved = step(static_cast<int>(1 + i));
        read += moved.read, written += moved.written;
      }
      const engine::IoBytes rest = end();
      read += rest.read, written += rest.written;
      // Only the first of these forwards follows an update that had ended.
      EXPECT_EQ(read, steps * (2 * parameters - last + again + states) + parameters);
      EXPECT_EQ(written, steps * (parameters + states));
    });
  }
}

TEST_F(Layered, EvaluatesBetweenStepsWithWholeWeights) {
  RunSpec spec = on_nvme(2);
  const auto losses = [&](const char* schedule) {
    spec.schedule = schedule;
    std::vector<double> out;
    launch_ranks(2, [&](DistributedPtr dist) {
      auto engine = make_engine(dist, spec);
      std::vector<double> own;
      for (int step = 0; step < 4; ++step) {
        int micro = 0;
        engine->train_batch(
            [&] { return synthetic_batch(engine->device(), 2, 24, 101, step, micro++, dist->rank()); });
        own.push_back(engine->eval_batch(synthetic_batch(engine->device(), 2, 24, 101, 90, 0, dist->rank())));
      }
      if (dist->rank() == 0) out = own;
    });
    return out;
  };
  EXPECT_EQ(losses("layered"), losses("accumulate"));
}

/// A lease finds the weights of whole steps, too.
TEST_F(Layered, LeasesWaitForTheUpdate) {
  RunSpec spec = on_nvme(1);
  const auto sum = [&](const char* schedule) {
    spec.schedule = schedule;
    double out = 0;
    launch_ranks(1, [&](DistributedPtr dist) {
      auto engine = make_engine(dist, spec);
      int micro = 0;
      engine->train_batch(
          [&] { return synthetic_batch(engine->device(), 2, 24, 101, 0, micro++, dist->rank()); });
      const auto parameter = engine->module().parameters().back();
      const auto lease = engine->sharded().gather(*parameter);
      const auto* values = parameter->value.data<bf16>();
      for (std::int64_t i = 0; i < parameter->numel(); ++i)
        out += static_cast<double>(static_cast<float>(values[i])) * static_cast<double>(i + 1);
    });
    return out;
  };
  EXPECT_EQ(sum("layered"), sum("accumulate"));
}

TEST_F(Layered, ALateUpdateThatFailsNamesItsStepAndPoisonsTheWeights) {
  RunSpec spec = on_nvme(1);
  spec.schedule = "layered", spec.directory = (folder_.path() / "checkpoints").string();
  launch_ranks(1, [&](DistributedPtr dist) {
    auto engine = make_engine(dist, spec);
    int micro = 0;
    const auto next = [&] { return synthetic_batch(engine->device(), 2, 24, 101, 0, micro++, dist->rank()); };
    engine->train_batch(next);
    engine->train_batch(next);
    // The file loses its bytes while the second step's update is still to come.
    for (const auto& entry : std::filesystem::recursive_directory_iterator(folder_.path()))
      if (entry.path().extension() == ".swap") std::filesystem::resize_file(entry.path(), 0);
    for (const bool trains : {true, false}) try {
        trains ? (void)engine->train_batch(next) : engine->save_checkpoint(spec.directory);
        ADD_FAILURE() << "nobody noticed";
      } catch (const Error& error) {
        const std::string what = error.what();
        EXPECT_NE(what.find("step 2 has changed part of the weights"), std::string::npos) << what;
        EXPECT_NE(what.find("load"), std::string::npos) << what;
      }
    EXPECT_FALSE(std::filesystem::exists(folder_.path() / "checkpoints" / "latest"));
  });
}

TEST_F(Layered, IsTakenByItselfWhereItSavesTraffic) {
  const auto chosen = [](const RunSpec& spec) {
    config::Schedule out{};
    launch_ranks(spec.ranks, [&](DistributedPtr dist) {
      const auto engine = make_engine(dist, spec);
      if (dist->rank() == 0) out = engine->schedule();
    });
    return out;
  };
  using config::Schedule;
  RunSpec spec = on_nvme(1);
  EXPECT_EQ(chosen(spec), Schedule::layered);
  spec.offload_param = "cpu", spec.offload_param_extra = "";
  EXPECT_EQ(chosen(spec), Schedule::layered);
  spec.tied = true;
  EXPECT_EQ(chosen(spec), Schedule::accumulate);
  spec.tied = false;
  spec.offload_param = "none";
  EXPECT_EQ(chosen(spec), Schedule::accumulate);
  spec.ranks = 2;
  EXPECT_EQ(chosen(spec), Schedule::layered);
  for (RunSpec other : {spec, spec, spec, spec}) {
    static int which = 0;
    switch (which++) {
      case 0:
        other.accumulation = 1;
        break;
      case 1:
        other.tied = true;
        break;
      case 2:
        other.recompute = "none";
        break;
      case 3:
        other.stage = 2;
        break;
    }
    EXPECT_EQ(chosen(other), Schedule::accumulate) << which;
  }
}

TEST_F(Layered, KeepsActivationsOnAnyTier) {
  RunSpec spec = on_nvme(1);
  spec.accumulation = 12, spec.steps = 3;
  const RunResult on_device = run(spec, "layered");
  spec.cpu_checkpointing = true;
  const RunResult in_host = run(spec, "layered");
  EXPECT_TRUE(in_host.bits() == on_device.bits());
  spec.cpu_checkpointing = false, spec.nvme_checkpointing = true;
  const RunResult on_nvme = run(spec, "layered");
  EXPECT_TRUE(on_nvme.bits() == on_device.bits());
  EXPECT_LT(in_host.activation_peak, on_device.activation_peak);
  EXPECT_LT(on_nvme.activation_peak, on_device.activation_peak);
  EXPECT_GT(on_nvme.io.written, on_device.io.written);
}

}  // namespace
}  // namespace sherd::test
