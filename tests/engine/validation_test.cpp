// A validation loss is the mean over each sample of a pass, whatever the number of ranks and the size of
// micro-batches that share it: closed formulas, with samples left over behind the last whole batch.
#include <gtest/gtest.h>

#include <limits>
#include <mutex>

#include "autograd/ops.h"
#include "engine/initialize.h"
#include "engine/setup/process_grid.h"
#include "engine/trainer.h"
#include "models/gpt.h"
#include "nn/layers.h"
#include "support/equality.h"

namespace sherd::test {
namespace {

using tensor::Batch;
using tensor::Tensor;

/// Says 0 of everything, as its inputs are 0: the loss of a batch is the mean of y².
class Zero : public nn::Model {
 public:
  Zero() : linear_(add("linear", std::make_shared<nn::Linear>(1, 1, nn::LinearOptions{.bias = false}))) {}

 protected:
  nn::Var forward(nn::Tape& tape, const Batch& batch) override {
    return autograd::mean_squared_error((*linear_)(tape, tape.input(batch.at("x"))), batch.at("y"));
  }

 private:
  std::shared_ptr<nn::Linear> linear_;
};

constexpr std::int64_t held_out = 11;

/// y = 1, 2, …: of the squares the last are the largest.
std::shared_ptr<const data::Dataset> squares(device::Device& host, std::int64_t count) {
  std::vector<float> x(static_cast<std::size_t>(count), 0.0f), y;
  for (std::int64_t i = 1; i <= count; ++i) y.push_back(static_cast<float>(i));
  return data::make_tensor_dataset(
      {{"x", Tensor::of<float>(host, {count, 1}, x)}, {"y", Tensor::of<float>(host, {count, 1}, y)}});
}

/// A Trainer's lines on the held-out samples, its metric, and the samples that the engine has counted.
struct Said {
  double loss = 0, metric = 0;
  std::int64_t seen = 0;
};
Said said(int ranks, std::int64_t micro, std::int64_t training_samples, const std::string& more = "") {
  const auto host = device::make_cpu_device(1);
  const config::Config config =
      config::parse_text(cat(R"({"train_micro_batch_size_per_gpu": )", micro,
                             R"(, "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
          "training": {"steps": 1})",
                             more, "}"));
  Said out;
  std::mutex mutex;
  launch_ranks(ranks, [&](DistributedPtr dist) {
    auto made = initialize({.dist = dist,
                            .model = [] { return std::make_shared<Zero>(); },
                            .config = config,
                            .training_data = squares(*host, training_samples)});
    Engine& engine = *made.engine;
    data::SampleLoader validation(squares(*host, held_out), engine.loader_rank(), {.shuffle = false},
                                  engine.device());
    TrainerOptions options;
    options.progress = false, options.validation = &validation;
    options.metrics = [](nn::Tape&, const Batch& batch, engine::MetricSums& sums) {
      const Tensor& y = batch.at("y");
      for (std::int64_t i = 0; i < y.numel(); ++i) sums.add("mean", y.data<float>()[i]);
    };
    Trainer trainer(engine, *made.loader, options);
    trainer.run();
    const std::lock_guard lock(mutex);
    if (dist->rank() == 0)
      out = {*trainer.validation_loss(), trainer.metrics().at("mean"), engine.global_samples()};
  });
  return out;
}

TEST(Validation, IsTheMeanOverEachSampleOnAnyRanks) {
  const double mean_of_squares = (held_out + 1) * (2 * held_out + 1) / 6.0, mean = (held_out + 1) / 2.0;
  for (const std::int64_t micro : {1, 2, 4, 16})
    for (const int ranks : {1, 2, 3}) {
      const Said got = said(ranks, micro, 64);
      EXPECT_NEAR(got.loss, mean_of_squares, 1e-6 * mean_of_squares) << ranks << " ranks of " << micro;
      EXPECT_EQ(got.metric, mean) << ranks << " ranks of " << micro;
      EXPECT_EQ(got.loss, said(1, micro, 64).loss) << "to the bit";
    }
}

/// A step of sixteen sees ten samples where there are ten; four ranks see as many each, so two come twice.
TEST(Validation, CountsTheSamplesThatAStepHas) {
  EXPECT_EQ(said(1, 16, 10).seen, 10);
  EXPECT_EQ(said(4, 4, 10).seen, 12);
  EXPECT_EQ(said(2, 4, 64).seen, 8);
}

TEST(Validation, DeepSpeedsKeyDropsTheRestOfAnEpoch) {
  const auto host = device::make_cpu_device(1);
  const auto epoch_of = [&](const std::string& more) {
    std::int64_t samples = 0;
    launch_ranks(1, [&](const DistributedPtr& dist) {
      samples = initialize(
                    {.dist = dist,
                     .model = [] { return std::make_shared<Zero>(); },
                     .config = config::parse_text(cat(
                         R"({"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "SGD"})", more, "}")),
                     .training_data = squares(*host, 10)})
                    .loader->samples_per_epoch();
    });
    return samples;
  };
  EXPECT_EQ(epoch_of(""), 10);
  EXPECT_EQ(epoch_of(R"(, "dataloader_drop_last": true)"), 8);
}

