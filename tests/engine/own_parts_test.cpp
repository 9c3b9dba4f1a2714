// Cut models whose parts are not like a GPT's blocks: frozen, without parameters, or handing on what they
// were given. Each trains as it does uncut, to the bit. And an evaluation that fails on one stage fails on
// all.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "autograd/ops.h"
#include "engine/initialize.h"
#include "nn/layered_model.h"
#include "nn/layers.h"
#include "support/equality.h"
#include "support/expect_error.h"

namespace sherd::test {
namespace {

using tensor::Tensor;
using ::testing::HasSubstr;
using Layers = std::vector<std::shared_ptr<nn::Layer>>;

std::shared_ptr<nn::Layer> linear() {
  return std::make_shared<nn::Linear>(8, 8);
}
std::shared_ptr<nn::Layer> tanh() {
  return std::make_shared<nn::Function>(autograd::tanh);
}
std::shared_ptr<nn::Layer> same() {
  return std::make_shared<nn::Dropout>(0.0f);
}
std::shared_ptr<nn::Layer> frozen() {
  auto layer = linear();
  layer->freeze();
  return layer;
}

std::shared_ptr<nn::Model> model_of(const Layers& layers) {
  return std::make_shared<nn::SequentialModel>(
      layers, [](nn::Tape& tape, const tensor::Batch& batch) { return tape.input(batch.at("x")); },
      [](const nn::Var& y, const tensor::Batch& batch) {
        return autograd::mean_squared_error(y, batch.at("y"));
      });
}

struct Cut {
  const char* schedule;
  int stages, virtual_stages;
};

config::Config config_of(const Cut& cut, const char* recompute, int zero = 0) {
  return config::parse_text(cat(
      R"({"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4, "gradient_clipping": 0.5,
              "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
              "zero_optimization": {"stage": )",
      zero, R"(}, "training": {"seed": 5, "recompute": ")", recompute,
      R"("}, "parallel": {"timeout_seconds": 20, "schedule": ")", cut.schedule, R"(", "pipeline": )",
      cut.stages, R"(, "virtual_stages": )", cut.virtual_stages, "}}"));
}

tensor::Batch batch_of(device::Device& device, int number) {
  tensor::Batch batch;
  for (const char* name : {"x", "y"}) {
    std::vector<float> values;
    for (int i = 0; i < 32; ++i)
      values.push_back(static_cast<float>((number * 31 + i * 7 + name[0]) % 23) / 11.0f - 1.0f);
    batch[name] = Tensor::of<float>(device, {4, 8}, values);
  }
  return batch;
}

/// Losses and norms of three steps, and the loss of an evaluation after them, as rank 0 tells them.
std::vector<double> train_cut(const std::function<Layers()>& layers, const Cut& cut, const char* recompute,
                              int zero) {
  std::vector<double> told;
  launch_ranks(cut.stages, [&](DistributedPtr dist) {
    Engine engine(dist, model_of(layers()), config_of(cut, recompute, zero));
    std::vector<double> mine;
    int next = 0;
    for (int step = 0; step < 3; ++step) {
      engine.train_batch([&] { return batch_of(engine.device(), next++); });
      mine.push_back(engine.last_step().loss);
      mine.push_back(engine.last_step().grad_norm);
    }
    mine.push_back(engine.eval_batch(batch_of(engine.device(), 99)));
    if (dist->rank() == 0) told = mine;
  });
  return told;
}

struct OwnPartsCase {
  const char* name;
  std::function<Layers()> layers;
};
const OwnPartsCase own_parts_cases[] = {
    {"first_part_frozen",
     [] {
       return Layers{frozen(), tanh(), linear(), linear()};
     }},
    {"only_the_last_part_trains",
     [] {
       return Layers{frozen(), frozen(), tanh(), linear()};
     }},
    {"frozen_in_the_middle",
     [] {
       return Layers{linear(), frozen(), frozen(), linear()};
     }},
    {"first_part_without_parameters",
     [] {
       return Layers{tanh(), linear(), linear(), tanh()};
     }},
    {"stages_without_parameters",
     [] {
       return Layers{linear(), tanh(), tanh(), linear()};
     }},
    {"a_part_gives_back_its_input",
     [] {
       return Layers{linear(), same(), linear(), same()};
     }},
};

class OwnParts : public ::testing::TestWithParam<int> {};

TEST_P(OwnParts, TrainAsTheUncutModel) {
  const auto& layers = own_parts_cases[GetParam()].layers;
  for (const auto& [recompute, zero] : {std::pair{"none", 0}, {"full", 0}, {"full", 3}}) {
    const auto expected = train_cut(layers, {"accumulate", 1, 1}, recompute, zero);
    EXPECT_NE(expected[0], expected[2]);
    for (const Cut& cut :
         {Cut{"layered", 1, 1}, Cut{"1f1b", 2, 1}, Cut{"zero_bubble", 4, 1}, Cut{"interleaved", 2, 2}})
      EXPECT_EQ(train_cut(layers, cut, recompute, zero), expected)
          << cut.schedule << " over " << cut.stages << " stages, recompute " << recompute << ", ZeRO "
          << zero;
  }
}

INSTANTIATE_TEST_SUITE_P(All, OwnParts, ::testing::Range(0, static_cast<int>(std::ssize(own_parts_cases))),
                         [](const auto& one) { return own_parts_cases[one.param].name; });

TEST(SmallerLastBatch, IsRefusedForStages) {
  const auto rows = [](std::int64_t count) {
    const auto host = device::make_cpu_device(1);
    const Tensor x =
        Tensor::of<float>(*host, {count, 8}, std::vector<float>(static_cast<std::size_t>(8 * count)));
    return data::make_tensor_dataset({{"x", x}, {"y", x}});
  };
  const auto made = [&](std::int64_t count, bool drop_last) {
    launch_ranks(2, [&](DistributedPtr dist) {
      const auto model = model_of({linear(), linear()});
      auto trained = initialize({.dist = dist,
                                 .model = model,
                                 .config = config_of({"1f1b", 2, 1}, "none"),
                                 .training_data = rows(count),
                                 .loader_options = {.drop_last = drop_last}});
      for (int step = 0; step < 3; ++step)
        trained.engine->train_batch([&] { return trained.loader->next(); });
    });
  };
  sherd::testing::expect_error(ErrorKind::config, "drop_last", [&] { made(22, false); });
  made(22, true);
  made(24, false);
}

TEST(FailingEvaluation, EndsOnAllStages) {
  std::vector<std::string> errors(2), after(2);
  const auto told = [](const auto& call) -> std::string {
    try {
      call();
    } catch (const std::exception& error) {
      return error.what();
    }
    return {};
  };
  launch_ranks(2, [&](DistributedPtr dist) {
    const auto layers = [] { return Layers{linear(), tanh(), linear(), linear()}; };
    Engine engine(dist, model_of(layers()), config_of({"1f1b", 2, 1}, "none"));
    const auto rank = static_cast<std::size_t>(dist->rank());
    tensor::Batch broken = batch_of(engine.device(), 1);
    if (rank == 0) broken.erase("x");
    errors[rank] = told([&] { engine.eval_batch(broken); });
    after[rank] = told([&] { engine.eval_batch(batch_of(engine.device(), 2)); });
  });
  EXPECT_FALSE(errors[0].empty());
  EXPECT_THAT(errors[1], HasSubstr("rank 0 failed: " + errors[0]));
  for (const auto& text : after) EXPECT_THAT(text, HasSubstr("failed"));
}

}  // namespace
}  // namespace sherd::test
