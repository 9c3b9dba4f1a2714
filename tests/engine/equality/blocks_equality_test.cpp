// A model of the blocks that families have beyond Llama's: layers of two kinds, norms on both sides, gains of
// 1 + weight, GeGLU, scaled embeddings, multipliers, positions of part of a head or none, sinks, capped
// scores, and biases of attention alone; and an encoder,
// whose norms stand behind sums, with windows on both sides, types of tokens and a head of its own. Both are
// equal (docs/guarantees.md, "Equal to the bit") wherever states lie, whatever is recomputed, however many
// ranks train. What each block computes, tests/models holds to transformers.
#include <gtest/gtest.h>

#include "support/equality.h"
#include "support/temp_folder.h"

namespace sherd::test {
using sherd::testing::TempFolder;

namespace {

RunSpec spec_of(int ranks, int stage) {
  RunSpec spec;
  spec.tied = false;  // layered passes sum a tied table's gradients in another order
  spec.ranks = ranks, spec.stage = stage, spec.accumulation = 4 / ranks;
  spec.accumulate_in = "fp32";
  spec.steps = 4;
  return spec;
}

RunSpec spec_of_blocks(int ranks, int stage) {
  RunSpec spec = spec_of(ranks, stage);
  spec.llama = true;
  spec.model =
      R"(, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7, "rotary_base": 5e5,
          "sliding_rope": {"rotary_base": 1e4}, "no_rope_layer_interval": 3, "partial_rotary_factor": 0.5,
          "norm_placement": "sandwich", "norm_unit_offset": true, "qk_norm": true,
          "activation": "geglu_tanh", "scale_embeddings": true, "embedding_multiplier": 0.5,
          "residual_multiplier": 0.7, "attention_multiplier": 0.3, "logits_scaling": 2,
          "attention_sinks": true, "attn_logit_softcapping": 5, "final_logit_softcapping": 8,
          "bias": true, "mlp_bias": false)";
  return spec;
}

RunSpec spec_of_encoder(int ranks, int stage) {
  RunSpec spec = spec_of(ranks, stage);
  spec.model =
      R"(, "causal": false, "norm_placement": "post_residual", "embedding_norm": true, "token_types": 2,
          "head": "mlm", "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5)";
  return spec;
}

TEST(BlocksEquality, RanksStagesTiersAndRecomputeGiveTheSameBits) {
  const RunResult expected = train_local(spec_of_blocks(1, 2));
  ASSERT_NE(expected.losses.front(), expected.losses.back());
  const auto expect_bits = [&](const RunSpec& spec, const char* what) {
    EXPECT_TRUE(train_local(spec).bits() == expected.bits()) << what;
  };
  RunSpec s = spec_of_blocks(4, 3);
  s.bucket = 3000, s.overlap = true, s.prefetch = 1'000'000;
  expect_bits(s, "4 ranks, stage 3, prefetched");
  s = spec_of_blocks(2, 2);
  s.recompute = "full";
  expect_bits(s, "2 ranks, full recompute");
  const TempFolder folder;
  s = spec_of_blocks(2, 3);
  s.nvme_path = folder.path().string(), s.offload_param = s.offload_optimizer = "nvme";
  s.offload_param_extra = R"(, "max_in_cpu": 0)";
  s.recompute = "selective";
  expect_bits(s, "2 ranks, everything on NVMe, selective recompute");
  s = spec_of_blocks(2, 3);
  s.schedule = "layered", s.resume_at = 2, s.directory = folder.path().string();
  expect_bits(s, "2 ranks, layered, resumed");
  s = spec_of_blocks(1, 2);
  s.lazy = true;
  expect_bits(s, "a late device");
}

TEST(EncoderEquality, RanksStagesTiersAndRecomputeGiveTheSameBits) {
  const RunResult expected = train_local(spec_of_encoder(1, 2));
  ASSERT_NE(expected.losses.front(), expected.losses.back());
  RunSpec s = spec_of_encoder(4, 3);
  s.bucket = 3000, s.overlap = true, s.prefetch = 1'000'000, s.recompute = "full";
  EXPECT_TRUE(train_local(s).bits() == expected.bits()) << "4 ranks, stage 3, prefetched, full recompute";
  const TempFolder folder;
  s = spec_of_encoder(2, 3);
  s.nvme_path = folder.path().string(), s.offload_param = s.offload_optimizer = "nvme";
  s.recompute = "selective", s.schedule = "layered";
  s.resume_at = 2, s.directory = folder.path().string();
  EXPECT_TRUE(train_local(s).bits() == expected.bits())
      << "2 ranks, everything on NVMe, selective recompute, layered, resumed";
  s = spec_of_encoder(1, 2);
  s.lazy = true;
  EXPECT_TRUE(train_local(s).bits() == expected.bits()) << "a late device";
}

/// Latent attention, with latents of queries too.
RunSpec spec_of_latents(int ranks, int stage) {
  RunSpec spec = spec_of(ranks, stage);
  spec.llama = true, spec.kv_heads = 4;
  spec.model =
      R"(, "mla": {"kv_lora_rank": 12, "q_lora_rank": 10, "qk_nope_head_dim": 6,
          "qk_rope_head_dim": 4, "v_head_dim": 8})";
  return spec;
}

