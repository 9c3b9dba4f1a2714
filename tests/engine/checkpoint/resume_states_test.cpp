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

constexpr const char *bf16_keys = R"(, "bf16": {"enabled": true})",
                     *bf16_moments_keys =
                         R"(, "bf16": {"enabled": true}, "training": {"moments_dtype": "bf16"})";
constexpr auto sgd_type = config::OptimizerType::sgd, adamw_type = config::OptimizerType::adamw;

struct RunKind {
  const char* config = "";
  config::OptimizerType optimizer = config::OptimizerType::adamw;
  double momentum = 0;
  bool frozen = false;  ///< the first layer
};
struct MissingState {
  const char* name;
  RunKind saved, resumed;
  const char *told, *next_step;
};
void PrintTo(const MissingState& c, std::ostream* out) {
  *out << c.name;
}

class ResumeStates : public ::testing::TestWithParam<std::tuple<int, MissingState>> {};

TEST_P(ResumeStates, ThatTheCheckpointLacksAreToldBeforeAnythingChanges) {
  const auto& [stage, c] = GetParam();
  const TempFolder folder;
  const auto make_engine = [stage = stage](const DistributedPtr& dist, const RunKind& run) {
    config::Config config = odd_config(stage, run.config);
    static_cast<config::OptimizerRule&>(config.optimizer) = config.optimizer.for_type(run.optimizer);
    if (auto* sgd = std::get_if<config::SgdOptions>(&config.optimizer.options)) sgd->momentum = run.momentum;
    return std::make_unique<Engine>(dist, std::make_shared<Odd>(run.frozen), config);
  };
  launch_ranks(2, [&, &c = c](DistributedPtr dist) {
    const auto engine = make_engine(dist, c.saved);
    engine->train_batch([&] { return odd_batch(*engine, 0); });
    engine->save_checkpoint(folder.path().string());
  });
  std::vector<double> undisturbed, refused;
  for (std::vector<double>* losses : {&undisturbed, &refused})
    launch_ranks(2, [&, &c = c](DistributedPtr dist) {
      const auto engine = make_engine(dist, c.resumed);
      for (int step = 0; step < 3; ++step) {
        if (losses == &refused)
          for (const char* told : {c.told, c.next_step})
            expect_error(ErrorKind::data, told, [&] { engine->load_checkpoint(folder.path().string()); });
        const double loss = engine->train_batch([&] { return odd_batch(*engine, step); }).loss;
        if (dist->rank() == 0) losses->push_back(loss);
      }
    });
  EXPECT_EQ(refused, undisturbed);
}

INSTANTIATE_TEST_SUITE_P(
    All, ResumeStates,
    ::testing::Combine(
        ::testing::Values(0, 3),
        ::testing::Values(
            MissingState{"sgdToAdamW",
                         {"", sgd_type},
                         {},
                         "lacks elements from 0 on of 'exp_avg.",
                         "its optimizer kept no moments; resume with the optimizer that it was saved with"},
            MissingState{"momentumToAdamW",
                         {"", sgd_type, 0.9},
                         {},
                         "lacks elements from 0 on of 'exp_avg.",
                         "its optimizer kept the moments momentum_buffer; resume with the optimizer"},
            MissingState{"adamWToMomentum",
                         {},
                         {"", sgd_type, 0.9},
                         "lacks elements from 0 on of 'momentum_buffer.",
                         "its optimizer kept the moments exp_avg, exp_avg_sq; resume with the optimizer"},
            MissingState{"otherMoments",
                         {bf16_keys},
                         {bf16_moments_keys},
                         "in F32, and this run keeps it in bf16",
                         "training.moments_dtype that it was saved with"},
            MissingState{"frozenInBf16ToFp32",
                         {bf16_keys, adamw_type, 0, true},
                         {"", adamw_type, 0, true},
                         "in BF16, and this run keeps it in fp32",
                         "resume in bf16, as it was saved"},
            MissingState{"frozenToTrained",
                         {"", adamw_type, 0, true},
                         {},
                         "on of 'fp32.layer0.",
                         "was frozen when it was saved; freeze it"},
            MissingState{"trainedToFrozen",
                         {},
                         {"", adamw_type, 0, true},
                         "on of 'frozen.layer0.",
                         "was trained when it was saved; do not freeze it"})),
    [](const auto& one) { return cat("stage", std::get<0>(one.param), "_", std::get<1>(one.param).name); });

}  // namespace
}  // namespace sherd::test
