// Updates that begin while backward still runs: the same bits, and nothing that pretends to be whole when it
// is not.
#include <gtest/gtest.h>

#include <chrono>
#include <limits>
#include <numeric>
#include <thread>

#include "support/equality.h"
#include "support/expect_error.h"
#include "support/odd_models.h"
#include "support/temp_folder.h"

namespace sherd::test {
namespace {

using sherd::testing::TempFolder;

std::int64_t early_updates(const RunResult& run) {
  return std::accumulate(run.early_updates.begin(), run.early_updates.end(), std::int64_t{0});
}

class OffloadEarlyUpdate : public ::testing::Test {
 protected:
  RunSpec base(int stage, int ranks) const {
    RunSpec spec;
    spec.stage = stage, spec.ranks = ranks, spec.steps = 12, spec.clipping = 0;
    spec.nvme_path = folder_.path();
    return spec;
  }
  /// `late`, and the same with all checks off, which must give the same bits.
  void expect_same_bits(RunSpec spec) {
    spec.check_overflow = true;
    const RunResult late = train_local(spec);
    EXPECT_EQ(early_updates(late), 0);
    spec.check_overflow = false;
    const RunResult early = train_local(spec);
    // From NVMe, reads may take longer than the backward of a tiny model.
    EXPECT_TRUE(early_updates(early) > 0 || spec.offload_optimizer == "nvme");
    EXPECT_TRUE(early.bits() == late.bits());
    EXPECT_EQ(early.io.read, late.io.read);
    EXPECT_EQ(early.io.written, late.io.written);
  }

