// The recorded work of a transformer's parts, against the formulas of the papers.
#include "engine/estimate/part_work.h"

#include <gtest/gtest.h>

#include "planning/model_work.h"

namespace sherd::planning {
namespace {

using comm::Collective;
using comm::CommWork;
using engine::PartWork;
using engine::Work;
using tensor::KernelFamily;
using tensor::KernelWork;

constexpr std::int64_t s = 128, b = 4, h = 256, a = 8, layers = 6, V = 1024;

config::Config config_of(const std::string& more = "{}", const std::string& model = "") {
  config::Config config = config::parse_text(
      cat(R"({"model": {"hidden_size": )", h, R"(, "num_layers": )", layers, R"(, "num_heads": )", a,
          R"(, "vocab_size": )", V, R"(, "seq_length": )", s, model,
          R"(}, "bf16": {"enabled": true}, "train_micro_batch_size_per_gpu": )", b,
          R"(, "gradient_accumulation_steps": 1, "device": {"type": "cuda"}, "data": {"path": "unused"}})"),
      "model", {});
  config::Config out = config;
  const config::Config other = config::parse_text(more, "more");
  out.parallel = other.parallel, out.training.recompute = other.training.recompute;
  out.training.recompute_blocks = other.training.recompute_blocks;
  out.training.recompute_micro_batches = other.training.recompute_micro_batches;
  return out;
}

double flops(const std::vector<Work>& pass, KernelFamily family) {
  double sum = 0;
  for (const Work& work : pass)
    if (const auto* kernel = std::get_if<KernelWork>(&work))
      sum += kernel->family == family ? kernel->flops : 0;
  return sum;
}
std::vector<CommWork> calls(const std::vector<Work>& pass) {
  std::vector<CommWork> out;
  for (const Work& work : pass)
    if (const auto* call = std::get_if<CommWork>(&work)) out.push_back(*call);
  return out;
}
std::uint64_t bytes(const std::vector<Work>& pass) {
  std::uint64_t sum = 0;
  for (const CommWork& call : calls(pass)) sum += call.bytes;
  return sum;
}

const PartWork& block_of(const engine::ModelWork& work) {
  return work.part(work.parts.size() / 2);
}

TEST(PartWork, ABlocksProductsAreThoseOfTheFormula) {
  GptWork work(V);
  const PartWork& block = block_of(work.of(config_of()));
  // Narayanan et al. 2021, appendix: 24·B·s·h² for products and 4·B·s²·h for attention, causal half of it.
  EXPECT_EQ(flops(block.forward, KernelFamily::gemm), 24.0 * b * s * h * h);
  EXPECT_EQ(flops(block.forward, KernelFamily::attention), 4.0 * b * h * s * (s + 1) / 2);
  EXPECT_EQ(flops(block.backward, KernelFamily::gemm), 48.0 * b * s * h * h);
  EXPECT_EQ(block.trained, 12 * h * h + 13 * h) << "with biases and norms";
  EXPECT_TRUE(calls(block.forward).empty() && calls(block.backward).empty());
  EXPECT_EQ(block.output, 0u + 2 * b * s * h);
}

TEST(PartWork, FullRecomputeRunsForwardAgain) {
  GptWork work(V);
  const PartWork& plain = block_of(work.of(config_of()));
  const PartWork& again = block_of(work.of(config_of(R"({"training": {"recompute": "full"}})")));
  for (const KernelFamily family : {KernelFamily::gemm, KernelFamily::attention})
    EXPECT_EQ(flops(again.backward, family), flops(plain.backward, family) + flops(plain.forward, family));
  EXPECT_EQ(again.saved, 2u * b * s * h) << "the input alone";
  EXPECT_GT(plain.saved, 10 * again.saved);
}

TEST(PartWork, InputsOnNvmeAreNotOnTheDevice) {
  config::Config config = config_of(R"({"training": {"recompute": "full"}})");
  config.training.nvme_checkpointing = true;
  config.zero.offload_param.nvme_path = "a_folder";
  GptWork work(V);
  EXPECT_LT(block_of(work.of(config)).saved, 2u * b * s * h) << "no folder is made, and none is needed";
}

TEST(PartWork, SomeBlocksOfEachStageRecompute) {
  const auto recomputed = [](const std::string& blocks, const std::string& parallel) {
    GptWork work(V);
    const engine::ModelWork& model =
        work.of(config_of(cat(R"({"training": {"recompute": "full", "recompute_blocks": )", blocks,
                              R"(}, "parallel": {)", parallel, "}}")));
    std::string again;
    for (std::size_t i = 1; i <= layers; ++i)
      again += flops(model.part(i).backward, KernelFamily::gemm) > 60.0 * b * s * h * h ? 'r' : 'k';
    return cat(model.parts.size(), ' ', again);
  };
  EXPECT_EQ(recomputed("2", ""), "8 rrkkkk");
  EXPECT_EQ(recomputed("1", R"("pipeline": 2, "partition_method": "uniform")"), "8 rkkrkk");
  // The earlier of a stage's two chunks comes first.
  EXPECT_EQ(recomputed("1", R"("pipeline": 2, "virtual_stages": 2, "partition_method": "uniform")"),
            "8 rrkkkk");
  EXPECT_EQ(recomputed("6", ""), "8 rrrrrr");
}

TEST(PartWork, SomeMicroBatchesRecompute) {
  GptWork work(V);
  const engine::ModelWork& model = work.of(config_of(
      R"({"training": {"recompute": "full", "recompute_micro_batches": 1, "recompute_blocks": 4}})"));
  const double forward = flops(model.part(1).forward, KernelFamily::gemm);
  ASSERT_EQ(model.keeping.size(), model.parts.size());
  for (std::size_t i = 1; i <= layers; ++i) {
    EXPECT_EQ(flops(model.part(i).backward, KernelFamily::gemm), (i <= 4 ? 3 : 2) * forward) << i;
    EXPECT_EQ(flops(model.kinds[model.keeping[i]].backward, KernelFamily::gemm), 2 * forward) << i;
  }
  EXPECT_TRUE(work.of(config_of(R"({"training": {"recompute": "full"}})")).keeping.empty());
}

TEST(PartWork, TensorRanksExchangeWhatMegatronsDo) {
  for (const bool sequence : {false, true}) {
    GptWork work(V);
    const PartWork& block = block_of(work.of(config_of(
        cat(R"({"parallel": {"tensor": 4, "sequence_parallel": )", sequence ? "true" : "false", "}}"))));
    EXPECT_EQ(flops(block.forward, KernelFamily::gemm), 24.0 * b * s * h * h / 4);
    const std::uint64_t whole = 2 * b * s * h;  // bytes of the stream
    // Two all-reduces each way, of twice 3/4 of the whole (Shoeybi et al. 2019); sequence parallelism makes
    // of each an all-gather and a reduce-scatter, and gathers both inputs again for the gradients of weights
    // (Korthikanti et al. 2022).
    EXPECT_EQ(bytes(block.forward), 2 * 2 * (whole * 3 / 4));
    EXPECT_EQ(bytes(block.backward), (sequence ? 3 : 2) * 2 * (whole * 3 / 4)) << sequence;
    for (const CommWork& call : calls(block.forward)) {
      EXPECT_EQ(call.ranks, 4);
      EXPECT_EQ(call.stride, 1);
      EXPECT_EQ(call.kind == Collective::all_reduce, !sequence);
    }
  }
}

TEST(PartWork, ContextRanksPassKeysAndValuesAround) {
  GptWork work(V);
  const PartWork& block = block_of(work.of(config_of(R"({"parallel": {"context": 4}})")));
  EXPECT_EQ(flops(block.forward, KernelFamily::gemm), 24.0 * b * s * h * h / 4);
  // Every rank attends to as many scores: of 8 chunks it has two, c and 7 − c.
  EXPECT_EQ(flops(block.forward, KernelFamily::attention) * 4, 4.0 * b * h * s * (s + 1) / 2);
  std::uint64_t sent = 0;
  for (const CommWork& call : calls(block.forward)) sent += call.kind == Collective::send ? call.bytes : 0;
  EXPECT_EQ(sent, 3u * 2 * (2 * b * s * h / 4)) << "its keys and values, three times";
}

TEST(PartWork, ExpertsExchangeTokens) {
  GptWork work(V);
  const engine::ModelWork& model = work.of(
      config_of(R"({"parallel": {"expert": 4}})", R"(, "moe": {"experts": 8, "top_k": 2, "every": 2})"));
  const PartWork &dense = model.part(1), &experts = model.part(2);
  EXPECT_EQ(dense.experts, 0);
  EXPECT_EQ(experts.experts, 2 * (8 * h * h + 5 * h)) << "two of eight are here";
  EXPECT_TRUE(calls(dense.forward).empty());
  const auto told = calls(experts.forward);
  EXPECT_EQ(std::count_if(told.begin(), told.end(),
                          [](const CommWork& call) {
                            return call.kind == Collective::all_to_all && call.ranks == 4 &&
                                   call.bytes > b * s * h;
                          }),
            2)
      << "tokens go and come back";
  EXPECT_EQ(model.parts.size(), layers + 2u);
  EXPECT_EQ(model.parts[1], model.parts[3]);
  EXPECT_EQ(model.parts[2], model.parts[6]);
}

/// Layers with a window, without one, and without rotary positions are blocks of their own kinds.
TEST(PartWork, LayersOfSeveralTypesAreSeveralKinds) {
  GptWork work(V);
  const engine::ModelWork& model = work.of(config_of(
      "{}", cat(R"(, "position": "rotary", "sliding_window": )", s / 8,
                R"(, "layer_types": ["sliding_attention", "full_attention"], "no_rope_layer_interval": 4)")));
  ASSERT_EQ(model.parts.size(), layers + 2u);
  EXPECT_EQ(model.parts[1], model.parts[3]);
  EXPECT_NE(model.parts[1], model.parts[2]);
  EXPECT_NE(model.parts[2], model.parts[4]) << "the fourth has no rotary positions";
  EXPECT_LT(flops(model.part(1).forward, KernelFamily::attention),
            0.3 * flops(model.part(2).forward, KernelFamily::attention));
  EXPECT_EQ(flops(model.part(4).forward, KernelFamily::attention),
            flops(model.part(2).forward, KernelFamily::attention));
}

/// The reference that is the model without its adapter goes forward once; KTO's baseline takes the policy and
/// the reference through other answers, too; what was computed once takes nothing.
TEST(PartWork, PreferencesRunForwardBeforeTheStep) {
  const auto passes = [](const char* objective, const char* reference) {
    config::Config config = config_of();
    config.training = config::parse_text(cat(R"({"training": {"objective": ")", objective,
                                             R"(", "preference": {"reference": ")", reference,
                                             R"("}, "adapter": {"type": "lora", "r": 8}}})"),
                                         "training")
                          .training;
    GptWork work(V);
    const engine::ModelWork& model = work.of(config);
    for (const std::size_t part : {std::size_t{1}, std::size_t{layers}})
      EXPECT_EQ(flops(model.part(part).reference, KernelFamily::attention),
                flops(model.part(1).reference, KernelFamily::attention));
    EXPECT_EQ(flops(model.part(0).reference, KernelFamily::gemm), 0) << "tables";
    return flops(block_of(model).reference, KernelFamily::gemm) / (24.0 * b * s * h * h);
  };
  EXPECT_EQ(passes("dpo", "adapter"), 1);
  EXPECT_EQ(passes("kto", "adapter"), 3);
  EXPECT_EQ(passes("dpo", "precomputed"), 0);
  EXPECT_NEAR(passes("kto", "precomputed"), 1 + 2.0 * 8 * 4 * h / (24.0 * h * h), 1e-9) << "with its LoRA";
}

TEST(PartWork, WhatIsRecordedOnceIsKept) {
  GptWork work(V);
  const engine::ModelWork* first = &work.of(config_of());
  work.of(config_of(R"({"parallel": {"tensor": 2}})"));
  EXPECT_EQ(&work.of(config_of()), first);
}

}  // namespace
}  // namespace sherd::planning
