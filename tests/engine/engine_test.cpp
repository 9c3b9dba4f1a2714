// The engine's counters, accumulation rules, sharding of unusual models, and what it does when things go
// wrong.
#include "engine/engine.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "engine/initialize.h"
#include "models/gpt.h"
#include "support/equality.h"
#include "support/expect_error.h"
#include "support/odd_models.h"
#include "support/temp_folder.h"

namespace sherd::test {
namespace {

using sherd::testing::TempFolder;
using tensor::Tensor;

std::vector<double> losses(int stage, int ranks, bool freeze, bool skip, const std::string& more = "") {
  std::vector<double> out;
  launch_ranks(ranks, [&](DistributedPtr dist) {
    Engine engine(dist, std::make_shared<Odd>(freeze, skip), odd_config(stage, more));
    for (int step = 0; step < 6; ++step) {
      const auto& report = engine.train_batch([&] { return odd_batch(engine, step); });
      if (dist->rank() == 0) out.push_back(report.loss);
    }
  });
  return out;
}

TEST(Engine, TiedFrozenAndUnusedParametersTrainTheSameAtEveryStage) {
  for (const bool freeze : {false, true})
    for (const bool skip : {false, true}) {
      const auto expected = losses(0, 3, freeze, skip);
      EXPECT_LT(expected.back(), expected.front());
      for (const int stage : {1, 2, 3}) {
        EXPECT_EQ(losses(stage, 3, freeze, skip), expected) << stage;
        EXPECT_EQ(losses(stage, 3, freeze, skip, R"(, "training": {"recompute": "full"})"), expected)
            << stage;
      }
    }
}

TEST(Engine, FrozenParametersKeepTheirValuesAndHaveNoStates) {
  launch_ranks(2, [](DistributedPtr dist) {
    auto model = std::make_shared<Odd>(true);
    Engine engine(dist, model, odd_config(3));
    const auto read = [&] {
      const auto lease = engine.sharded().gather(*model->layer(0).weight());
      const Tensor& value = model->layer(0).weight()->value;
      return std::vector<float>(value.data<float>(), value.data<float>() + value.numel());
    };
    const auto before = read();
    for (int step = 0; step < 3; ++step) engine.train_batch([&] { return odd_batch(engine, step); });
    EXPECT_EQ(read(), before);
    EXPECT_FALSE(model->layer(0).weight()->value.defined()) << "no lease, no value";
    // layer1.weight, layer1.bias, layer2.bias, out.weight, out.bias train.
    std::int64_t trained = 0;
    for (const auto* segment : engine.sharded().trainable_segments()) trained += segment->layout().payload();
    EXPECT_EQ(trained, 64 + 8 + 8 + 8 + 1);
  });
}

TEST(Engine, CountsAsDeepSpeedDoes) {
  launch_ranks(2, [](DistributedPtr dist) {
    Engine engine(dist, std::make_shared<Odd>(), odd_config(2, R"(, "gradient_accumulation_steps": 3)"));
    EXPECT_EQ(engine.train_batch_size(), 4 * 3 * 2);
    EXPECT_EQ(engine.get_global_grad_norm(), std::nullopt);
    for (int micro = 1; micro <= 7; ++micro) {
      EXPECT_EQ(engine.is_gradient_accumulation_boundary(), micro % 3 == 0);
      engine.backward(engine.forward(odd_batch(engine, micro)));
      engine.step();
      EXPECT_EQ(engine.micro_steps(), micro);
      EXPECT_EQ(engine.global_steps(), micro / 3);
      EXPECT_EQ(engine.global_samples(), micro / 3 * 24);
      EXPECT_EQ(engine.was_step_applied(), micro % 3 == 0);
    }
    EXPECT_GT(*engine.get_global_grad_norm(), 0);
    EXPECT_EQ(engine.skipped_steps(), 0);
  });
}

TEST(Engine, TheCallerMayMoveTheAccumulationBoundary) {
  launch_ranks(2, [](DistributedPtr dist) {
    Engine engine(dist, std::make_shared<Odd>(), odd_config(1, R"(, "gradient_accumulation_steps": 2)"));
    for (int micro = 0; micro < 4; ++micro) {
      engine.set_gradient_accumulation_boundary(micro == 3);
      engine.backward(engine.forward(odd_batch(engine, micro)));
      engine.step();
      EXPECT_EQ(engine.global_steps(), micro == 3 ? 1 : 0);
    }
    EXPECT_EQ(engine.micro_steps(), 4);
  });
}

TEST(Engine, TheBoundaryIsFixedAtForward) {
  launch_ranks(2, [](DistributedPtr dist) {
    Engine engine(dist, std::make_shared<Odd>(), odd_config(1, R"(, "gradient_accumulation_steps": 2)"));
    engine.backward(engine.forward(odd_batch(engine, 0)));
    engine.set_gradient_accumulation_boundary(true);  // too late for gradients that were not reduced
    engine.step();
    EXPECT_EQ(engine.global_steps(), 0);
    engine.backward(engine.forward(odd_batch(engine, 1)));
    engine.step();
    EXPECT_EQ(engine.global_steps(), 1);
  });
}

/// The weight of Sometimes on each rank after three steps of two micro-batches, of which the first alone uses
/// it.
std::vector<std::vector<float>> train_sometimes(int stage) {
  std::vector<std::vector<float>> out(2);
  launch_ranks(2, [&](DistributedPtr dist) {
    auto model = std::make_shared<Sometimes>();
    Engine engine(dist, model, odd_config(stage, R"(, "gradient_accumulation_steps": 2)"));
    const auto read = [&] {
      const auto lease = engine.sharded().gather(*model->weight());
      const Tensor& value = model->weight()->value;
      return std::vector<float>(value.data<float>(), value.data<float>() + value.numel());
    };
    const auto before = read();
    for (int step = 0; step < 3; ++step) {
      int micro = 0;
      engine.train_batch([&] {
        tensor::Batch batch = odd_batch(engine, 2 * step + micro);
        if (micro++ == 0) batch["deep"] = batch["x"];
        return batch;
      });
    }
    out[static_cast<std::size_t>(dist->rank())] = read();
    EXPECT_NE(out[static_cast<std::size_t>(dist->rank())], before);
  });
  return out;
}

TEST(Engine, ABlockThatTheLastMicroBatchSkipsIsReducedToo) {
  for (const int stage : {0, 2}) {
    const auto lower = train_sometimes(stage), upper = train_sometimes(stage + 1);
    EXPECT_EQ(lower[0], lower[1]) << stage;
    EXPECT_EQ(upper, lower) << stage;
  }
}

TEST(Engine, ABatchThatFailsOnAllRanksLeavesNothingBehind) {
  const auto run = [](bool stumble) {
    std::vector<double> out;
    launch_ranks(2, [&](DistributedPtr dist) {
      Engine engine(dist, std::make_shared<Odd>(), odd_config(3));
      for (int step = 0; step < 4; ++step) {
        if (stumble) {
          tensor::Batch bad = odd_batch(engine, step);
          bad.erase("y");  // missed at the end of forward, when blocks have run and the root is gathered
          EXPECT_THROW(engine.forward(bad), std::out_of_range);
          if (step % 2 == 0) engine.eval_batch(odd_batch(engine, step));
        }
        const auto& report = engine.train_batch([&] { return odd_batch(engine, step); });
        if (dist->rank() == 0) out.push_back(report.loss);
      }
      EXPECT_EQ(engine.sharded().residency_stats().trace_breaks, 0);
    });
    return out;
  };
  EXPECT_EQ(run(true), run(false));
}

TEST(Engine, ALeaseMayNotOutliveTheValuesItRead) {
  launch_ranks(2, [](DistributedPtr dist) {
    auto model = std::make_shared<Odd>();
    Engine engine(dist, model, odd_config(3));
    const auto lease = engine.sharded().gather(*model->layer(0).weight());
    try {
      engine.train_batch([&] { return odd_batch(engine, 0); });
      ADD_FAILURE() << "the step went on";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::usage);
      EXPECT_NE(std::string(error.what()).find("'layer0'"), std::string::npos) << error.what();
    }
  });
}

TEST(Engine, EvaluationLeavesTrainingAlone) {
  const auto run = [](bool evaluate) {
    std::vector<double> out;
    launch_ranks(2, [&](DistributedPtr dist) {
      RunSpec spec;
      spec.stage = 3;
      spec.prefetch = 50'000;
      auto engine = make_engine(dist, spec);
      for (int step = 0; step < 4; ++step) {
        const auto& report = engine->train_batch(
            [&] { return synthetic_batch(engine->device(), 2, 24, 101, step, 0, dist->rank()); });
        if (dist->rank() == 0) out.push_back(report.loss);
        if (evaluate) {
          const auto batch = synthetic_batch(engine->device(), 2, 24, 101, 77, 0, 0);
          const double first = engine->eval_batch(batch);
          EXPECT_EQ(engine->eval_batch(batch), first) << "no dropout in evaluation";
        }
      }
    });
    return out;
  };
  EXPECT_EQ(run(true), run(false));
}

TEST(Engine, CallsOutOfOrderAreRefused) {
  launch_ranks(1, [](DistributedPtr dist) {
    Engine engine(dist, std::make_shared<Odd>(), odd_config(0));
    EXPECT_THROW(engine.step(), Error);
    const auto loss = engine.forward(odd_batch(engine, 0));
    EXPECT_THROW(engine.forward(odd_batch(engine, 0)), Error);
    EXPECT_THROW(engine.eval_batch(odd_batch(engine, 0)), Error)
        << "recompute in backward would find dropout off";
    EXPECT_THROW(engine.step(), Error);
    engine.backward(loss);
    EXPECT_THROW(engine.backward(loss), Error);
    engine.step();
    EXPECT_EQ(engine.global_steps(), 1);
  });
}

TEST(Engine, ANanLossStopsEveryRankAndChangesNothing) {
  for (const int stage : {0, 3}) {
    try {
      launch_ranks(3, [&](DistributedPtr dist) {
        Engine engine(dist, std::make_shared<Odd>(), odd_config(stage));
        engine.train_batch([&] { return odd_batch(engine, 0); });
        // Only one rank meets the bad sample.
        const float y = dist->rank() == 1 ? std::numeric_limits<float>::quiet_NaN() : 0.5f;
        try {
          engine.train_batch([&] { return odd_batch(engine, 1, y); });
          ADD_FAILURE() << "rank " << dist->rank() << " went on after a NaN loss";
        } catch (const Error& error) {
          EXPECT_EQ(error.kind(), ErrorKind::numerics);
          EXPECT_EQ(engine.global_steps(), 1);
          throw;
        }
      });
      FAIL();
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find("at step 2"), std::string::npos) << error.what();
    }
  }
}