  TempFolder folder_;
};

class EarlyPlacements : public OffloadEarlyUpdate,
                        public ::testing::WithParamInterface<std::tuple<int, int, std::string>> {};

TEST_P(EarlyPlacements, GiveTheBitsOfLateUpdates) {
  const auto [stage, ranks, optimizer] = GetParam();
  for (const std::string param : {"none", "cpu", "nvme"}) {
    if (param != "none" && stage < 3) continue;
    RunSpec spec = base(stage, ranks);
    spec.offload_param = param, spec.offload_optimizer = optimizer;
    spec.offload_param_extra = param == "nvme" ? R"(, "max_in_cpu": 0)" : "";
    SCOPED_TRACE(param);
    spec.bucket = 8192,
    spec.overlap = ranks == 2;  // a block's gradients travel before the next block's are there
    expect_same_bits(spec);
  }
}

INSTANTIATE_TEST_SUITE_P(OffloadEarlyUpdate, EarlyPlacements,
                         ::testing::Combine(::testing::Values(1, 2, 3), ::testing::Values(1, 2, 4),
                                            ::testing::Values("cpu", "nvme")),
                         [](const auto& test) {
                           return cat("stage", std::get<0>(test.param), "_ranks", std::get<1>(test.param),
                                      "_", std::get<2>(test.param));
                         });

TEST_F(OffloadEarlyUpdate, WithEverythingElseThatMovesUnits) {
  RunSpec spec = base(3, 2);
  spec.offload_param = spec.offload_optimizer = "nvme";
  spec.offload_param_extra = R"(, "max_in_cpu": 9000)";
  spec.steps = 6;
  spec.bucket = 4096, spec.prefetch = 30000, spec.max_reuse = 20000, spec.persistence = 100,
  spec.overlap = true;
  for (const char* recompute : {"none", "selective", "full"})
    for (const char* buffers :
         {R"(, "buffer_count": 1)", R"(, "pipeline_read": false, "pipeline_write": false)",
          R"(, "buffer_count": 6, "ratio": 0.5)"}) {
      SCOPED_TRACE(cat(recompute, buffers));
      spec.recompute = recompute, spec.offload_extra = buffers;
      spec.tied = !spec.tied;
      spec.sub_group = spec.tied ? 4096 : 1'000'000'000;
      spec.accumulation = spec.tied ? 3 : 1;
      spec.split_masters = spec.tied;
      expect_same_bits(spec);
    }
}

TEST_F(OffloadEarlyUpdate, NeedsClippingAndChecksOffAndSomethingOffloaded) {
  RunSpec spec = base(3, 1);
  spec.steps = 3, spec.check_overflow = false;
  EXPECT_EQ(early_updates(train_local(spec)), 0);
  spec.offload_optimizer = "cpu";
  EXPECT_GT(early_updates(train_local(spec)), 0);
  spec.clipping = 1;
  EXPECT_EQ(early_updates(train_local(spec)), 0);
  spec.clipping = 0, spec.dtype = "fp32";
  EXPECT_EQ(early_updates(train_local(spec)), 0);
  spec.dtype = "fp16";
  EXPECT_EQ(early_updates(train_local(spec)), 0);
}

TEST_F(OffloadEarlyUpdate, FollowsTheOrderInWhichGradientsComplete) {
  RunSpec spec = base(3, 1);
  spec.steps = 4, spec.check_overflow = false, spec.offload_optimizer = "cpu";
  const RunResult run = train_local(spec);
  // The embeddings come first in the model and last in backward, so that the first step, which knows no order
  // yet, waits for them. Without reads to wait for, later steps have updated every segment when backward
  // ends.
  std::int64_t segments = 0;
  launch_ranks(1, [&](DistributedPtr dist) {
    segments = static_cast<std::int64_t>(make_engine(dist, spec)->sharded().trainable_segments().size());
  });
  EXPECT_GT(segments, 3);
  for (std::size_t step = 1; step < run.early_updates.size(); ++step)
    EXPECT_EQ(run.early_updates[step], segments) << step;
}

// ---- models of other shapes; every update of theirs begins early ----

std::string unchecked(bool check = false, const std::string& more = "") {
  return cat(R"(, "gradient_clipping": 0, "bf16": {"enabled": true, "check_grad_overflow": )",
             check ? "true" : "false", "}", more);
}

/// A model whose backward stops in the middle until nothing is read any more: the same losses as with updates
/// that wait.
TEST_F(OffloadEarlyUpdate, UpdatesFromNvmeWhileBackwardRuns) {
  const std::string nvme =
      cat(R"("offload_optimizer": {"device": "nvme", "nvme_path": ")", folder_.path().string(), "\"}");
  const auto run = [&](bool check) {
    std::vector<double> out;
    launch_ranks(1, [&](DistributedPtr dist) {
      auto model = std::make_shared<Brittle>();
      Engine engine(dist, model, odd_config(3, unchecked(check), nvme));
      for (int step = 0; step < 4; ++step) {
        const std::uint64_t before = engine.io_bytes().read;
        if (step > 0 && !check)  // the first step knows no order yet
          model->in_backward = [&engine, before] {
            const auto start = std::chrono::steady_clock::now();
            for (std::uint64_t last = before, now; (now = engine.io_bytes().read) == before || now != last;
                 last = now) {
              require(std::chrono::steady_clock::now() - start < std::chrono::seconds(20),
                      "nothing was read ahead");
              std::this_thread::sleep_for(std::chrono::milliseconds(50));
            }
          };
        const auto& report = engine.train_batch([&] { return odd_batch(engine, step); });
        out.insert(out.end(), {report.loss, report.grad_norm});
        if (check) {
          EXPECT_EQ(report.early_updates, 0) << step;
        } else if (step > 0) {  // in the first step it depends on the drive
          EXPECT_GT(report.early_updates, 0) << step;
        }
      }
    });
    return out;
  };
  EXPECT_EQ(run(false), run(true));
}

/// Each block's gradients have arrived when its backward ends.
constexpr const char* optimizer_on_host =
    R"("offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 64, "overlap_comm": false)";

TEST_F(OffloadEarlyUpdate, TiedFrozenAndLeftOutBlocks) {
  const auto losses = [&](int stage, bool freeze, bool skip, bool check, const std::string& recompute) {
    std::vector<double> out;
    std::int64_t early = 0;
    launch_ranks(2, [&](DistributedPtr dist) {
      Engine engine(dist, std::make_shared<Odd>(freeze, skip),
                    odd_config(stage, unchecked(check, recompute), optimizer_on_host));
      for (int step = 0; step < 6; ++step) {
        const auto& report = engine.train_batch([&] { return odd_batch(engine, step); });
        if (dist->rank() == 0)
          out.push_back(report.loss), out.push_back(report.grad_norm), early += report.early_updates;
      }
    });
    EXPECT_EQ(early > 0, !check);
    return out;
  };
  for (const int stage : {1, 2, 3})
    for (const bool freeze : {false, true})
      for (const bool skip : {false, true})
        for (const char* recompute : {"", R"(, "training": {"recompute": "full"})"})
          EXPECT_EQ(losses(stage, freeze, skip, false, recompute),
                    losses(stage, freeze, skip, true, recompute))
              << "stage " << stage << ", frozen " << freeze << ", left out " << skip << recompute;
}