/// One sample on four ranks with two expert ranks: whole micro-batches of filling go through routers and
/// experts.
TEST(Validation, RanksWithoutASampleRunAlongThroughExperts) {
  const config::Config config = config::parse_text(
      R"({"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD"}, "parallel": {"expert": 2},
          "model": {"type": "llama", "num_layers": 2, "hidden_size": 16, "num_heads": 2, "seq_length": 8, "vocab_size": 64,
                    "moe": {"experts": 4, "top_k": 2}}})");
  const auto loss_on = [&](int ranks, const config::Config& of) {
    double out = 0;
    launch_ranks(ranks, [&](const DistributedPtr& dist) {
      const auto groups = make_groups(dist, of);
      Engine engine(dist, std::make_shared<models::Gpt>(models::gpt_config(of, 64), layout_of(*groups, of)),
                    of, nullptr, nullptr, groups);
      const auto next = [&] {
        Batch batch = synthetic_batch(engine.device(), 2, 8, 64, 0, 0, 0);
        const bool has = engine.data_ranks().rank() == 0;
        std::vector<std::int32_t> labels(16, -100), filling(2, 8);
        const std::int32_t targets = has ? 8 : 0;
        if (has) std::copy_n(batch.at("labels").data<std::int32_t>(), 8, labels.begin()), filling[0] = 0;
        batch["labels"] = Tensor::of<std::int32_t>(engine.device(), {2, 8}, labels);
        batch["filling"] = Tensor::of<std::int32_t>(engine.device(), {2}, filling);
        batch["target_tokens"] = Tensor::of<std::int32_t>(engine.device(), {1}, std::span(&targets, 1));
        return data::CountedBatch{batch, has ? 1 : 0};
      };
      const double loss = engine.eval_batches(std::function<data::CountedBatch()>(next), 1);
      if (dist->rank() == 0) out = loss;
    });
    return out;
  };
  config::Config alone = config;
  alone.parallel.expert = 1;
  const double expected = loss_on(1, alone);
  EXPECT_GT(expected, 1);
  EXPECT_NEAR(loss_on(4, config), expected, 1e-5);
}

/// A rank that is left without a sample has one that does not count, whatever its loss is.
TEST(Validation, WhatDoesNotCountMayHaveNoFiniteLoss) {
  const auto host = device::make_cpu_device(1);
  launch_ranks(2, [&](const DistributedPtr& dist) {
    auto made = initialize({.dist = dist,
                            .model = [] { return std::make_shared<Zero>(); },
                            .config = config::parse_text(
                                R"({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD"}})"),
                            .training_data = squares(*host, 4)});
    Engine& engine = *made.engine;
    const bool counts = dist->rank() == 0;
    const float y = counts ? 3 : std::numeric_limits<float>::infinity();
    const float x = 0;
    const Batch batch{{"x", Tensor::of<float>(engine.device(), {1, 1}, std::span(&x, 1))},
                      {"y", Tensor::of<float>(engine.device(), {1, 1}, std::span(&y, 1))}};
    EXPECT_EQ(engine.eval_batches([&] { return data::CountedBatch{batch, counts ? 1 : 0}; }, 1), 9);
  });
}

/// Micro-batches of a language model that have no target weigh nothing, in either mean.
TEST(Validation, ABatchWithoutTargetsIsNotA0) {
  for (const char* average : {"tokens", "micro_batches"}) {
    const config::Config config = config::parse_text(cat(
        R"({"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD"}, "training": {"loss_average": ")",
        average,
        R"("}, "model": {"type": "gpt2", "num_layers": 1, "hidden_size": 16, "num_heads": 2, "seq_length": 8,
            "vocab_size": 64}})"));
    launch_ranks(1, [&](const DistributedPtr& dist) {
      Engine engine(dist, std::make_shared<models::Gpt>(models::gpt_config(config, 64)), config);
      const auto batch = [&](bool targets) {
        Batch out = synthetic_batch(engine.device(), 2, 8, 64, 0, 0, 0);
        std::int32_t count = 16;
        if (!targets) {
          out["labels"] =
              Tensor::of<std::int32_t>(engine.device(), {2, 8}, std::vector<std::int32_t>(16, -100));
          count = 0;
        }
        out["target_tokens"] = Tensor::of<std::int32_t>(engine.device(), {1}, std::span(&count, 1));
        return out;
      };
      const double alone = engine.eval_batch(batch(true));
      EXPECT_GT(alone, 1);
      int i = 0;
      EXPECT_EQ(engine.eval_batches([&] { return batch(i++ == 1); }, 3), alone) << average;
    });
  }
}

}  // namespace
}  // namespace sherd::test