/// Linear attention in two of three layers, and gated attention.
RunSpec spec_of_hybrid(int ranks, int stage) {
  RunSpec spec = spec_of(ranks, stage);
  spec.llama = true;
  spec.model =
      R"(, "layer_types": ["linear_attention", "full_attention"], "attention_gate": true, "qk_norm": true,
          "linear_attention": {"num_key_heads": 2, "num_value_heads": 4, "key_head_dim": 6,
                               "value_head_dim": 5}, "norm_unit_offset": true)";
  return spec;
}

class Attentions : public ::testing::TestWithParam<RunSpec (*)(int, int)> {};
INSTANTIATE_TEST_SUITE_P(Equality, Attentions, ::testing::Values(spec_of_latents, spec_of_hybrid),
                         [](const auto& test) {
                           return test.param == spec_of_latents ? "latents" : "hybrid";
                         });

TEST_P(Attentions, RanksStagesTiersAndRecomputeGiveTheSameBits) {
  const auto spec_of_it = GetParam();
  const RunResult expected = train_local(spec_of_it(1, 2));
  ASSERT_NE(expected.losses.front(), expected.losses.back());
  RunSpec s = spec_of_it(4, 3);
  s.bucket = 3000, s.overlap = true, s.prefetch = 1'000'000, s.recompute = "full";
  EXPECT_TRUE(train_local(s).bits() == expected.bits()) << "4 ranks, stage 3, prefetched, full recompute";
  const TempFolder folder;
  s = spec_of_it(2, 3);
  s.nvme_path = folder.path().string(), s.offload_param = s.offload_optimizer = "nvme";
  s.recompute = "selective", s.schedule = "layered";
  s.resume_at = 2, s.directory = folder.path().string();
  EXPECT_TRUE(train_local(s).bits() == expected.bits())
      << "2 ranks, everything on NVMe, selective recompute, layered, resumed";
  s = spec_of_it(1, 2);
  s.lazy = true;
  EXPECT_TRUE(train_local(s).bits() == expected.bits()) << "a late device";
}

/// `context`: such ranks are among them.
void expect_cuts_agree(RunSpec s, bool context = true) {
  s.dtype = "fp32", s.accumulate_in.clear();
  const RunResult one = train_local(s);
  s.accumulation = 4, s.ranks = 2;
  for (int* axis : {&s.tensor, &s.context, &s.pipeline}) {
    if (axis == &s.context && !context) continue;
    *axis = 2;
    const RunResult cut = train_local(s);
    *axis = 1;
    for (std::size_t i = 0; i < one.losses.size(); ++i) {
      EXPECT_NEAR(cut.losses[i], one.losses[i], 2e-5) << "step " << i;
      EXPECT_NEAR(cut.norms[i], one.norms[i], 1e-4 * one.norms[i]) << "step " << i;
    }
  }
}

