// Which runs must have each other's bits: by docs/guarantees.md, case by case.
#include "cli/verification/promises.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace sherd::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// A run of four samples to a step, one at a time.
RunShape shape(int ranks, const std::vector<std::string>& keys = {}) {
  return RunShape::of(config::parse_text(R"({"train_batch_size": 4, "train_micro_batch_size_per_gpu": 1,
      "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
      "model": {"type": "gpt2", "seq_length": 16, "hidden_size": 32, "num_layers": 2, "num_heads": 2}})",
                                         "test", keys),
                      ranks);
}

TEST(Promises, TheSameRunHasTheSameBits) {
  for (const char* stage : {"0", "1", "2", "3"}) {
    const RunShape run = shape(2, {cat("zero_optimization.stage=", stage), "bf16.enabled=true"});
    EXPECT_THAT(missing_promises(run, run), IsEmpty());
  }
  const RunShape native = shape(2, {"parallel.reduction=native"});
  EXPECT_THAT(missing_promises(native, native), ElementsAre(HasSubstr("parallel.reduction is native")));
}

TEST(Promises, OtherNumbersOfRanksHaveThemAtStages2And3InFp32) {
  const auto between = [](const std::vector<std::string>& keys, int then = 4, int now = 1) {
    return missing_promises(shape(then, keys), shape(now, keys));
  };
  const std::string two = "zero_optimization.stage=2", bf16 = "bf16.enabled=true",
                    sums = "data_types.grad_accum_dtype=fp32";
  EXPECT_THAT(between({two}), IsEmpty());
  EXPECT_THAT(between({"zero_optimization.stage=3"}, 2, 4), IsEmpty());
  EXPECT_THAT(between({two, bf16, sums}), IsEmpty());
  EXPECT_THAT(between({two, bf16}), ElementsAre(HasSubstr("gradients are summed in bf16")));
  EXPECT_THAT(between({"zero_optimization.stage=1"}),
              ElementsAre(HasSubstr("ZeRO stage 1 sums the micro-batches")));
  EXPECT_THAT(between({"zero_optimization.stage=0"}, 2, 4), ElementsAre(HasSubstr("ZeRO stage 0 sums")));
  EXPECT_THAT(between({two, "parallel.shard_size=1"}, 4, 2), ElementsAre(HasSubstr("replicas")));
  EXPECT_THAT(between({"optimizer.type=OneBitAdam", "zero_optimization.stage=0"}),
              ElementsAre(HasSubstr("1-bit")));
}

TEST(Promises, OtherLayoutsHaveThemWhereTheyAreNotCutOtherwise) {
  const std::string whole = "model.tie_embeddings=false", two = "zero_optimization.stage=2";
  EXPECT_THAT(missing_promises(shape(2, {"parallel.tensor=2"}), shape(1)),
              ElementsAre("2 tensor ranks trained, and 1 replay"));
  EXPECT_THAT(missing_promises(shape(1), shape(2, {"parallel.context=2"})),
              ElementsAre("1 context rank trained, and 2 replay"));
  EXPECT_THAT(missing_promises(shape(2, {"parallel.tensor=2"}),
                               shape(2, {"parallel.tensor=2", "parallel.sequence_parallel=false"})),
              ElementsAre(HasSubstr("sequence_parallel")));
  EXPECT_THAT(missing_promises(shape(2, {whole, "parallel.pipeline=2"}), shape(1, {whole})), IsEmpty());
  EXPECT_THAT(missing_promises(shape(2, {"parallel.pipeline=2"}), shape(1)),
              ElementsAre(HasSubstr("tied table")));
  // Stages 0 and 1 reduce once a step, 2 and 3 every micro-batch.
  EXPECT_THAT(missing_promises(shape(2, {two}), shape(2, {"zero_optimization.stage=3"})), IsEmpty());
  EXPECT_THAT(missing_promises(shape(2, {two}), shape(2)),
              ElementsAre(HasSubstr("ZeRO stage 2 trained, and stage 0")));
  EXPECT_THAT(missing_promises(shape(4, {two}), shape(4)), IsEmpty()) << "one micro-batch each";
}

TEST(Promises, WhatComputesIsTheSame) {
  const engine::RunFacts run{"0.1.0", "cpu", "avx2", "own tiles", 3, 4, "local(4)", 2};
  engine::RunFacts other = run;
  other.ranks = 1, other.world = "mpi(1)";
  EXPECT_THAT(missing_promises(run, other), IsEmpty());
  other = {"0.2.0", "NVIDIA H200", "avx512", "oneDNN", 2, 4, "local(4)", 4};
  EXPECT_THAT(
      missing_promises(run, other),
      ElementsAre("the version of Sherd was 0.1.0 and is 0.2.0", "the device was cpu and is NVIDIA H200",
                  "the instruction set was avx2 and is avx512",
                  "the library of products was own tiles and is oneDNN",
                  "the number of compute threads per rank was 3 and is 2",
                  "the micro-batch (train_micro_batch_size_per_gpu) was 2 and is 4"));
}

}  // namespace
}  // namespace sherd::cli