TEST_F(OffloadEarlyUpdate, ABlockThatTheLastMicroBatchSkips) {
  const auto losses = [&](bool check) {
    std::vector<double> out;
    launch_ranks(2, [&](DistributedPtr dist) {
      Engine engine(
          dist, std::make_shared<Sometimes>(),
          odd_config(3, unchecked(check, R"(, "gradient_accumulation_steps": 2)"), optimizer_on_host));
      for (int step = 0; step < 6; ++step) {
        int micro = 0;
        const auto& report = engine.train_batch([&] {
          tensor::Batch batch = odd_batch(engine, 2 * step + micro);
          if (micro++ == step % 2) batch["deep"] = batch["x"];
          return batch;
        });
        if (dist->rank() == 0) out.push_back(report.loss);
      }
    });
    return out;
  };
  EXPECT_EQ(losses(false), losses(true));
}

TEST_F(OffloadEarlyUpdate, AFailedBackwardCannotBeUndoneAndLoadingGoesOn) {
  const auto run = [&](bool stumble) {
    std::vector<double> out;
    launch_ranks(2, [&](DistributedPtr dist) {
      auto model = std::make_shared<Brittle>();
      Engine engine(dist, model, odd_config(3, unchecked(), optimizer_on_host));
      const auto train = [&](int step) {
        const auto& report = engine.train_batch([&] { return odd_batch(engine, step); });
        if (dist->rank() == 0) out.insert(out.end(), {report.loss, report.grad_norm});
      };
      train(0), train(1);
      if (stumble) {
        const std::string folder = folder_.path().string();
        engine.save_checkpoint(folder);
        model->fails = true;
        const auto loss = engine.forward(odd_batch(engine, 7));
        using sherd::testing::expect_error;
        expect_error(ErrorKind::usage, "this pass was to fail; step 3 has changed part of the weights",
                     [&] { engine.backward(loss); });
        model->fails = false;
        expect_error(ErrorKind::usage, "load_checkpoint()", [&] { engine.backward(loss); });
        expect_error(ErrorKind::usage, "load_checkpoint()", [&] { engine.forward(odd_batch(engine, 7)); });
        expect_error(ErrorKind::usage, "load_checkpoint()",
                     [&] { engine.save_checkpoint(folder, "broken"); });
        engine.eval();
        expect_error(ErrorKind::usage, "load_checkpoint()", [&] { engine.forward(odd_batch(engine, 7)); });
        engine.train();
        engine.load_checkpoint(folder);
      }
      for (int step = 2; step < 5; ++step) train(step);
    });
    return out;
  };
  EXPECT_EQ(run(true), run(false));
}

TEST_F(OffloadEarlyUpdate, ANanLossStillChangesNothing) {
  launch_ranks(1, [&](DistributedPtr dist) {
    Engine engine(dist, std::make_shared<Odd>(), odd_config(3, unchecked(), optimizer_on_host));
    for (int step = 0; step < 2; ++step) engine.train_batch([&] { return odd_batch(engine, step); });
    engine.save_checkpoint(folder_.path().string());
    const auto nan = std::numeric_limits<float>::quiet_NaN();
    engine.backward(engine.forward(odd_batch(engine, 2, nan)));
    EXPECT_EQ(engine.optimizer()->steps(), 2);
    sherd::testing::expect_error(ErrorKind::numerics, "nothing was updated", [&] { engine.step(); });
    EXPECT_EQ(engine.optimizer()->steps(), 2);
    engine.load_checkpoint(folder_.path().string());
    EXPECT_GT(engine.train_batch([&] { return odd_batch(engine, 2); }).early_updates, 0);
    EXPECT_EQ(engine.optimizer()->steps(), 3);
  });
}

TEST_F(OffloadEarlyUpdate, ALoadThatFailsBetweenBackwardAndStepChangesNothing) {
  const auto run = [&](bool stumble) {
    std::vector<double> out;
    launch_ranks(2, [&](DistributedPtr dist) {
      Engine engine(dist, std::make_shared<Odd>(), odd_config(3, unchecked(), optimizer_on_host));
      for (int step = 0; step < 5; ++step) {
        engine.backward(engine.forward(odd_batch(engine, step)));
        if (stumble && step == 2) {
          EXPECT_GT(engine.last_step().early_updates, 0);
          EXPECT_THROW(engine.load_checkpoint(folder_.path().string(), "missing"), Error);
        }
        engine.step();
        if (dist->rank() == 0) out.insert(out.end(), {engine.last_step().loss, engine.last_step().grad_norm});
      }
      EXPECT_EQ(engine.optimizer()->steps(), 5);
    });
    return out;
  };
  EXPECT_EQ(run(true), run(false));
}

