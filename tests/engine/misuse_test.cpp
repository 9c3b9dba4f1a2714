// Mistakes that callers do not notice: blocks that differ between ranks, losses of other passes, shared
// models.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <array>

#include "engine/initialize.h"
#include "support/expect_error.h"
#include "support/odd_models.h"
#include "support/temp_folder.h"

namespace sherd::test {
namespace {

using sherd::testing::expect_error;
using tensor::Tensor;

/// Three blocks of one size, of which a rank may leave one out.
class Skipping : public nn::Model {
 public:
  Skipping() {
    for (int i = 0; i < 3; ++i) {
      blocks_.push_back(add(cat("block", i), std::make_shared<nn::Linear>(8, 8)));
      blocks_.back()->mark_block();
    }
    out_ = add("out", std::make_shared<nn::Linear>(8, 1));
  }
  int left_out = -1;

 protected:
  nn::Var forward(nn::Tape& tape, const tensor::Batch& batch) override {
    nn::Var x = tape.input(batch.at("x"));
    for (int i = 0; i < 3; ++i)
      if (i != left_out) x = autograd::tanh((*blocks_[static_cast<std::size_t>(i)])(tape, x));
    return autograd::mean_squared_error((*out_)(tape, x), batch.at("y"));
  }

 private:
  std::vector<std::shared_ptr<nn::Linear>> blocks_;
  std::shared_ptr<nn::Linear> out_;
};

std::vector<float> weights(Engine& engine) {
  std::vector<float> out;
  for (const auto& parameter : engine.module().parameters()) {
    const auto lease = engine.sharded().gather(*parameter);
    const float* data = parameter->value.data<float>();
    out.insert(out.end(), data, data + parameter->numel());
  }
  return out;
}

config::Config sgd(int stage, const std::string& zero, const std::string& more = "") {
  config::Config out = odd_config(stage, cat(more, R"(, "parallel": {"timeout_seconds": 60})"), zero);
  static_cast<config::OptimizerRule&>(out.optimizer) = out.optimizer.for_type(config::OptimizerType::sgd);
  return out;
}

TEST(Misuse, RanksThatRunDifferentBlocksOfOneSizeAreToldWhich) {
  for (const int stage : {0, 1, 2, 3})
    for (const bool persistent : {false, true})
      for (const char* bucket : {"500000000", "200", "0"})
        for (const char* overlap : {"false", "true"}) {
          if (persistent && stage < 3) continue;
          SCOPED_TRACE(cat("stage ", stage, persistent ? ", persistent" : "", ", bucket ", bucket,
                           ", overlap ", overlap));
          config::Config config =
              sgd(stage, cat(R"("reduce_bucket_size": )", bucket, R"(, "overlap_comm": )", overlap));
          config.zero.param_persistence_threshold = persistent ? 1000 : 0;
          expect_error(ErrorKind::comm, "mismatched calls", [&] {
            launch_ranks(2, [&](DistributedPtr dist) {
              auto model = std::make_shared<Skipping>();
              Engine engine(dist, model, config);
              model->left_out = dist->rank();
              engine.train_batch([&] { return odd_batch(engine, 0); });
            });
          });
        }
}

TEST(Misuse, TheErrorNamesTheBlocksOfBothRanks) {
  try {
    launch_ranks(2, [&](DistributedPtr dist) {
      auto model = std::make_shared<Skipping>();
      Engine engine(dist, model, sgd(2, R"("overlap_comm": false)"));
      model->left_out = dist->rank();
      engine.train_batch([&] { return odd_batch(engine, 0); });
    });
    ADD_FAILURE() << "the ranks' gradients were added up";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr("\"block2, block1, root gradients\""));
    EXPECT_THAT(error.what(), ::testing::HasSubstr("\"block2, block0, root gradients\""));
  }
}

/// Between replicas sums travel point to point, where nobody compares what they are of.
TEST(Misuse, ReplicasThatRunDifferentBlocksOfOneSizeAreToldWhich) {
  for (const int stage : {0, 1, 2, 3})
    for (const char* overlap : {"false", "true"})
      for (const char* reduction : {"ordered", "native"}) {
        SCOPED_TRACE(cat("stage ", stage, ", overlap ", overlap, ", ", reduction));
        config::Config config =
            sgd(stage, cat(R"("reduce_bucket_size": 500000000, "overlap_comm": )", overlap));
        config.parallel.shard_size = 2;
        config.parallel.reduction =
            std::string(reduction) == "native" ? Reduction::native : Reduction::ordered;
        expect_error(ErrorKind::comm, "mismatched calls", [&] {
          launch_ranks(4, [&](DistributedPtr dist) {
            auto model = std::make_shared<Skipping>();
            Engine engine(dist, model, config);
            model->left_out = dist->rank() / 2;
            engine.train_batch([&] { return odd_batch(engine, 0); });
          });
        });
      }
}

/// The ranks that find it say so; others may hear first that one of these has left.
TEST(Misuse, ReplicasThatRunDifferentNumbersOfBlocksAreTold) {
  for (const int stage : {0, 2, 3})
    for (const char* bucket : {"500000000", "200", "0"})
      for (const char* overlap : {"false", "true"})
        for (const int more : {0, 1}) {  // the replica that runs one block more
          config::Config config =
              sgd(stage, cat(R"("reduce_bucket_size": )", bucket, R"(, "overlap_comm": )", overlap));
          config.parallel.shard_size = 2;
          std::array<std::string, 4> errors;
          EXPECT_THROW(launch_ranks(4,
                                    [&](DistributedPtr dist) {
                                      try {
                                        auto model = std::make_shared<Skipping>();
                                        Engine engine(dist, model, config);
                                        model->left_out = dist->rank() / 2 == more ? -1 : 0;
                                        engine.train_batch([&] { return odd_batch(engine, 0); });
                                      } catch (const Error& error) {
                                        errors[static_cast<std::size_t>(dist->rank())] = error.what();
                                        throw;
                                      }
                                    }),
                       Error);
          SCOPED_TRACE(cat("stage ", stage, ", bucket ", bucket, ", overlap ", overlap, ", replica ", more));
          EXPECT_THAT(errors, ::testing::Contains(::testing::HasSubstr("mismatched transfer")));
          EXPECT_THAT(errors, ::testing::Each(::testing::Not(::testing::AnyOf(
                                  ::testing::IsEmpty(), ::testing::HasSubstr("did not come")))));
        }
}

/// A step of `count` micro-batches over all ranks, of which this one runs every so many; the m-th leaves a
/// block out.
void run_micro_batches(Engine& engine, Skipping& model, int count,
                       const std::function<int(int m)>& left_out) {
  for (int m = engine.dist().rank(); m < count; m += engine.dist().world_size()) {
    model.left_out = left_out(m);
    std::vector<float> x;
    for (int i = 0; i < 32; ++i)
      x.push_back(uniform_at({3, static_cast<std::uint64_t>(m)}, static_cast<std::uint64_t>(i)));
    engine.backward(
        engine.forward({{"x", Tensor::of<float>(engine.device(), {4, 8}, x)},
                        {"y", Tensor::of<float>(engine.device(), {4, 1}, std::vector<float>(4, 0.5f))}}));
    engine.step();
  }
}

/// Two ranks that leave out different blocks in the first of two micro-batches: stages 0 and 1 reduce at the
/// last, when both have gradients of all, so nothing is wrong; one rank that runs the same four micro-batches
/// is the oracle.
TEST(Misuse, DifferentBlocksBeforeTheBoundaryAreSummedWhereTheyBelong) {
  const auto run = [](int ranks, int stage) {
    std::vector<float> out;
    launch_ranks(ranks, [&](DistributedPtr dist) {
      auto model = std::make_shared<Skipping>();
      Engine engine(
          dist, model,
          sgd(stage, R"("overlap_comm": false)", cat(R"(, "gradient_accumulation_steps": )", 4 / ranks)));
      // Each block is left out by one of the first two.
      run_micro_batches(engine, *model, 4, [](int m) { return m < 2 ? m : -1; });
      if (const auto all = weights(engine); dist->rank() == 0) out = all;
    });
    return out;
  };
  const auto expected = run(1, 0);
  for (const int stage : {0, 1}) {
    const auto found = run(2, stage);
    ASSERT_EQ(found.size(), expected.size());
    for (std::size_t i = 0; i < found.size(); ++i) EXPECT_NEAR(found[i], expected[i], 1e-6) << i;
  }
}

/// A block that only the first micro-batches of a step run has its sum when the last ones end; replicas agree
/// on it too. One rank that runs the same eight micro-batches is the oracle.
TEST(Misuse, BlocksThatTheLastMicroBatchLeavesOutAreAgreedOnByReplicas) {
  const auto run = [](int ranks, int stage, int shard_size) {
    std::vector<std::vector<float>> out(static_cast<std::size_t>(ranks));
    launch_ranks(ranks, [&](DistributedPtr dist) {
      auto model = std::make_shared<Skipping>();
      config::Config config =
          sgd(stage, R"("overlap_comm": false)", cat(R"(, "gradient_accumulation_steps": )", 8 / ranks));
      config.parallel.shard_size = shard_size;
      Engine engine(dist, model, config);
      run_micro_batches(engine, *model, 8, [](int m) { return m < 4 ? -1 : 1; });
      out[static_cast<std::size_t>(dist->rank())] = weights(engine);
    });
    return out;
  };
  const auto expected = run(1, 0, 1).front();
  for (const int stage : {0, 1, 2, 3})
    for (const int shard_size : {1, 2, 4}) {
      SCOPED_TRACE(cat("stage ", stage, ", shard_size ", shard_size));
      for (const std::vector<float>& found : run(4, stage, shard_size)) {
        ASSERT_EQ(found.size(), expected.size());
        for (std::size_t i = 0; i < found.size(); ++i) ASSERT_NEAR(found[i], expected[i], 1e-6) << i;
      }
    }
}

TEST(Misuse, BackwardTakesOnlyTheLossOfItsForward) {
  const auto run = [](const config::Config& config, bool stumble) {
    std::vector<float> out;
    launch_ranks(2, [&](DistributedPtr dist) {
      Engine engine(dist, std::make_shared<Odd>(), config);
      autograd::Var old, evaluated;
      for (int step = 0; step < 3; ++step) {
        if (stumble) {
          engine.eval();
          evaluated = engine.forward(odd_batch(engine, step));
          engine.train();
        }
        const autograd::Var loss = engine.forward(odd_batch(engine, step));
        if (stumble) {
          expect_error(ErrorKind::usage, "without recording", [&] { engine.backward(evaluated); });
          if (old.defined())
            expect_error(ErrorKind::usage, "earlier forward pass", [&] { engine.backward(old); });
        }
        engine.backward(loss);
        engine.step();
        old = loss;
      }
      if (const auto all = weights(engine); dist->rank() == 0) out = all;
    });
    return out;
  };
  for (const int stage : {0, 3})
    EXPECT_EQ(run(odd_config(stage), true), run(odd_config(stage), false)) << stage;
}

TEST(Misuse, BackwardRefusesTheLossOfAnotherEngine) {
  launch_ranks(1, [](DistributedPtr dist) {
    Engine one(dist, std::make_shared<Odd>(), odd_config(0)),
        other(dist, std::make_shared<Odd>(), odd_config(0));
    const autograd::Var loss = one.forward(odd_batch(one, 0));
    other.forward(odd_batch(other, 0));
    expect_error(ErrorKind::usage, "another engine's", [&] { other.backward(loss); });
    one.backward(loss);
  });
}

TEST(Misuse, SavingInTheMiddleOfAMicroBatchIsRefused) {
  const sherd::testing::TempFolder folder;
  launch_ranks(2, [&](DistributedPtr dist) {
    Engine engine(dist, std::make_shared<Odd>(), odd_config(2));
    const auto refused = [&] {
      expect_error(ErrorKind::usage, "step() has not",
                   [&] { engine.save_checkpoint(folder.path().string()); });
    };
    const autograd::Var loss = engine.forward(odd_batch(engine, 0));
    refused();
    engine.backward(loss);
    refused();
    engine.step();
    engine.save_checkpoint(folder.path().string());
  });
}

TEST(Misuse, AModelThatRanksShareIsRefused) {
  const auto shared = std::make_shared<Odd>();
  for (const int stage : {0, 3})
    expect_error(ErrorKind::usage, "every rank builds its own", [&] {
      launch_ranks(3, [&](DistributedPtr dist) {
        const auto made = initialize({.dist = dist, .model = shared, .config = odd_config(stage)});
        dist->world().barrier();  // the rank that has it keeps it while the others ask
      });
    });
}

TEST(Misuse, APartThatTwoEnginesShareIsRefusedUntilTheFirstIsGone) {
  launch_ranks(1, [](DistributedPtr dist) {
    const auto model = std::make_shared<Odd>();
    auto engine = std::make_unique<Engine>(dist, model, odd_config(0));
    expect_error(ErrorKind::usage, "already belongs to another engine",
                 [&] { Engine(dist, model, odd_config(0)); });
    engine->train_batch([&] { return odd_batch(*engine, 0); });  // which is none the worse for it
    engine.reset();
    Engine again(dist, model, odd_config(0));
    again.train_batch([&] { return odd_batch(again, 0); });
  });
}

}  // namespace
}  // namespace sherd::test
