// Every optimizer trains to the same bits at every stage, wherever its states live, and after a restart.
#include <gtest/gtest.h>

#include "support/equality.h"
#include "support/temp_folder.h"

namespace sherd::test {
namespace {

class OptimizerEquality : public ::testing::TestWithParam<config::OptimizerType> {
 protected:
  RunSpec base() const {
    RunSpec spec;
    spec.ranks = 2, spec.dtype = "bf16", spec.layers = 2;
    const config::OptimizerType type = GetParam();
    spec.optimizer =
        cat(R"("type": ")", config::name_of(type), R"(", "params": {"weight_decay": 0.1)",
            type == config::OptimizerType::adagrad ? R"(, "initial_accumulator_value": 0.3})" : "}");
    spec.nvme_path = folder_.path();
    return spec;
  }

  sherd::testing::TempFolder folder_;
};

TEST_P(OptimizerEquality, StagesAndTiersGiveTheSameBits) {
  const RunResult plain = train_local(base());
  ASSERT_NE(plain.losses.front(), plain.losses.back());
  RunSpec narrow = base();
  narrow.moments = "bf16";
  const RunResult plain_narrow = train_local(narrow);
  for (int stage = 1; stage <= 3; ++stage)
    for (const std::string tier : {"none", "cpu", "nvme"})
      for (const std::string moments : {"fp32", "bf16"}) {
        RunSpec spec = base();
        spec.moments = moments;
        const RunResult& want = moments == "fp32" ? plain : plain_narrow;
        spec.stage = stage, spec.offload_optimizer = tier;
        EXPECT_TRUE(train_local(spec).bits() == want.bits()) << "stage " << stage << ", " << tier;
        if (stage != 3) break;
      }
}

TEST_P(OptimizerEquality, ResumeContinuesToTheBit) {
  RunSpec spec = base();
  spec.stage = 2;
  const RunResult whole = train_local(spec);
  sherd::testing::TempFolder folder;
  spec.directory = folder.path().string(), spec.resume_at = 5;
  EXPECT_TRUE(train_local(spec).bits() == whole.bits());
}

TEST_P(OptimizerEquality, AGpuGivesTheSameBitsWhereverItsStatesAre) {
  RunSpec spec = base();
  spec.ranks = 1, spec.stage = 2, spec.steps = 6;
  const RunResult want = train_local(spec);
  spec.lazy = true;
  for (const std::string tier : {"none", "cpu", "nvme"}) {
    spec.offload_optimizer = tier;
    EXPECT_TRUE(train_local(spec).bits() == want.bits()) << tier;
  }
}

/// All optimizers but those whose replicas exchange momentum: their result depends on the number of replicas
/// (one_bit_test.cpp).
std::vector<config::OptimizerType> exact_types() {
  std::vector<config::OptimizerType> out = config::optimizer_types();
  std::erase_if(out,
                [](config::OptimizerType type) { return config::default_rule(type).exchanges_momentum(); });
  return out;
}

INSTANTIATE_TEST_SUITE_P(All, OptimizerEquality, ::testing::ValuesIn(exact_types()),
                         [](const auto& param) { return std::string(config::name_of(param.param)); });

}  // namespace
}  // namespace sherd::test