TEST(Engine, HalfPrecisionSkipsOverflowsAndShrinksTheScale) {
  launch_ranks(2, [](DistributedPtr dist) {
    RunSpec spec;
    spec.dtype = "fp16";
    config::Config config =
        config::parse_text(spec.config(), "test", {"fp16.initial_scale_power=40", "fp16.hysteresis=1"});
    Engine engine(dist, std::make_shared<models::Gpt>(models::gpt_config(config, 101)), config);
    std::vector<double> scales;
    for (int step = 0; step < 40; ++step) {
      const auto& report = engine.train_batch(
          [&] { return synthetic_batch(engine.device(), 2, 24, 101, step, 0, dist->rank()); });
      scales.push_back(report.loss_scale);
      EXPECT_TRUE(std::isfinite(report.loss));
      EXPECT_EQ(report.applied, std::isfinite(report.grad_norm));
    }
    EXPECT_EQ(scales[0], std::ldexp(1.0, 40));
    EXPECT_EQ(scales[1], std::ldexp(1.0, 39));
    EXPECT_GT(engine.skipped_steps(), 5);
    EXPECT_LT(engine.skipped_steps(), 40);
    EXPECT_EQ(engine.global_steps(), 40);
  });
}

// ---- checkpoints ----

void save_one(const TempFolder& folder, int ranks, int stage = 3) {
  launch_ranks(ranks, [&](DistributedPtr dist) {
    Engine engine(dist, std::make_shared<Odd>(), odd_config(stage));
    engine.train_batch([&] { return odd_batch(engine, 0); });
    engine.save_checkpoint(folder.path().string(), "", {{"note", "kept"}});
  });
}

