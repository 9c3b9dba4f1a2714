// Rules that measure, on whole models, against PyTorch (scripts/references/make_trust_reference.py): norms
// are those of the tensors that people publish, Q, K, V, gate and up apart, GPT-2's c_attn as one, without
// the rows that pad a vocabulary.
#include <gtest/gtest.h>

#include "tests/engine/oracle/whole_model.h"

namespace sherd::test {
namespace {

struct Rule {
  const char *name, *section;
  friend void PrintTo(const Rule& rule, std::ostream* to) { *to << rule.name; }
};
const Rule rules[] = {
    {"lamb",
     R"({"type": "Lamb", "params": {"lr": 0.01, "betas": [0.9, 0.99], "eps": 1e-4, "weight_decay": 0.1}})"},
    {"nvlamb",
     R"({"type": "NVLamb", "params": {"lr": 0.01, "betas": [0.9, 0.99], "eps": 1e-4, "weight_decay": 0.1}})"},
    {"lars",
     R"({"type": "LARS", "params": {"lr": 5.0, "momentum": 0.9, "trust_coefficient": 0.02, "eps": 1e-8,
                                             "weight_decay": 0.1}})"},
    {"larc",
     R"({"type": "LARS", "params": {"lr": 0.1, "momentum": 0.9, "trust_coefficient": 0.02, "eps": 1e-8,
                                             "weight_decay": 0.1, "clip": true}})"}};

/// Where a run's ranks stand.
struct TrustSetting {
  const char* name;
  int ranks;
  std::int64_t padding;
  const char* key;
  friend void PrintTo(const TrustSetting& setting, std::ostream* to) { *to << setting.name; }
};
const TrustSetting trust_settings[] = {
    {"padded", 1, 128, ""},
    {"unpadded", 1, 1, ""},
    {"two_ranks", 2, 128, R"(zero_optimization={"stage": 2})"},
    {"tensor_2", 2, 128, R"(parallel={"tensor": 2, "sequence_parallel": false})"}};

WholeModelOutcome train_rule(bool llama, const Rule& rule, const TrustSetting& setting) {
  WholeModelRun run{llama, setting.ranks, setting.padding, {}};
  run.keys = {cat("optimizer=", rule.section), "gradient_clipping=0", "gradient_accumulation_steps=1",
              cat("train_micro_batch_size_per_gpu=", std::strstr(setting.name, "two") ? 1 : 2)};
  if (*setting.key) run.keys.emplace_back(setting.key);
  return train_whole_model(run);
}

class TrustOracle : public ::testing::TestWithParam<std::tuple<bool, Rule, TrustSetting>> {};

TEST_P(TrustOracle, TrainsAsPyTorchWithEveryPublishedTensor) {
  const auto& [llama, rule, setting] = GetParam();
  const ModelReference reference =
      read_reference(SHERD_SOURCE_DIR "/tests/engine/reference/trust.safetensors");
  const std::string at = cat(llama ? "llama." : "gpt2.", rule.name);
  const std::vector<double> losses = reference.at(at + ".losses").values<double>();
  const std::vector<float> weights = reference.at(at + ".weights").values<float>();
  const WholeModelOutcome outcome = train_rule(llama, rule, setting);
  for (std::size_t step = 0; step < whole_model_steps; ++step)
    EXPECT_NEAR(outcome.losses.at(step), losses.at(step), 1e-6 * losses[step]) << "step " << step;
  EXPECT_LE(farthest(outcome.weights, weights), 2e-6);
}

INSTANTIATE_TEST_SUITE_P(All, TrustOracle,
                         ::testing::Combine(::testing::Bool(), ::testing::ValuesIn(rules),
                                            ::testing::ValuesIn(trust_settings)),
                         [](const auto& test) {
                           return cat(std::get<0>(test.param) ? "llama_" : "gpt2_",
                                      std::get<1>(test.param).name, "_", std::get<2>(test.param).name);
                         });

}  // namespace
}  // namespace sherd::test