/// An encoder in front of a decoder, whose layers share tables of relative positions.
RunSpec spec_of_both(int ranks, int stage) {
  RunSpec spec = spec_of(ranks, stage);
  spec.llama = true, spec.kv_heads = 4;
  spec.model =
      R"(, "position": "relative", "encoder": {"num_layers": 1, "seq_length": 9}, "attention_multiplier": 1,
          "relative_attention_num_buckets": 8, "relative_attention_max_distance": 10, "ffn_dropout": 0.1)";
  return spec;
}

TEST(EncoderDecoderEquality, RanksStagesTiersAndRecomputeGiveTheSameBits) {
  const RunResult expected = train_local(spec_of_both(1, 2));
  ASSERT_NE(expected.losses.front(), expected.losses.back());
  RunSpec s = spec_of_both(4, 3);
  s.bucket = 3000, s.overlap = true, s.prefetch = 1'000'000, s.recompute = "full";
  EXPECT_TRUE(train_local(s).bits() == expected.bits()) << "4 ranks, stage 3, prefetched, full recompute";
  const TempFolder folder;
  s = spec_of_both(2, 3);
  s.nvme_path = folder.path().string(), s.offload_param = s.offload_optimizer = "nvme";
  s.recompute = "selective", s.resume_at = 2, s.directory = folder.path().string();
  EXPECT_TRUE(train_local(s).bits() == expected.bits())
      << "2 ranks, everything on NVMe, selective recompute, resumed";
  s = spec_of_both(1, 2);
  s.lazy = true;
  EXPECT_TRUE(train_local(s).bits() == expected.bits()) << "a late device";
}

/// Masks of dropout too are those of one rank's heads and columns.
TEST(EncoderDecoderEquality, CutModelsAgreeToRounding) {
  RunSpec s = spec_of_both(1, 1);
  ASSERT_GT(s.dropout, 0);
  expect_cuts_agree(s, false);
  s.tied = true;
  expect_cuts_agree(s, false);
}

/// Stages that end in either stack, or have one alone, and the embeddings with neither; parts of all
/// micro-batches one by one, which sum what layers share in another order.
TEST(EncoderDecoderEquality, StagesEndAnywhere) {
  RunSpec s = spec_of_both(1, 1);
  s.layers = 4, s.dtype = "fp32", s.accumulate_in.clear();
  s.model.replace(s.model.find("\"num_layers\": 1"), 15, "\"num_layers\": 2");
  const RunResult one = train_local(s);
  const auto expect_near_one = [&](const RunSpec& spec, const char* what) {
    const RunResult cut = train_local(spec);
    for (std::size_t i = 0; i < one.losses.size(); ++i) {
      EXPECT_NEAR(cut.losses[i], one.losses[i], 2e-5) << what << ", step " << i;
      EXPECT_NEAR(cut.norms[i], one.norms[i], 1e-4 * one.norms[i]) << what << ", step " << i;
    }
  };
  s.partition = "uniform";
  for (const int stages : {2, 3, 6}) {
    s.ranks = s.pipeline = stages;
    expect_near_one(s, cat(stages, " stages").c_str());
  }
  s.ranks = 4, s.pipeline = 2, s.accumulation = 2, s.stage = 1;
  expect_near_one(s, "2 stages, 2 data-parallel ranks");
  s.ranks = 1, s.pipeline = 1, s.accumulation = 4, s.partition.clear(), s.schedule = "layered", s.stage = 3;
  expect_near_one(s, "layered");
}

TEST(BlocksEquality, CutModelsAgreeToRounding) {
  expect_cuts_agree(spec_of_blocks(1, 1));
}

TEST_P(Attentions, CutModelsAgreeToRounding) {
  expect_cuts_agree(GetParam()(1, 1), GetParam() == spec_of_latents);
}

TEST(EncoderEquality, CutModelsAgreeToRounding) {
  expect_cuts_agree(spec_of_encoder(1, 1));
}

}  // namespace
}  // namespace sherd::test