std::string load_error(const TempFolder& folder, int ranks, std::shared_ptr<nn::Model> model = nullptr) {
  try {
    launch_ranks(ranks, [&](DistributedPtr dist) {
      Engine engine(dist, model ? model : std::make_shared<Odd>(), odd_config(3));
      engine.load_checkpoint(folder.path().string());
    });
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

TEST(Checkpoint, KeepsCountersAndTheCallersStrings) {
  TempFolder folder;
  save_one(folder, 2);
  EXPECT_EQ(sherd::testing::read_text(folder / "latest"), "global_step1\n");
  launch_ranks(2, [&](DistributedPtr dist) {
    Engine engine(dist, std::make_shared<Odd>(), odd_config(0));  // another stage reads the same files
    const auto client = engine.load_checkpoint(folder.path().string());
    EXPECT_EQ(client.at("note"), "kept");
    EXPECT_EQ(engine.global_steps(), 1);
    EXPECT_EQ(engine.global_samples(), 8);
    EXPECT_EQ(engine.optimizer()->steps(), 1);
  });
}

TEST(Checkpoint, SavingOverATagReplacesItWhole) {
  TempFolder folder;
  save_one(folder, 2);
  save_one(folder, 2);
  EXPECT_EQ(load_error(folder, 2), "");
  EXPECT_FALSE(std::filesystem::exists(folder / "global_step1.partial"));
}

TEST(Checkpoint, DamageIsFoundAndNamed) {
  TempFolder folder;
  save_one(folder, 2);
  const auto file = folder / "global_step1" / "rank_00001.safetensors";
  const auto size = std::filesystem::file_size(file);
  {
    std::fstream out(file, std::ios::in | std::ios::out | std::ios::binary);
    out.seekp(static_cast<std::streamoff>(size) - 3);
    out.put('\x5a');
  }
  EXPECT_NE(load_error(folder, 2).find("rank_00001.safetensors is damaged"), std::string::npos)
      << load_error(folder, 2);
  std::filesystem::resize_file(file, size / 2);
  EXPECT_NE(load_error(folder, 2).find("rank_00001.safetensors"), std::string::npos);
  std::filesystem::remove(file);
  EXPECT_NE(load_error(folder, 2).find("rank_00001.safetensors"), std::string::npos);
  std::filesystem::remove(folder / "latest");
  EXPECT_NE(load_error(folder, 2).find("latest"), std::string::npos);
}

TEST(Checkpoint, AnotherModelIsRefused) {
  TempFolder folder;
  save_one(folder, 1);
  class Other : public nn::Model {
   public:
    Other() : layer_(add("layer0", std::make_shared<nn::Linear>(8, 4))) {}

   protected:
    nn::Var forward(nn::Tape& tape, const tensor::Batch& batch) override {
      return autograd::mean_squared_error((*layer_)(tape, tape.input(batch.at("x"))), batch.at("y"));
    }

   private:
    std::shared_ptr<nn::Linear> layer_;
  };
  const std::string error = load_error(folder, 1, std::make_shared<Other>());
  EXPECT_NE(error.find("holds another model: of the parameters "), std::string::npos) << error;
  EXPECT_NE(error.find("layer0.weight is [8, 8] there and [4, 8] here"), std::string::npos) << error;
  EXPECT_NE(error.find(" is only there ("), std::string::npos) << error;
  EXPECT_NE(error.find("more. Go on with the model that was saved"), std::string::npos) << error;
}

TEST(Checkpoint, LoadingEndsWhatANanLossLeft) {
  TempFolder folder;
  const auto run = [&](bool stumble) {
    double loss = 0;
    launch_ranks(2, [&](DistributedPtr dist) {
      Engine engine(dist, std::make_shared<Odd>(), odd_config(3));
      engine.train_batch([&] { return odd_batch(engine, 0); });
      if (stumble) {
        engine.save_checkpoint(folder.path().string());
        const float nan = std::numeric_limits<float>::quiet_NaN();
        EXPECT_THROW(engine.train_batch([&] { return odd_batch(engine, 1, nan); }), Error);
        engine.load_checkpoint(folder.path().string());
      }
      const double got = engine.train_batch([&] { return odd_batch(engine, 1); }).loss;
      EXPECT_EQ(engine.global_steps(), 2);
      if (dist->rank() == 0) loss = got;
    });
    return loss;
  };
  EXPECT_EQ(run(true), run(false));
}

TEST(Checkpoint, LoadingEndsWhatAFailedBackwardLeft) {
  // Gradients wait for a bucket to fill (500 MB), or are under way as soon as they are there (64 elements);
  // with replicas some of them wait for what others send only when they are reminded.
  struct Layout {
    int ranks, shard_size;
  };
  for (const char* schedule :
       {R"("overlap_comm": false)", R"("overlap_comm": true, "reduce_bucket_size": 64)"})
    for (const auto& [ranks, shard_size] : {Layout{2, 2}, Layout{2, 1}, Layout{3, 1}, Layout{4, 2}})
      for (const int stage : {1, 2, 3})
        for (const bool saves : {false, true}) {
          TempFolder folder;
          const auto run = [&, ranks = ranks, shard_size = shard_size](bool stumble) {
            std::vector<double> out;
            comm::CommOptions options;
            options.timeout_seconds = 20;
            launch_ranks(
                ranks,
                [&](DistributedPtr dist) {
                  auto model = std::make_shared<Brittle>();
                  config::Config config = odd_config(stage, "", schedule);
                  config.parallel.shard_size = shard_size;
                  Engine engine(dist, model, config);
                  engine.train_batch([&] { return odd_batch(engine, 0); });
                  if (stumble) {
                    if (!saves) engine.save_checkpoint(folder.path().string());
                    model->fails = true;
                    const auto loss = engine.forward(odd_batch(engine, 7));
                    EXPECT_THROW(engine.backward(loss), Error);
                    model->fails = false;
                    if (saves) engine.save_checkpoint(folder.path().string());
                    engine.load_checkpoint(folder.path().string());
                  }
                  for (int step = 1; step < 4; ++step) {
                    const auto& report = engine.train_batch([&] { return odd_batch(engine, step); });
                    if (dist->rank() == 0) out.insert(out.end(), {report.loss, report.grad_norm});
                  }
                },
                options);
            return out;
          };
          EXPECT_EQ(run(true), run(false))
              << "stage " << stage << ", " << schedule << ", " << ranks << " ranks in groups of "
              << shard_size << (saves ? ", saved" : "");
        }
}

TEST(Checkpoint, ARateSetByTheCallerIsKept) {
  const auto run = [](const std::string& more, bool by_hand, double configured) {
    TempFolder folder;
    const auto config =
        config::parse_text(cat(R"({"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", )",
                               R"("params": {"lr": )", configured, "}}", more, "}"));
    launch_ranks(1, [&](DistributedPtr dist) {
      Engine engine(dist, std::make_shared<Odd>(), odd_config(0, more));
      engine.train_batch([&] { return odd_batch(engine, 0); });
      if (by_hand) engine.optimizer()->set_lr(0.003);
      engine.save_checkpoint(folder.path().string());
    });
    double lr = 0;
    launch_ranks(1, [&](DistributedPtr dist) {
      Engine engine(dist, std::make_shared<Odd>(), config);
      engine.load_checkpoint(folder.path().string());
      lr = engine.get_lr().front();
      engine.train_batch([&] { return odd_batch(engine, 1); });
      EXPECT_EQ(engine.last_step().lr.front(), lr);
    });
    return lr;
  };
  EXPECT_EQ(run("", true, 0.01), 0.003);
  EXPECT_EQ(run("", false, 0.02), 0.02) << "the configuration of the resumed run decides";
  const char* scheduled =
      R"(, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 0.01}})";
  EXPECT_EQ(run(scheduled, true, 0.01), 0.003) << "as the next step of the saved run would have used";
}

TEST(Checkpoint, ARateSetAfterSavingEndsWithLoading) {
  TempFolder folder;
  launch_ranks(1, [&](DistributedPtr dist) {
    Engine engine(dist, std::make_shared<Odd>(), odd_config(0));
    engine.train_batch([&] { return odd_batch(engine, 0); });
    engine.save_checkpoint(folder.path().string());
    engine.optimizer()->set_lr(0.5);
    engine.load_checkpoint(folder.path().string());
    EXPECT_EQ(engine.get_lr().front(), 0.01) << "as in a new process";
  });
}

TEST(Checkpoint, RanksThatNameDifferentTagsAreTold) {
  TempFolder folder;
  sherd::testing::expect_error(ErrorKind::comm, "checkpoint", [&] {
    launch_ranks(2, [&](DistributedPtr dist) {
      Engine engine(dist, std::make_shared<Odd>(), odd_config(1));
      engine.train_batch([&] { return odd_batch(engine, 0); });
      engine.save_checkpoint(folder.path().string(), cat(std::string(90, 't'), dist->rank()));
    });
  });
  EXPECT_FALSE(std::filesystem::exists(folder / "latest"));
}

TEST(Checkpoint, AnUnfinishedSaveIsNeverTheLatest) {
  TempFolder folder;
  save_one(folder, 2);
  // A killed run leaves a partial folder of a later step.
  std::filesystem::create_directories(folder / "global_step2.partial");
  EXPECT_EQ(load_error(folder, 2), "");
  launch_ranks(2, [&](DistributedPtr dist) {
    Engine engine(dist, std::make_shared<Odd>(), odd_config(3));
    engine.load_checkpoint(folder.path().string());
    EXPECT_EQ(engine.global_steps(), 1);
    engine.train_batch([&] { return odd_batch(engine, 1); });
    engine.save_checkpoint(folder.path().string());
  });
  EXPECT_EQ(sherd::testing::read_text(folder / "latest"), "global_step2\n");
}

}  // namespace
}  // namespace sherd::test
