// Steps of several micro-batches in flight, on one rank and over the stages of a pipeline: the losses, norms
// and weights of one micro-batch after the other, to the bit.
#include <gtest/gtest.h>

#include <limits>
#include <map>
#include <mutex>

#include "autograd/ops.h"
#include "engine/initialize.h"
#include "engine/pipeline/train_schedule.h"
#include "nn/layered_model.h"
#include "nn/layers.h"
#include "sharding/parallel/linear.h"
#include "sharding/sharded_model.h"
#include "support/expect_error.h"

namespace sherd::test {
namespace {

using sherd::testing::expect_error;
using tensor::Tensor;

constexpr std::int64_t width = 8, rows = 4;

/// Two products that tensor ranks share, with tanh and dropout.
class Hidden : public nn::Layer {
 public:
  explicit Hidden(const parallel::Layout& layout)
      : up_(add("up", std::make_shared<parallel::ColumnLinear>(width, 2 * width, layout))),
        down_(add("down", std::make_shared<parallel::RowLinear>(2 * width, width, layout))) {
    add("dropout", dropout_);
    mark_block();
  }

 protected:
  nn::Var forward(nn::Tape& tape, const nn::Var& x) override {
    return (*dropout_)(tape, (*down_)(tape, autograd::tanh((*up_)(tape, x))));
  }

 private:
  std::shared_ptr<nn::Layer> up_, down_;
  std::shared_ptr<nn::Dropout> dropout_ = std::make_shared<nn::Dropout>(0.2);
};

/// Six such parts, the last of which gives the loss.
class Stack : public nn::LayeredModel {
 public:
  static constexpr std::size_t count = 6;
  explicit Stack(const parallel::Layout& layout) {
    for (std::size_t i = 0; i < count; ++i) {
      layers_.push_back(add(cat("part", i), std::make_shared<Hidden>(layout)));
      append_part({layers_.back()});
    }
  }

 protected:
  nn::Var forward_part(nn::Tape& tape, std::size_t part, const nn::Var& x,
                       const tensor::Batch& batch) override {
    const nn::Var y = (*layers_[part])(tape, part == 0 ? tape.input(batch.at("x")) : x);
    return part + 1 < count ? y : autograd::mean_squared_error(y, batch.at("y"));
  }

 private:
  std::vector<std::shared_ptr<Hidden>> layers_;
};

std::shared_ptr<nn::Model> stack(const parallel::Layout& layout) {
  return std::make_shared<Stack>(layout);
}

struct Case {
  const char* schedule = "accumulate";
  int stages = 1, chunks = 1, data = 1, zero = 0;
  std::int64_t micro_batches = 4;
  bool early = false;  ///< the update begins beside backward
  int tensor = 1;

  config::Config config() const {
    return config::parse_text(
        cat(R"({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": )", micro_batches,
            R"(, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "training": {"seed": 5}, )",
            early ? R"("gradient_clipping": 0, "bf16": {"enabled": true, "check_grad_overflow": false}, )"
                  : R"("gradient_clipping": 0.5, )",
            R"("zero_optimization": {"stage": )", zero,
            early ? R"(, "offload_optimizer": {"device": "cpu"})" : "", R"(}, "parallel": {"schedule": ")",
            schedule, R"(")", tensor > 1 ? R"(, "sequence_parallel": false)" : "", R"(, "tensor": )", tensor,
            R"(, "pipeline": )", stages, R"(, "virtual_stages": )", chunks, "}}"));
  }
};
void PrintTo(const Case& c, std::ostream* to) {
  *to << c.schedule << ", " << c.stages << " stages of " << c.chunks << ", data " << c.data << ", zero "
      << c.zero << ", " << c.micro_batches << " micro-batches" << (c.early ? ", early update" : "")
      << ", tensor " << c.tensor;
}

struct ScheduleOutcome {
  std::vector<double> losses, norms;
  double evaluation = 0;
  std::map<std::string, std::vector<std::byte>> weights;  ///< by parameter
  bool operator==(const ScheduleOutcome&) const = default;
};

tensor::Batch batch_of(device::Device& device, std::int64_t number) {
  tensor::Batch batch;
  for (const char* name : {"x", "y"}) {
    std::vector<float> values;
    for (std::int64_t i = 0; i < rows * width; ++i)
      values.push_back(static_cast<float>((number * 31 + i * 7 + name[0]) % 23) / 11.0f - 1.0f);
    batch[name] = Tensor::of<float>(device, {rows, width}, values);
  }
  return batch;
}

