// Rules that measure, on whole models, against PyTorch (scripts/references/make_trust_reference.py): norms
// are those of the tensors that people publish, Q, K, V, gate and up apart, GPT-2's c_attn as one, without
// the rows that pad a vocabulary.
#include <gtest/gtest.h>

#include "engine/engine.h"
#include "engine/setup/process_grid.h"
#include "models/gpt.h"
#include "support/hugging_face/hugging_face_dict.h"
#include "support/logical_states.h"
#include "support/places.h"
#include "support/reference_file.h"

namespace sherd::test {
namespace {

using models::HostTensor;
using models::HuggingFaceLayout;
using tensor::Tensor;
using TrustReference = std::map<std::string, ReferenceTensor>;

constexpr int trust_steps = 4;
constexpr std::size_t each = 37;  ///< the file has one of so many of the weights' elements

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
  const char* keys;
  friend void PrintTo(const TrustSetting& setting, std::ostream* to) { *to << setting.name; }
};
const TrustSetting trust_settings[] = {
    {"padded", 1, 128, "{}"},
    {"unpadded", 1, 1, "{}"},
    {"two_ranks", 2, 128, R"({"zero_optimization": {"stage": 2}})"},
    {"tensor_2", 2, 128, R"({"parallel": {"tensor": 2, "sequence_parallel": false}})"}};

models::GptConfig options_of(bool llama, std::int64_t padding) {
  models::GptConfig o = llama ? models::GptConfig::of_family("llama") : models::GptConfig();
  o.vocab_size = llama ? 101 : 97, o.pad_vocab_to_multiple_of = padding, o.seq_length = llama ? 32 : 24;
  o.hidden_size = 48, o.num_layers = 2, o.num_heads = llama ? 6 : 4, o.norm_epsilon = llama ? 1e-6 : 1e-5;
  if (llama) o.num_kv_heads = 2, o.ffn_hidden_size = 80;
  return o;
}

/// The weights that the models begin with.
class GivenWeights : public nn::WeightSource {
 public:
  GivenWeights(const TrustReference& file, const HuggingFaceLayout& layout) : file_(file), layout_(layout) {}
  void check(const std::vector<nn::ParameterPtr>&) const override {}
  void read(const std::string& name, const tensor::Slice& slice, std::int64_t begin,
            const Tensor& to) override {
    const HostTensor host =
        models::from_dict(layout_, name, [&](const std::string& published) -> std::optional<HostTensor> {
          const ReferenceTensor& found = file_.at(published);
          return HostTensor{found.shape, found.dtype, found.bytes};
        });
    slice.for_each_run(begin, begin + to.numel(),
                       [&](std::int64_t local, std::int64_t logical, std::int64_t n) {
                         std::memcpy(to.data<float>() + (local - begin), host.bytes.data() + logical * 4,
                                     static_cast<std::size_t>(n) * 4);
                       });
  }

 private:
  const TrustReference& file_;
  const HuggingFaceLayout& layout_;
};

/// The rows of this rank, of as many as there are.
tensor::Batch batch_of(const TrustReference& file, Engine& engine) {
  tensor::Batch out;
  const std::int64_t ranks = engine.data_ranks().size(), rank = engine.data_ranks().rank();
  for (const char* name : {"tokens", "labels"}) {
    const ReferenceTensor& both = file.at(name);
    const std::int64_t rows = both.shape[0] / ranks;
    const std::vector<std::int32_t> ids = both.values<std::int32_t>();
    const auto count = static_cast<std::size_t>(rows * both.shape[1]);
    out[name] =
        Tensor::of<std::int32_t>(engine.device(), {rows, both.shape[1]},
                                 std::span(ids).subspan(count * static_cast<std::size_t>(rank), count));
  }
  return out;
}

struct TrustOutcome {
  std::vector<double> losses;
  std::vector<float> weights;
};

TrustOutcome train_rule(bool llama, const Rule& rule, const TrustSetting& setting) {
  const models::GptConfig options = options_of(llama, setting.padding);
  const HuggingFaceLayout layout(options);
  const TrustReference file = read_reference(
      cat(SHERD_SOURCE_DIR "/tests/models/reference/", llama ? "llama" : "gpt2", ".safetensors"));
  const config::Config config = config::parse_text(
      setting.keys, "the setting",
      {cat("optimizer=", rule.section), "gradient_clipping=0", "gradient_accumulation_steps=1",
       cat("train_micro_batch_size_per_gpu=", std::strstr(setting.name, "two") ? 1 : 2)});
  TrustOutcome out;
  LogicalStateCollector collector;
  launch_ranks(setting.ranks, [&](DistributedPtr dist) {
    const auto groups = make_groups(dist, config);
    Engine engine(dist, std::make_shared<models::Gpt>(options, layout_of(*groups, config)), config, nullptr,
                  nullptr, groups);
    GivenWeights given(file, layout);
    engine.load_weights(given);
    std::vector<double> losses;
    for (int step = 0; step < trust_steps; ++step)
      losses.push_back(engine.train_batch([&] { return batch_of(file, engine); }).loss);
    engine.synchronize();
    collector.add(engine);
    if (dist->rank() == 0) out.losses = std::move(losses);
  });
  std::map<std::string, HostTensor> published;
  for (const auto& [name, bytes] : collector.take()) {
    if (!name.starts_with("fp32.")) continue;
    for (auto& [tensor, value] : models::to_dict(layout, name.substr(5), {{}, DType::f32, bytes}))
      published.emplace(tensor, std::move(value));
  }
  for (const auto& [name, value] : published)
    for (std::size_t i = 0; i < value.bytes.size() / sizeof(float); i += each)
      std::memcpy(&out.weights.emplace_back(), value.bytes.data() + i * sizeof(float), sizeof(float));
  return out;
}

class TrustOracle : public ::testing::TestWithParam<std::tuple<bool, Rule, TrustSetting>> {};

TEST_P(TrustOracle, TrainsAsPyTorchWithEveryPublishedTensor) {
  const auto& [llama, rule, setting] = GetParam();
  const TrustReference reference =
      read_reference(SHERD_SOURCE_DIR "/tests/engine/reference/trust.safetensors");
  const std::string at = cat(llama ? "llama." : "gpt2.", rule.name);
  const std::vector<double> losses = reference.at(at + ".losses").values<double>();
  const std::vector<float> weights = reference.at(at + ".weights").values<float>();
  const TrustOutcome outcome = train_rule(llama, rule, setting);
  for (std::size_t step = 0; step < trust_steps; ++step)
    EXPECT_NEAR(outcome.losses.at(step), losses.at(step), 1e-6 * losses[step]) << "step " << step;
  ASSERT_EQ(outcome.weights.size(), weights.size());
  double most = 0;
  for (std::size_t i = 0; i < weights.size(); ++i)
    most = std::max(most, std::abs(static_cast<double>(outcome.weights[i]) - weights[i]));
  EXPECT_LE(most, 2e-6);
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
