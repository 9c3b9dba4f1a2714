// A whole training run on a GPU by one rank: close to the processor's, and the same bits whatever is moved
// off the GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "support/equality.h"
#include "support/expect_error.h"
#include "support/full_suite.h"
#include "support/gpu/gpu.h"
#include "support/temp_folder.h"
#include "tensor/library_version.h"

namespace sherd::test {
namespace {

RunSpec on_gpu() {
  RunSpec spec;
  spec.device = "cuda";
  spec.ranks = 1;
  spec.steps = on_emulated_gpu() ? 3 : 10;
  spec.hidden = 64, spec.layers = 3;
  if (on_emulated_gpu()) spec.hidden = 32, spec.layers = 2, spec.rows = 1, spec.seq = 16;
  return spec;
}

/// Whether a part of the combinations is enough: on an emulated GPU, whose steps take long.
bool in_part() {
  return on_emulated_gpu() && !full_suite();
}

class GpuTraining : public ::testing::Test {
 protected:
  void SetUp() override { SHERD_NEEDS_GPU(); }
  sherd::testing::TempFolder folder;
};

TEST_F(GpuTraining, follows_the_processor_in_fp32) {
  RunSpec spec = on_gpu();
  spec.dtype = "fp32", spec.dropout = 0, spec.rows = 2;
  RunSpec cpu = spec;
  cpu.device = "cpu";
  for (const bool llama : {false, true}) {
    spec.llama = cpu.llama = llama;
    const RunResult here = train_local(cpu), there = train_local(spec);
    for (std::size_t i = 0; i < here.losses.size(); ++i)
      EXPECT_NEAR(there.losses[i], here.losses[i], 1e-4 * here.losses[i])
          << "step " << i << ", llama " << llama;
  }
}

TEST_F(GpuTraining, repeats_itself_to_the_bit) {
  for (const char* dtype : {"fp32", "bf16", "fp16"}) {
    RunSpec spec = on_gpu();
    spec.dtype = dtype;
    EXPECT_EQ(train_local(spec).bits(), train_local(spec).bits()) << dtype;
  }
}

TEST_F(GpuTraining, has_the_same_bits_by_graphs) {
  for (const char* dtype : {"fp32", "bf16", "fp16"})
    for (const char* optimizer : {"none", "cpu"}) {
      const std::string both = cat(dtype, " ", optimizer);
      if (in_part() && both != "fp16 none" && both != "bf16 cpu") continue;
      RunSpec spec = on_gpu();
      spec.dtype = dtype, spec.stage = 2, spec.accumulation = 2, spec.offload_optimizer = optimizer;
      spec.steps = std::max(spec.steps, 4);  // the first ones make the graphs
      const RunResult expected = train_local(spec);
      spec.graphs = true;
      const RunResult result = train_local(spec);
      EXPECT_TRUE(result.bits() == expected.bits()) << dtype << ", optimizer on " << optimizer;
      const device::GraphCounts counts = result.graphs.back();
      EXPECT_GT(counts.launches, 0u);
      EXPECT_GT(counts.works_in_graphs, counts.works_apart);
    }
}

TEST_F(GpuTraining, has_the_same_bits_wherever_its_states_are) {
  for (const char* dtype : {"bf16", "fp32"}) {
    RunSpec spec = on_gpu();
    spec.dtype = dtype, spec.stage = 2;
    const auto expected = train_local(spec).bits();
    for (const bool split : {true, false}) {
      spec.split_masters = split;
      for (const char* place : {"none", "cpu", "nvme"}) {
        if (in_part() && split == (std::string(dtype) == "fp32") && std::string(place) != "cpu") continue;
        spec.offload_optimizer = place, spec.nvme_path = folder.path();
        const RunResult result = train_local(spec);
        EXPECT_TRUE(result.bits() == expected)
            << dtype << ", optimizer on " << place << ", split masters " << split;
        const std::uint64_t off_gpu = result.state_bytes[1] + result.state_bytes[2];
        EXPECT_EQ(off_gpu > 0, std::string(place) != "none") << "the setting took no effect";
      }
    }
  }
}

/// Rules that measure parameters: on the GPU by its kernels, off it by the processor.
TEST_F(GpuTraining, measures_the_same_bits_wherever_its_states_are) {
  for (const char* moments : {"bf16", "fp32"}) {
    RunSpec spec = on_gpu();
    spec.stage = 2, spec.steps = 3, spec.moments = moments;
    spec.optimizer = R"("type": "Lamb", "params": {"lr": 0.01, "weight_decay": 0.1})";
    spec.groups = R"([{"match": "*mlp*", "type": "LARS", "lr": 0.05}, {"match": "*bias", "type": "AdamW"}])";
    const RunResult expected = train_local(spec);
    EXPECT_NE(expected.losses.front(), expected.losses.back());
    for (const char* place : {"cpu", "nvme"}) {
      spec.offload_optimizer = place, spec.nvme_path = folder.path();
      EXPECT_TRUE(train_local(spec).bits() == expected.bits()) << moments << ", optimizer on " << place;
    }
  }
}

/// Ranks that share one card where there are no more: their tensors are read in place.
TEST_F(GpuTraining, has_the_same_bits_at_every_stage_on_several_ranks) {
  for (const int ranks : {2, 4}) {
    RunSpec spec = on_gpu();
    spec.ranks = ranks,
    spec.stage = 0;  // one micro-batch: more of them round at other places at stages 0 and 1 than at 2 and 3
    spec.steps = on_emulated_gpu() ? 2 : 10;
    spec.nvme_path = folder.path();
    const auto expected = train_local(spec).bits();
    const auto same = [&](const char* what) {
      EXPECT_TRUE(train_local(spec).bits() == expected)
          << what << ", stage " << spec.stage << ", ranks " << ranks;
    };
    // In part: every stage, every way and every number of ranks, but few of each with each.
    const auto chosen = [&](int way) {
      return !in_part() || (ranks == 2 ? (spec.stage + way) % 2 == 0 : spec.stage == 3 - way);
    };
    for (const int stage : {1, 2, 3}) {
      spec.stage = stage;
      if (chosen(0)) same("all on the card");
      spec.graphs = true;
      if (chosen(1)) same("by graphs");
      spec.graphs = false;
      spec.offload_optimizer = stage == 1 ? "nvme" : "cpu";
      if (chosen(1)) same("optimizer off the card");
      spec.offload_optimizer = "none";
    }
    spec.offload_optimizer = spec.offload_param = "cpu", spec.prefetch = 20'000;
    if (chosen(0)) same("parameters and optimizer in host memory");
    spec.offload_param = "nvme";
    if (chosen(1)) same("parameters on NVMe");
  }
}

/// Also where a drive's buffers hold what a GPU makes codes of.
TEST_F(GpuTraining, has_the_same_bits_in_fp8_and_follows_the_processor) {
  RunSpec spec = on_gpu();
  spec.fp8 = R"("recipe": "blockwise")";
  spec.ranks = 2, spec.stage = 2, spec.dropout = 0, spec.tied = false, spec.rows = 2;
  spec.steps = 2;
  const RunResult expected = train_local(spec);
  RunSpec cpu = spec;
  cpu.device = "cpu";
  const RunResult here = train_local(cpu);
  for (std::size_t i = 0; i < here.losses.size(); ++i)
    EXPECT_NEAR(expected.losses[i], here.losses[i], 5e-3 * here.losses[i]) << "step " << i;
  spec.stage = 3;
  EXPECT_TRUE(train_local(spec).bits() == expected.bits()) << "gathered in FP8";
  spec.graphs = true;
  EXPECT_TRUE(train_local(spec).bits() == expected.bits()) << "by graphs";
  spec.graphs = false, spec.prefetch = 20'000;
  spec.nvme_path = folder.path(), spec.offload_param = spec.offload_optimizer = "nvme";
  spec.offload_param_extra = R"(, "max_in_cpu": 0, "buffer_count": 2)";
  EXPECT_TRUE(train_local(spec).bits() == expected.bits()) << "on NVMe";
}

/// The GPU packs momentum that lies there, and updates; the processor what is in its memory or on NVMe.
TEST_F(GpuTraining, replicas_exchange_momentum_wherever_it_lies) {
  for (const std::string type : {"OneBitAdam", "OneBitLamb"}) {
    RunSpec spec = on_gpu();
    spec.ranks = 2, spec.shard_size = 1, spec.stage = 1, spec.steps = 4;
    spec.optimizer = cat(R"("type": ")", type,
                         R"(", "params": {"lr": 0.003, "weight_decay": 0.1, "freeze_step": 2, "eps": 1e-4})");
    spec.offload_optimizer = "cpu";
    const auto expected = train_local(spec).bits();
    spec.offload_optimizer = "nvme", spec.nvme_path = folder.path(), spec.stage = 2;
    EXPECT_TRUE(train_local(spec).bits() == expected) << type;
    if (in_part() && type == "OneBitLamb") continue;  // which exchanges by the same code
    spec.offload_optimizer = "none";
    EXPECT_TRUE(train_local(spec).bits() == expected) << type;
    spec.stage = 3, spec.offload_param = "nvme";  // the GPU updates what the store writes
    spec.offload_param_extra = R"(, "max_in_cpu": 0)";
    EXPECT_TRUE(train_local(spec).bits() == expected) << type << ", parameters on NVMe";
    spec.stage = 2, spec.offload_param = "none", spec.offload_param_extra.clear();
    spec.ranks = 1;  // who has nobody to send anything to
    const auto alone = train_local(spec).bits();
    spec.offload_optimizer = "cpu";
    EXPECT_TRUE(train_local(spec).bits() == alone) << type;
  }
}

/// Tensor ranks with sequence parallelism, and both ways of context parallelism.
TEST_F(GpuTraining, ranks_that_share_a_model_follow_the_processor) {
  struct Layout {
    int tensor, context;
    const char* method;
  };
  for (const auto& [tensor, context, method] : {Layout{2, 1, "ring"}, {1, 2, "ring"}, {1, 2, "ulysses"}}) {
    SCOPED_TRACE(cat("tensor ", tensor, ", context ", context, " by ", method));
    RunSpec spec = on_gpu();
    spec.ranks = 2, spec.tensor = tensor, spec.context = context, spec.context_method = method;
    spec.dtype = "fp32", spec.dropout = 0, spec.layers = 2;
    spec.steps = on_emulated_gpu() ? 2 : 10;
    RunSpec cpu = spec;
    cpu.device = "cpu";
    const RunResult here = train_local(cpu), there = train_local(spec);
    for (std::size_t i = 0; i < here.losses.size(); ++i)
      EXPECT_NEAR(there.losses[i], here.losses[i], 1e-4 * here.losses[i]) << "step " << i;
    spec.stage = 3, spec.graphs = true, spec.recompute = "selective";
    EXPECT_TRUE(train_local(spec).bits() == there.bits());
  }
}

/// Routers, and rows that come and go between two ranks' experts.
TEST_F(GpuTraining, experts_follow_the_processor) {
  RunSpec spec = on_gpu();
  spec.dtype = "fp32", spec.dropout = 0, spec.layers = 2, spec.stage = 3;
  spec.moe = R"("experts": 4, "top_k": 2, "ffn_hidden_size": 64, "capacity_factor": 1.25, "z_loss": 1e-3)";
  spec.steps = on_emulated_gpu() ? 2 : 10;
  RunSpec cpu = spec;
  cpu.device = "cpu";
  const RunResult here = train_local(cpu), there = train_local(spec);
  for (std::size_t i = 0; i < here.losses.size(); ++i)
    EXPECT_NEAR(there.losses[i], here.losses[i], 1e-4 * here.losses[i]) << "step " << i;
  spec.graphs = true;
  EXPECT_TRUE(train_local(spec).bits() == there.bits()) << "by graphs";
  spec.graphs = false;
  spec.ranks = 2, spec.accumulate_in = "fp32";
  const RunResult data = train_local(spec);
  spec.expert = 2;
  EXPECT_TRUE(train_local(spec).bits() == data.bits()) << "shared out";
  spec.offload_param = spec.offload_optimizer = "nvme", spec.nvme_path = folder.path();
  spec.offload_param_extra = R"(, "max_in_cpu": 0)";
  EXPECT_TRUE(train_local(spec).bits() == data.bits()) << "shared out, on NVMe";
}

TEST_F(GpuTraining, recompute_and_resume_change_no_bit) {
  RunSpec spec = on_gpu();
  const auto expected = train_local(spec).bits();
  RunSpec full = spec;
  full.recompute = "full";
  EXPECT_TRUE(train_local(full).bits() == expected) << "full recompute";
  full.cpu_checkpointing = true;
  EXPECT_TRUE(train_local(full).bits() == expected) << "checkpoints in the host tier";
  RunSpec resumed = spec;
  resumed.resume_at = spec.steps / 2, resumed.directory = folder.path();
  EXPECT_TRUE(train_local(resumed).bits() == expected) << "resumed";
  RunSpec nudged = spec;
  nudged.nudge_step = spec.steps - 1;
  EXPECT_FALSE(train_local(nudged).bits() == expected) << "one ulp went unnoticed";
}

/// cuDNN takes bf16 without dropout. Some sequences fill its tiles, so that it has kernels for their
/// gradient; others, of 200 tokens, fill the last tile in part.
class GpuTrainingByCudnn : public GpuTraining, public ::testing::WithParamInterface<std::tuple<bool, int>> {
 protected:
  RunSpec spec() const {
    RunSpec made = on_gpu();
    made.dropout = 0, made.layers = 2;
    if (!on_emulated_gpu()) made.seq = std::get<1>(GetParam());  // an emulated one has no cuDNN
    made.llama = std::get<0>(GetParam());
    made.rows = 3, made.steps = on_emulated_gpu() ? 2 : 6;
    if (made.llama) made.kv_heads = 2;  // grouped: sequences are regrouped by kind of head
    return made;
  }
};
INSTANTIATE_TEST_SUITE_P(Of, GpuTrainingByCudnn,
                         ::testing::Combine(::testing::Bool(), ::testing::Values(128, 200)),
                         [](const auto& test) {
                           return cat(std::get<0>(test.param) ? "llama" : "gpt2", std::get<1>(test.param));
                         });

TEST_P(GpuTrainingByCudnn, has_the_same_bits_in_every_setting) {
  if (in_part() && std::get<1>(GetParam()) != 128) GTEST_SKIP() << "no cuDNN here; see the other length";
  const RunSpec plain = spec();
  const RunResult expected = train_local(plain);
  // Up to 9.15 it gets gradients wrong whose last tile is in part.
  const std::size_t cudnn = on_emulated_gpu() ? 0 : tensor::loaded_cudnn();
  EXPECT_GT(expected.attention.by_library + expected.attention.by_own, 0u);
  if (cudnn > 0) {
    EXPECT_GT(expected.attention.by_library, 0u) << "see the warnings: is there no NVRTC?";
  }
  if (cudnn > 91500 || (cudnn > 0 && plain.seq % 128 == 0)) {
    EXPECT_EQ(expected.attention.by_own, 0u);
  }
  const auto same = [&](const char* what, const auto& change) {
    RunSpec other = plain;
    change(other);
    EXPECT_TRUE(train_local(other).bits() == expected.bits()) << what;
  };
  same("again", [](RunSpec&) {});
  same("by graphs", [](RunSpec& s) { s.graphs = true; });
  same("selective recompute", [](RunSpec& s) { s.recompute = "selective"; });
  same("full recompute", [](RunSpec& s) { s.recompute = "full"; });
  same("full recompute by graphs", [](RunSpec& s) { s.recompute = "full", s.graphs = true; });
  same("optimizer off the card", [](RunSpec& s) { s.stage = 2, s.offload_optimizer = "cpu"; });
  same("all off the card", [](RunSpec& s) { s.stage = 3, s.offload_optimizer = s.offload_param = "cpu"; });
  same("resumed", [&](RunSpec& s) { s.resume_at = s.steps / 2, s.directory = folder.path(); });
}

TEST_P(GpuTrainingByCudnn, follows_the_processor) {
  if (in_part() && std::get<1>(GetParam()) != 128) GTEST_SKIP() << "no cuDNN here; see the other length";
  RunSpec cpu = spec();
  cpu.device = "cpu";
  const RunResult here = train_local(cpu), there = train_local(spec());
  for (std::size_t i = 0; i < here.losses.size(); ++i)
    EXPECT_NEAR(there.losses[i], here.losses[i], 5e-3 * here.losses[i]) << "step " << i;
}

}  // namespace
}  // namespace sherd::test
