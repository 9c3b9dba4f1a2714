// Training of pruned models against PyTorch, masked as NVIDIA's ASP does it
// (scripts/references/make_sparsity_reference.py): which weights are pruned, that gradients are masked before
// their norm, and that weights stay zero.
#include <gtest/gtest.h>

#include "tests/engine/oracle/whole_model.h"

namespace sherd::test {
namespace {

struct SparseRule {
  const char *name, *section;
  friend void PrintTo(const SparseRule& rule, std::ostream* to) { *to << rule.name; }
};
const SparseRule sparse_rules[] = {
    {"adamw",
     R"({"type": "AdamW", "params": {"lr": 0.003, "betas": [0.9, 0.99], "eps": 1e-4, "weight_decay": 0.1}})"},
    {"sgd",
     R"({"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": true, "weight_decay": 0.1}})"}};

/// Where a run's ranks stand.
struct SparseSetting {
  const char* name;
  int ranks, rows;
  std::vector<std::string> keys;
  friend void PrintTo(const SparseSetting& setting, std::ostream* to) { *to << setting.name; }
};
const SparseSetting sparse_settings[] = {
    {"alone", 1, 2, {}},
    {"stage_3", 2, 1, {R"(zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 0})"}},
    {"tensor_2", 2, 2, {R"(parallel={"tensor": 2, "sequence_parallel": false})"}}};

class SparsityOracle : public ::testing::TestWithParam<std::tuple<bool, SparseRule, SparseSetting>> {};

TEST_P(SparsityOracle, TrainsAsPyTorchDoesWithMasks) {
  const auto& [llama, rule, setting] = GetParam();
  const ModelReference reference =
      read_reference(SHERD_SOURCE_DIR "/tests/engine/reference/sparsity.safetensors");
  const std::string at = cat(llama ? "llama." : "gpt2.", rule.name);
  WholeModelRun run{llama, setting.ranks, 2, setting.keys};
  run.keys.insert(
      run.keys.end(),
      {cat("optimizer=", rule.section), "gradient_clipping=0.5", "gradient_accumulation_steps=1",
       cat("train_micro_batch_size_per_gpu=", setting.rows), R"(training.sparsity={"pattern": "2:4"})"});
  const WholeModelOutcome got = train_whole_model(run);
  const std::vector<double> losses = reference.at(at + ".losses").values<double>(),
                            norms = reference.at(at + ".norms").values<double>();
  for (std::size_t step = 0; step < whole_model_steps; ++step) {
    EXPECT_NEAR(got.losses.at(step), losses.at(step), 1e-6 * losses[step]) << "step " << step;
    EXPECT_NEAR(got.norms.at(step), norms.at(step), 2e-6 * norms[step]) << "step " << step;
  }
  EXPECT_LE(farthest(got.weights, reference.at(at + ".weights").values<float>()), 1e-6);
}

INSTANTIATE_TEST_SUITE_P(All, SparsityOracle,
                         ::testing::Combine(::testing::Bool(), ::testing::ValuesIn(sparse_rules),
                                            ::testing::ValuesIn(sparse_settings)),
                         [](const auto& test) {
                           return cat(std::get<0>(test.param) ? "llama_" : "gpt2_",
                                      std::get<1>(test.param).name, "_", std::get<2>(test.param).name);
                         });

}  // namespace
}  // namespace sherd::test