TEST_F(OffloadEarlyUpdate, OneRanksChangePoisonsTheStepForAll) {
  launch_ranks(2, [&](DistributedPtr dist) {
    auto model = std::make_shared<Brittle>();
    Engine engine(dist, model, odd_config(3, unchecked(), optimizer_on_host));
    model->fails = true;  // before this rank has updated anything; of others it knows nothing
    const auto loss = engine.forward(odd_batch(engine, 0));
    sherd::testing::expect_error(ErrorKind::usage, "load a checkpoint to go on",
                                 [&] { engine.backward(loss); });
    sherd::testing::expect_error(ErrorKind::usage, "load_checkpoint()",
                                 [&] { engine.forward(odd_batch(engine, 0)); });
  });
}

TEST_F(OffloadEarlyUpdate, ABackwardThatFailsBeforeAnyUpdateLeavesTheWeightsWhole) {
  launch_ranks(1, [&](DistributedPtr dist) {
    auto model = std::make_shared<Brittle>();
    Engine engine(dist, model, odd_config(3, unchecked(), optimizer_on_host));
    model->fails = true;  // in the first step, which knows no order yet
    const auto loss = engine.forward(odd_batch(engine, 0));
    try {
      engine.backward(loss);
      ADD_FAILURE() << "backward was to fail";
    } catch (const Error& error) {
      EXPECT_EQ(std::string(error.what()), "this pass was to fail");
    }
    EXPECT_EQ(engine.optimizer()->steps(), 0);
    engine.save_checkpoint(folder_.path().string());
  });
}

TEST_F(OffloadEarlyUpdate, ALeaseThatIsTakenInBackwardWouldMissTheUpdate) {
  launch_ranks(1, [&](DistributedPtr dist) {
    auto model = std::make_shared<Brittle>();
    Engine engine(
        dist, model,
        odd_config(3, unchecked(), cat(optimizer_on_host, R"(, "offload_param": {"device": "cpu"})")));
    sharding::Unit::Lease lease;
    model->in_backward = [&] { lease = engine.sharded().gather(*model->parameters().front()); };
    const auto loss = engine.forward(odd_batch(engine, 0));
    sherd::testing::expect_error(ErrorKind::usage, "'layer0' is held while their update begins",
                                 [&] { engine.backward(loss); });
  });
}

TEST_F(OffloadEarlyUpdate, ALossThatBackwardRefusesLeavesTheWeightsWhole) {
  launch_ranks(2, [&](DistributedPtr dist) {
    Engine engine(dist, std::make_shared<Odd>(), odd_config(2, unchecked(), optimizer_on_host));
    engine.set_gradient_accumulation_boundary(false);
    const auto earlier = engine.forward(odd_batch(engine, 0));
    engine.backward(earlier);
    engine.step();
    engine.set_gradient_accumulation_boundary(true);
    const auto loss = engine.forward(odd_batch(engine, 1));
    sherd::testing::expect_error(ErrorKind::usage, "an earlier forward pass",
                                 [&] { engine.backward(earlier); });
    engine.backward(loss);  // no block had run
    engine.step();
    EXPECT_TRUE(engine.was_step_applied());
    EXPECT_EQ(engine.optimizer()->steps(), 1);
  });
}

TEST_F(OffloadEarlyUpdate, BetweenBackwardAndStepTheWeightsAreNotWhole) {
  launch_ranks(1, [&](DistributedPtr dist) {
    auto model = std::make_shared<Odd>();
    Engine engine(
        dist, model,
        odd_config(3, unchecked(), cat(optimizer_on_host, R"(, "offload_param": {"device": "cpu"})")));
    for (int step = 0; step < 2; ++step) engine.train_batch([&] { return odd_batch(engine, step); });
    {
      const auto loss = engine.forward(odd_batch(engine, 2));
      auto lease = engine.sharded().gather(*model->layer(0).weight());
      sherd::testing::expect_error(ErrorKind::usage, "'layer0'", [&] { engine.backward(loss); });
      lease = {};
      engine.backward(loss);  // nothing had begun
    }
    const double rate = engine.optimizer()->lr().front();
    engine.optimizer()->set_lr(0.5);  // for the next step: this one has begun
    engine.eval();
    sherd::testing::expect_error(ErrorKind::usage, "call step() first",
                                 [&] { engine.forward(odd_batch(engine, 3)); });
    engine.train();
    sherd::testing::expect_error(ErrorKind::usage, "call step() first",
                                 [&] { engine.save_checkpoint(folder_.path().string()); });
    engine.step();
    EXPECT_EQ(engine.last_step().lr.front(), rate);
    EXPECT_EQ(engine.train_batch([&] { return odd_batch(engine, 3); }).lr.front(), 0.5);
  });
}

}  // namespace
}  // namespace sherd::test