/// Adds the weights of the parts that this rank has.
void add_weights(Engine& engine, ScheduleOutcome& out) {
  const engine::StageLayout& stages = engine.stages();
  const int tensor = engine.groups().group(comm::Axis::tensor).rank();
  for (const auto& unit : engine.sharded().units()) {
    const auto lease = unit->gather();
    for (const auto& segment : unit->segments())
      for (const auto& parameter : segment->layout().parameters()) {
        const auto part = static_cast<std::size_t>(parameter->name.at(4) - '0');  // "part3.up.bias"
        if (stages.stage_of(part) != stages.stage) continue;
        const Tensor& value = parameter->value;
        out.weights[cat(parameter->name, " of tensor rank ", tensor)] = {value.raw(),
                                                                         value.raw() + value.bytes()};
      }
  }
}

constexpr int schedule_steps = 3;

/// Trains some steps: the results on which all ranks agree, and the weights of all.
ScheduleOutcome train_schedule(const Case& c) {
  ScheduleOutcome out;
  std::mutex mutex;
  launch_ranks(c.stages * c.data * c.tensor, [&](DistributedPtr dist) {
    const auto made = initialize({.dist = dist, .model = stack, .config = c.config()});
    Engine& engine = *made.engine;
    ScheduleOutcome mine;
    std::int64_t next = engine.data_ranks().rank();
    const auto batches = [&] { return batch_of(engine.device(), std::exchange(next, next + c.data)); };
    for (int step = 0; step < schedule_steps; ++step) {
      const auto& report = engine.train_batch(batches);
      // The order of the first step's gradients is known.
      if (c.early && c.data == 1 && step + 1 == schedule_steps) {
        EXPECT_GT(report.early_updates, 0) << "rank " << dist->rank();
      }
      mine.losses.push_back(report.loss);
      mine.norms.push_back(report.grad_norm);
    }
    mine.evaluation = engine.eval_batches(batches, 2);
    const std::lock_guard lock(mutex);
    if (!out.losses.empty()) {
      EXPECT_EQ(out.losses, mine.losses) << "rank " << dist->rank();
      EXPECT_EQ(out.norms, mine.norms) << "rank " << dist->rank();
      EXPECT_EQ(out.evaluation, mine.evaluation) << "rank " << dist->rank();
    }
    mine.weights = std::move(out.weights);
    out = std::move(mine);
    add_weights(engine, out);
  });
  return out;
}

class Schedules : public ::testing::TestWithParam<Case> {};

TEST_P(Schedules, GiveTheBitsOfOneMicroBatchAfterTheOther) {
  Case one_by_one = GetParam();
  one_by_one.schedule = "accumulate";
  one_by_one.stages = one_by_one.chunks = 1;
  const ScheduleOutcome expected = train_schedule(one_by_one);
  ASSERT_EQ(expected.weights.size(), 4 * Stack::count * static_cast<std::size_t>(one_by_one.tensor));
  const ScheduleOutcome found = train_schedule(GetParam());
  EXPECT_EQ(found.losses, expected.losses);
  EXPECT_EQ(found.norms, expected.norms);
  EXPECT_EQ(found.evaluation, expected.evaluation);
  EXPECT_TRUE(found.weights == expected.weights);
}

INSTANTIATE_TEST_SUITE_P(OneStage, Schedules,
                         ::testing::Values(Case{"layered"}, Case{"layered", 1, 1, 2, 0},
                                           Case{"layered", 1, 1, 2, 3}, Case{"gpipe", 1, 1, 1, 2},
                                           Case{"1f1b", 1, 1, 2, 3}, Case{"zero_bubble", 1, 1, 2, 3}));
INSTANTIATE_TEST_SUITE_P(TwoStages, Schedules,
                         ::testing::Values(Case{"gpipe", 2}, Case{"1f1b", 2}, Case{"interleaved", 2, 2},
                                           Case{"zero_bubble", 2}, Case{"1f1b", 2, 1, 2, 3},
                                           Case{"interleaved", 2, 2, 2, 0}));
INSTANTIATE_TEST_SUITE_P(MoreStages, Schedules,
                         ::testing::Values(Case{"1f1b", 3, 1, 1, 0, 7}, Case{"interleaved", 3, 2, 1, 0, 6},
                                           Case{"1f1b", 4, 1, 1, 2, 2}, Case{"zero_bubble", 4, 1, 1, 3, 8},
                                           Case{"gpipe", 4}));
INSTANTIATE_TEST_SUITE_P(TensorRanks, Schedules,
                         ::testing::Values(Case{"1f1b", 2, 1, 1, 1, 4, false, 2},
                                           Case{"zero_bubble", 2, 1, 2, 3, 4, false, 2}));
INSTANTIATE_TEST_SUITE_P(EarlyUpdate, Schedules,
                         ::testing::Values(Case{"layered", 1, 1, 1, 3, 4, true},
                                           Case{"1f1b", 2, 1, 2, 2, 4, true},
                                           Case{"interleaved", 2, 2, 1, 1, 4, true}));

