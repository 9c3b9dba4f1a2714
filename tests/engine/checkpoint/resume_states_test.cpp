// A checkpoint that lacks what the resuming run needs is refused on all ranks before anything of the engine
// changes.
#include <gtest/gtest.h>

#include "engine/initialize.h"
#include "support/expect_error.h"
#include "support/odd_models.h"
#include "support/temp_folder.h"

namespace sherd::test {
namespace {

using sherd::testing::expect_error;
using sherd::testing::TempFolder;

constexpr const char* bf16 = R"(, "bf16": {"enabled": true})";

struct Case {
  const char *name, *saved, *resumed, *told;
  config::OptimizerType saved_type, resumed_type;
};
void PrintTo(const Case& c, std::ostream* out) {
  *out << c.name;
}

class ResumeStates : public ::testing::TestWithParam<std::tuple<int, Case>> {};

TEST_P(ResumeStates, ThatTheCheckpointLacksAreToldBeforeAnythingChanges) {
  const auto& [stage, c] = GetParam();
  const TempFolder folder;
  const auto config_of = [&, stage = stage](const char* more, config::OptimizerType type) {
    config::Config config = odd_config(stage, more);
    config.optimizer.type = type;
    return config;
  };
  launch_ranks(2, [&](DistributedPtr dist) {
    Engine engine(dist, std::make_shared<Odd>(), config_of(c.saved, c.saved_type));
    engine.train_batch([&] { return odd_batch(engine, 0); });
    engine.save_checkpoint(folder.path().string());
  });
  std::vector<double> undisturbed, refused;
  for (std::vector<double>* losses : {&undisturbed, &refused})
    launch_ranks(2, [&](DistributedPtr dist) {
      Engine engine(dist, std::make_shared<Odd>(), config_of(c.resumed, c.resumed_type));
      for (int step = 0; step < 3; ++step) {
        if (losses == &refused)
          expect_error(ErrorKind::data, c.told, [&] { engine.load_checkpoint(folder.path().string()); });
        const double loss = engine.train_batch([&] { return odd_batch(engine, step); }).loss;
        if (dist->rank() == 0) losses->push_back(loss);
      }
    });
  EXPECT_EQ(refused, undisturbed);
}

INSTANTIATE_TEST_SUITE_P(
    All, ResumeStates,
    ::testing::Combine(
        ::testing::Values(0, 3),
        ::testing::Values(Case{"sgdToAdamW", "", "", "lacks elements from 0 on of 'exp_avg.",
                               config::OptimizerType::sgd, config::OptimizerType::adamw},
                          Case{"otherMoments", bf16,
                               R"(, "bf16": {"enabled": true}, "training": {"moments_dtype": "bf16"})",
                               "in F32, and this run keeps it in bf16", config::OptimizerType::adamw,
                               config::OptimizerType::adamw})),
    [](const auto& one) { return cat("stage", std::get<0>(one.param), "_", std::get<1>(one.param).name); });

}  // namespace
}  // namespace sherd::test
