// A run with an adapter has the same bits however it is spread and stored, as all runs have
// (tests/engine/equality/equality_test.cpp), and leaves the model's own weights as they are.
#include <gtest/gtest.h>

#include <algorithm>

#include "models/adapters/adapters.h"
#include "support/equality.h"
#include "support/temp_folder.h"

namespace sherd::test {
using sherd::testing::TempFolder;

namespace {

struct AdapterSetting {
  const char* name;
  std::string dtype;
  bool llama;
  std::string adapter;
  std::string moe = "";
  bool tied = true;  ///< the table of tokens makes the scores, too
};

class AdapterEquality : public ::testing::TestWithParam<AdapterSetting> {
 protected:
  RunSpec spec() const {
    RunSpec out;
    out.dtype = GetParam().dtype, out.llama = GetParam().llama, out.adapter = GetParam().adapter;
    out.moe = GetParam().moe, out.tied = GetParam().tied;
    return out;
  }
};

/// Parameters that are, or are not, an adapter's.
std::map<std::string, std::vector<std::byte>> part(const RunResult& run, bool adapter) {
  auto out = run.masters;
  std::erase_if(out, [&](const auto& p) { return models::is_adapter(p.first) != adapter; });
  return out;
}

TEST_P(AdapterEquality, StagesTiersAndRestartsAgreeAndTheBaseStays) {
  RunSpec s = spec();
  const auto expected = train_local(s);
  RunSpec none = s;
  none.steps = 0;
  const auto before = train_local(none);
  EXPECT_TRUE(part(expected, false) == part(before, false)) << "the base has changed";
  EXPECT_FALSE(part(expected, true) == part(before, true)) << "the adapter has not";
  for (int stage = 1; stage <= 3; ++stage) {
    s.stage = stage;
    EXPECT_TRUE(train_local(s).bits() == expected.bits()) << "stage " << stage;
  }
  TempFolder folder;
  s.nvme_path = folder.path().string();
  s.offload_param_extra = R"(, "max_in_cpu": 0)";
  for (const char* tier : {"cpu", "nvme"}) {
    s.offload_param = s.offload_optimizer = tier;
    const auto got = train_local(s);
    EXPECT_TRUE(got.bits() == expected.bits()) << "on " << tier;
    if (tier == std::string("cpu")) continue;
    EXPECT_GT(got.io.read, 0U);
  }
  s.recompute = "full";
  s.resume_at = 5, s.directory = (folder.path() / "saved").string();
  EXPECT_TRUE(train_local(s).bits() == expected.bits()) << "resumed, with recompute";
}

/// No rank has gradients, masters or moments of frozen weights, and nothing of them is written.
TEST_P(AdapterEquality, FrozenWeightsCostTheirOwnBytes) {
  RunSpec s = spec();
  s.ranks = 1, s.steps = 2;
  s.stage = 2;
  const auto run = train_local(s);
  RunSpec without = s;
  without.adapter.clear();
  const auto whole = train_local(without);
  std::uint64_t adapter = 0, base = 0;
  for (const auto& [name, bytes] : run.parameters)
    (models::is_adapter(name) ? adapter : base) += bytes.size();
  const std::uint64_t held = run.state_bytes[0];
  const std::uint64_t width = GetParam().dtype == "fp32" ? 4 : 2;
  // Per element of the adapter at most a parameter, a gradient, a master and two moments, and what pads
  // blocks.
  EXPECT_GE(held, base + adapter);
  EXPECT_LE(held, base + adapter / width * 24 + 64 * 1024);
  EXPECT_GT(whole.state_bytes[0], 2 * base);
  TempFolder folder;
  s.stage = 3, s.offload_param = s.offload_optimizer = "nvme", s.nvme_path = folder.path().string();
  s.offload_param_extra = R"(, "max_in_cpu": 0)";
  RunSpec longer = s;
  longer.steps = 4;
  const auto two = train_local(s), four = train_local(longer);
  EXPECT_GT(four.io.read - two.io.read, 2 * base * 9 / 10) << "each step reads the base";
  // A parameter, a master and two moments of the adapter in each of two steps, and what pads blocks.
  EXPECT_LT(four.io.written - two.io.written, adapter / width * 40 + base / 4) << "and does not write it";
}

/// Over another layout of ranks they agree to rounding.
TEST_P(AdapterEquality, LayoutsAgreeToRounding) {
  RunSpec s = spec();
  s.dtype = "fp32";
  s.steps = 6, s.ranks = 1;
  const auto expected = train_local(s);
  for (const bool sequence_parallel : {true, false}) {
    RunSpec t = s;
    t.ranks = 2, t.tensor = 2, t.sequence_parallel = sequence_parallel;
    const auto got = train_local(t);
    for (std::size_t i = 0; i < got.losses.size(); ++i) {
      EXPECT_NEAR(got.losses[i], expected.losses[i], 2e-5) << "tensor, step " << i;
      EXPECT_NEAR(got.norms[i], expected.norms[i], 2e-4 * expected.norms[i]) << "tensor, step " << i;
    }
  }
  RunSpec p = s;
  p.ranks = 2, p.pipeline = 2, p.accumulation = 2;
  RunSpec alone = s;
  alone.accumulation = 2;
  const auto stages = train_local(p), one = train_local(alone);
  for (std::size_t i = 0; i < stages.losses.size(); ++i)
    EXPECT_NEAR(stages.losses[i], one.losses[i], 2e-5) << "pipeline, step " << i;
}

/// With more tensor ranks than key-value heads (4 and 2) the ranks' parts of a projection's queries, keys and
/// values are unequal, down to none of an adapter's at all.
TEST(AdaptersOfSharedHeads, AgreeToRoundingAndOverStagesToTheBit) {
  for (const char* adapter :
       {R"("type": "lora", "dropout": 0)", R"("type": "lora", "targets": ["v_proj"])", R"("type": "ia3")"}) {
    SCOPED_TRACE(adapter);
    RunSpec s;
    s.llama = true, s.adapter = adapter, s.dtype = "fp32", s.steps = 6, s.ranks = 2;
    const auto expected = train_local(s);
    const auto expect_near = [&](const RunResult& got, const std::string& what, std::size_t first = 0) {
      ASSERT_FALSE(got.losses.empty());
      for (std::size_t i = 0; i < got.losses.size(); ++i) {
        EXPECT_NEAR(got.losses[i], expected.losses[first + i], 2e-5) << what << ", step " << first + i;
        EXPECT_NEAR(got.norms[i], expected.norms[first + i], 2e-4 * expected.norms[first + i]) << what;
      }
    };
    RunSpec t = s;
    t.ranks = 8, t.tensor = 4;
    const auto stage_0 = train_local(t);
    expect_near(stage_0, "tensor 4");
    for (t.stage = 1; t.stage <= 3; ++t.stage)
      EXPECT_TRUE(train_local(t).bits() == stage_0.bits()) << "stage " << t.stage;
    t.stage = 2, t.sequence_parallel = false;
    expect_near(train_local(t), "without sequence parallelism");
    TempFolder folder;
    s.directory = t.directory = folder.path().string();
    train_local(t, 0, 3);
    expect_near(train_local(s, 3, 5), "resumed on two ranks", 3);
    expect_near(train_local(t, 5, 6), "and on eight", 5);
  }
}

/// A stage may have nothing to train: the embeddings, or norm and head.
TEST_P(AdapterEquality, StagesWithoutAnAdapterPassGradientsOn) {
  RunSpec s = spec();
  s.steps = 3, s.accumulation = 4, s.stage = 1;
  s.ranks = 1;
  s.tied = s.tied && s.adapter.find("token_indices") == std::string::npos;  // else to rounding, as all tied
  s.accumulate_in = "fp32";
  const auto expected = train_local(s);
  for (const char* schedule : {"1f1b", "zero_bubble", "gpipe"}) {
    RunSpec p = s;
    p.ranks = p.pipeline = 5, p.partition = "uniform", p.schedule = schedule;
    EXPECT_TRUE(train_local(p).bits() == expected.bits()) << schedule;
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, AdapterEquality,
    ::testing::Values(
        AdapterSetting{"gpt2_bf16", "bf16", false,
                       R"("type": "lora", "rank": 4, "targets": "all-linear", "dropout": 0.1)"},
        AdapterSetting{"llama_bf16", "bf16", true, R"("type": "lora", "dropout": 0.1)"},
        AdapterSetting{"llama_fp32", "fp32", true, R"("type": "lora", "targets": "all-linear")"},
        AdapterSetting{"experts_bf16", "bf16", true,
                       R"("type": "lora", "targets": ["q_proj"], "dropout": 0.1,
                                 "target_parameters": ["experts.gate_up_proj", "experts.down_proj"])",
                       R"("experts": 4, "top_k": 2, "ffn_hidden_size": 48)"},
        AdapterSetting{"gpt2_tokens_bf16", "bf16", false,
                       R"("type": "lora", "dropout": 0.1, "init_from": "nowhere",
                                 "trainable_token_indices": [50, 3, 4, 5, 100])"},
        AdapterSetting{"llama_tokens_fp32", "fp32", true,
                       R"("type": "lora", "init_from": "nowhere",
                                 "trainable_token_indices": {"lm_head": [60, 61, 7], "embed_tokens": [7, 60]})",
                       "", false},
        AdapterSetting{"gpt2_ia3_fp32", "fp32", false, R"("type": "ia3")"},
        AdapterSetting{"llama_ia3_bf16", "bf16", true, R"("type": "ia3")"},
        AdapterSetting{"gpt2_bottleneck_bf16", "bf16", false,
                       R"("type": "bottleneck", "reduction_factor": 5)"},
        AdapterSetting{"llama_bottleneck_fp32", "fp32", true,
                       R"("type": "bottleneck", "bottleneck_size": 7, "mh_adapter": false,
                                 "original_ln_before": true, "non_linearity": "relu", "scaling": 3)"},
        AdapterSetting{"gpt2_prompts_bf16", "bf16", false,
                       R"("type": "prompt_tuning", "virtual_tokens": 4,
                                 "tasks": [{"name": "a"}, {"name": "b"}, {"name": "c"}])"},
        AdapterSetting{"llama_p_tuning_fp32", "fp32", true,
                       R"("type": "p_tuning", "virtual_tokens": 6, "encoder_hidden_size": 20)"}),
    [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace sherd::test
