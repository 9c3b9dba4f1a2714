// Products in FP8 give the same losses, norms and weights, to the last bit, however many ranks train at
// stages 2 and 3 with gradients accumulated in fp32, wherever states lie, whatever is recomputed, and whether
// weights are gathered in FP8 or not (docs/guarantees.md, "Equal to the bit"). What each product computes,
// tests/tensor/fp8_test.cpp holds to the definition and to PyTorch.
#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "engine/setup/fp8_layers.h"
#include "models/gpt.h"
#include "models/inference/generate.h"
#include "sharding/parallel/experts/moe.h"
#include "support/equality.h"
#include "support/temp_folder.h"

namespace sherd::test {
using sherd::testing::TempFolder;

namespace {

RunSpec fp8_spec(const std::string& recipe, int ranks, int stage) {
  RunSpec spec;
  spec.fp8 = cat(R"("recipe": ")", recipe, '"');
  spec.ranks = ranks;
  spec.stage = stage;
  spec.accumulation = 4 / ranks;
  spec.accumulate_in = "fp32";
  spec.steps = 3;
  spec.layers = 2;
  spec.hidden = 144;  // more than one block of 128, and a part of one
  spec.llama = true;
  spec.tied = false;  // layered passes sum a tied table's gradients in another order
  return spec;
}

void expect_fp8_bits(const RunSpec& spec, const RunResult& expected, const std::string& what) {
  const RunResult got = train_local(spec);
  EXPECT_EQ(got.losses, expected.losses) << what;
  EXPECT_EQ(got.norms, expected.norms) << what;
  EXPECT_TRUE(got.bits() == expected.bits()) << what;
}

class Fp8Equality : public ::testing::TestWithParam<std::string> {};

TEST_P(Fp8Equality, AnyNumberOfRanksStagesTiersAndRecomputeGiveTheSameBits) {
  const auto spec = [&](int ranks, int stage) { return fp8_spec(GetParam(), ranks, stage); };
  const RunResult expected = train_local(spec(1, 2));
  RunSpec plain = spec(1, 2);
  plain.fp8.clear();
  const RunResult in_bf16 = train_local(plain);
  ASSERT_NE(expected.losses, in_bf16.losses);
  for (std::size_t i = 0; i < expected.losses.size(); ++i)
    EXPECT_NEAR(expected.losses[i], in_bf16.losses[i], 0.02);

  expect_fp8_bits(spec(2, 3), expected, "2 ranks, stage 3, gathered in FP8");
  RunSpec s = spec(4, 3);
  s.bucket = 3000, s.overlap = true, s.prefetch = 1'000'000;
  expect_fp8_bits(s, expected, "4 ranks, stage 3, prefetched");
  s = spec(2, 3);
  s.fp8 += R"(, "gather": false)";
  expect_fp8_bits(s, expected, "2 ranks, gathered in bf16");
  s = spec(2, 2);
  s.recompute = "full";
  expect_fp8_bits(s, expected, "2 ranks, stage 2, full recompute");
  s = spec(1, 3);
  s.recompute = "selective";
  expect_fp8_bits(s, expected, "1 rank, selective recompute");
  TempFolder folder;
  s = spec(2, 3);
  s.nvme_path = folder.path().string(), s.offload_param = s.offload_optimizer = "nvme";
  s.offload_param_extra = R"(, "max_in_cpu": 0)";
  expect_fp8_bits(s, expected, "2 ranks, everything on NVMe");
  s = spec(2, 3);
  s.schedule = "layered";
  expect_fp8_bits(s, expected, "2 ranks, layered accumulation");
  s = spec(2, 3);
  s.resume_at = 2, s.directory = folder.path().string();
  expect_fp8_bits(s, expected, "2 ranks, resumed");
}

/// An expert's rows come from several ranks: no rank's scales may depend on another's tokens.
TEST_P(Fp8Equality, OfExpertsToo) {
  const auto spec = [&](int ranks, int expert) {
    RunSpec s = fp8_spec(GetParam(), ranks, 3);
    s.hidden = 32;
    s.expert = expert;
    s.moe = R"("experts": 4, "top_k": 2, "ffn_hidden_size": 48, "aux_loss": 0.02)";
    return s;
  };
  const RunResult expected = train_local(spec(1, 1));
  expect_fp8_bits(spec(2, 2), expected, "experts of 2 ranks");
  expect_fp8_bits(spec(4, 2), expected, "experts of 2 ranks, in replicas");
}

/// Tensor (with sequence parallelism), context and pipeline ranks cut what scales are found for: the same
/// numbers but for what underflows.
TEST_P(Fp8Equality, CutModelsAgreeToRounding) {
  RunSpec s = fp8_spec(GetParam(), 1, 1);
  s.hidden = 64;
  const RunResult one = train_local(s);
  s.accumulation = 4, s.ranks = 2, s.tensor = 2;
  const RunResult cut = train_local(s);
  s.tensor = 1, s.context = 2;
  const RunResult in_parts = train_local(s);
  s.context = 1, s.pipeline = 2;
  const RunResult piped = train_local(s);
  for (std::size_t i = 0; i < one.losses.size(); ++i) {
    EXPECT_NEAR(cut.losses[i], one.losses[i], 2e-3);
    EXPECT_NEAR(cut.norms[i], one.norms[i], 2e-2 * one.norms[i]);
    EXPECT_NEAR(in_parts.losses[i], one.losses[i], 2e-3);
    EXPECT_NEAR(in_parts.norms[i], one.norms[i], 2e-2 * one.norms[i]);
    EXPECT_EQ(piped.losses[i], one.losses[i]);
    EXPECT_NEAR(piped.norms[i], one.norms[i], 1e-12 * one.norms[i]);
  }
}

/// Makes the weights of products so small that the next update leaves nothing of them in their range.
void shrink_weights(Engine& engine) {
  for (const auto& unit : engine.sharded().units())
    for (const auto& segment : unit->segments()) {
      const bool own = segment->parameters_sharded();
      const std::int64_t begin = own ? segment->own_begin() : 0,
                         end = own ? segment->own_end() : segment->layout().padded();
      for (const sharding::Piece& piece : segment->layout().pieces(begin, end)) {
        if (!segment->layout().parameters()[piece.slot]->in_linear) continue;
        std::vector<float> values;
        for (std::int64_t i = 0; i < piece.count; ++i)
          values.push_back(1e-6f * static_cast<float>((piece.parameter_begin + i) % 13 - 6));
        segment->write_values(piece.flat_begin,
                              tensor::Tensor::of<float>(engine.device(), {piece.count}, values));
      }
    }
  engine.sharded().values_changed();
}

TEST(Fp8, ScalesFollowTheWeights) {
  RunSpec s = fp8_spec("blockwise", 2, 2);
  s.between_steps = [](Engine& engine) {
    if (engine.global_steps() == 1) shrink_weights(engine);
  };
  const RunResult expected = train_local(s);
  s.stage = 3;
  expect_fp8_bits(s, expected, "weights that grow");
}

/// Frozen weights travel in FP8 too, with scales that stay.
TEST_P(Fp8Equality, OfAdaptersAndReplicas) {
  RunSpec s = fp8_spec(GetParam(), 2, 2);
  s.hidden = 64, s.adapter = R"("type": "lora", "rank": 4, "targets": "all-linear")";
  const RunResult expected = train_local(s);
  s.stage = 3;
  expect_fp8_bits(s, expected, "LoRA at stage 3");
  s.adapter += R"(, "base_dtype": "int8")", s.stage = 2;
  const RunResult in_8_bits = train_local(s);
  s.stage = 3;
  expect_fp8_bits(s, in_8_bits, "LoRA beside a base in 8 bits at stage 3");
  s.adapter.clear();
  s.ranks = 4, s.accumulation = 1, s.shard_size = 2, s.stage = 2;
  const RunResult replicas = train_local(s);
  s.stage = 3;
  expect_fp8_bits(s, replicas, "replicas of 2 ranks at stage 3");
}

INSTANTIATE_TEST_SUITE_P(Recipes, Fp8Equality, ::testing::Values("current", "blockwise", "rowwise"),
                         [](const auto& test) { return test.param; });

/// The weights that the processor reads between steps are exact, also where passes gather them in FP8.
TEST(Fp8, WhoeverReadsWeightsGetsThemExactly) {
  RunSpec spec = fp8_spec("blockwise", 2, 3);
  spec.steps = 2;
  std::map<std::string, std::vector<std::byte>> read;
  spec.at_end = [&](Engine& engine) {
    for (const auto& weight : engine.fp8().weights()) {
      const auto lease = engine.sharded().gather(*weight);
      const auto* bytes = weight->value.raw();
      if (engine.dist().rank() == 0) read[weight->name] = {bytes, bytes + weight->value.bytes()};
    }
  };
  const RunResult run = train_local(spec);
  ASSERT_EQ(read.size(), 8U);
  for (const auto& [name, bytes] : read) EXPECT_TRUE(bytes == run.parameters.at(name)) << name;
}

/// Texts between steps are those of a run that has no FP8, and leave the steps as they were.
TEST(Fp8, TextsAreContinuedInBf16) {
  const TempFolder folder;
  std::vector<std::int32_t> texts[2];
  RunSpec spec = fp8_spec("blockwise", 2, 3);
  const RunResult expected = train_local(spec);
  const auto continued = [&](Engine& engine, bool fp8) {
    engine.evaluate([&](autograd::Tape& tape) {
      auto& model = dynamic_cast<models::Gpt&>(engine.module());
      const std::vector<std::int32_t> prompt = {3, 1, 4, 1, 5};
      auto text = models::generate(model, tape, prompt, 60, {.temperature = 1, .key = {2, 7}});
      if (engine.dist().rank() == 0) texts[fp8 ? 1 : 0] = std::move(text);
    });
  };
  spec.between_steps = [&](Engine& engine) {
    if (engine.global_steps() != 2) return;
    engine.save_checkpoint(folder.path().string(), "here");
    continued(engine, true);
  };
  expect_fp8_bits(spec, expected, "with texts between steps");
  spec.fp8.clear();
  launch_ranks(2, [&](DistributedPtr dist) {
    const auto engine = make_engine(std::move(dist), spec);
    engine->load_checkpoint(folder.path().string(), "here");
    continued(*engine, false);
  });
  EXPECT_EQ(texts[0].size(), 60U);
  EXPECT_EQ(texts[0], texts[1]);
}

struct Counted {
  std::uint64_t gathered = 0, activations = 0;
  std::int64_t weights = 0;  ///< elements of those in FP8
};
Counted counted_run(RunSpec spec) {
  Counted out;
  spec.between_steps = [](Engine& engine) { engine.groups().reset_traffic(); };
  spec.at_end = [&](Engine& engine) {
    if (engine.dist().rank() != 0) return;
    for (const auto& [axis, traffic] : engine.groups().traffic()) out.gathered += traffic.all_gather;
    for (const auto& weight : engine.fp8().weights()) out.weights += weight->numel();
  };
  out.activations = train_local(spec).activation_peak;
  return out;
}

TEST(Fp8, WeightsTravelInAByteAndInputsAreKeptInOne) {
  RunSpec spec = fp8_spec("blockwise", 2, 3);
  spec.accumulation = 1, spec.rows = 4, spec.seq = 64;
  const Counted on = counted_run(spec);
  RunSpec exact = spec;
  exact.fp8 += R"(, "gather": false)";
  const Counted off = counted_run(exact);
  RunSpec plain = spec;
  plain.fp8.clear();
  const Counted bf16 = counted_run(plain);
  ASSERT_GT(on.weights, 0);
  EXPECT_EQ(off.gathered, bf16.gathered);
  // Forward and backward gather each weight; of two ranks each sends a half.
  const auto saved = static_cast<double>(off.gathered - on.gathered);
  EXPECT_NEAR(saved / static_cast<double>(on.weights), 1, 0.01);
  EXPECT_EQ(on.activations, off.activations);
  EXPECT_LT(on.activations, bf16.activations);
}

}  // namespace
}  // namespace sherd::test