/// Parts of equal weight. Narayanan et al. 2021, §2.2; Qi et al. 2024, table 1.
TEST(Schedules, TellTheBubblesOfThePapers) {
  const auto bubble = [](const Case& c, const char* recompute) {
    config::Config config = c.config();
    config.batch = config::resolve_batch(config, 1);
    if (std::string_view(recompute) == "full") config.training.recompute = Recompute::full;
    Stack model{{}};
    const engine::StageLayout layout = engine::make_stage_layout(model, config.parallel, 0);
    const engine::TrainSchedule schedule = engine::choose_schedule(config, model, layout, 1);
    const std::string line = engine::describe_schedule(schedule, config, model, 1);
    EXPECT_NE(line.find(cat("schedule ", c.schedule, ", ", c.stages, " stages, ")), std::string::npos)
        << line;
    return engine::ideal_bubble(schedule, config, model);
  };
  EXPECT_NEAR(bubble({"1f1b", 2, 1, 1, 0, 8}, "none"), 1 / 8.0, 1e-12);
  EXPECT_NEAR(bubble({"1f1b", 6, 1, 1, 0, 8}, "full"), 5 / 8.0, 1e-12);
  EXPECT_NEAR(bubble({"interleaved", 3, 2, 1, 0, 9}, "none"), 2 / 18.0, 1e-12);
  EXPECT_NEAR(bubble({"zero_bubble", 3, 1, 1, 0, 6}, "none"), 2 * 1 / (6 * 3.0), 1e-12);
  EXPECT_NEAR(bubble({"zero_bubble", 3, 1, 1, 0, 6}, "full"), 2 * 2 / (6 * 4.0), 1e-12);
}

/// Only the last stage has seen it, in one micro-batch of one data rank.
TEST(Schedules, ALossThatIsNoNumberEndsTheStepOnAllStagesAndChangesNothing) {
  const Case c{"1f1b", 2, 1, 2, 1};
  const ScheduleOutcome expected = train_schedule(c);
  launch_ranks(4, [&](DistributedPtr dist) {
    const auto made = initialize({.dist = dist, .model = stack, .config = c.config()});
    Engine& engine = *made.engine;
    std::int64_t next = engine.data_ranks().rank();
    const auto batches = [&] { return batch_of(engine.device(), std::exchange(next, next + c.data)); };
    for (int step = 0; step < schedule_steps; ++step) {
      if (step == 1)
        expect_error(ErrorKind::numerics, "the loss is nan at step 2: nothing was updated", [&] {
          engine.train_batch([&] {
            tensor::Batch batch = batch_of(engine.device(), 5);
            if (dist->rank() == 3) *batch["y"].data<float>() = std::numeric_limits<float>::quiet_NaN();
            return batch;
          });
        });
      engine.train_batch(batches);
      EXPECT_EQ(engine.last_step().loss, expected.losses[static_cast<std::size_t>(step)]);
      EXPECT_EQ(engine.last_step().grad_norm, expected.norms[static_cast<std::size_t>(step)]);
    }
  });
}

/// The other stages wait for what it was to send.
TEST(Schedules, AStageThatThrowsInTheMiddleIsNamedByTheOthersAndLeavesNoActivations) {
  std::mutex mutex;
  std::vector<std::string> errors(3);
  EXPECT_THROW(
      launch_ranks(
          3,
          [&](DistributedPtr dist) {
            const auto made = initialize({.dist = dist, .model = stack, .config = Case{"1f1b", 3}.config()});
            Engine& engine = *made.engine;
            int calls = 0;
            try {
              engine.train_batch([&] {
                if (dist->rank() == 0 && ++calls == 3) fail(ErrorKind::data, "no more text");
                return batch_of(engine.device(), 0);
              });
            } catch (const Error& error) {
              const std::lock_guard lock(mutex);
              errors[static_cast<std::size_t>(dist->rank())] = error.what();
            }
            EXPECT_EQ(engine.device().ledger().current(device::Tier::device, device::Category::activations),
                      0u)
                << "rank " << dist->rank();
            EXPECT_THROW(engine.train_batch([&] { return batch_of(engine.device(), 0); }), Error);
            fail(ErrorKind::data, "done");
          }),
      Error);
  EXPECT_EQ(errors[0], "no more text");
  for (const int rank : {1, 2}) {
    EXPECT_NE(errors[static_cast<std::size_t>(rank)].find("rank 0 failed: no more text"), std::string::npos)
        << errors[static_cast<std::size_t>(rank)];
  }
}

}  // namespace
}  // namespace sherd::test
