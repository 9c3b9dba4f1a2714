// Training that begins from the files of public families (tests/models/hugging_face_families_test.cpp), in
// every layout: the weights after a step against the gradients of transformers.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <map>

#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/weights.h"
#include "engine/initialize.h"
#include "engine/setup/process_grid.h"
#include "models/gpt.h"
#include "models/hub/config_json.h"
#include "models/hub/hugging_face_weights.h"
#include "support/cpu_fixture.h"
#include "support/expect_error.h"
#include "support/full_suite.h"
#include "support/hugging_face/hugging_face_dict.h"
#include "support/places.h"
#include "support/temp_folder.h"
#include "support/whole_tensors.h"

namespace sherd {
namespace {

namespace fs = std::filesystem;
using models::HostTensor;
using models::HuggingFaceLayout;
using models::HuggingFaceWeights;
using tensor::SafetensorsFile;
using tensor::Tensor;
using testing::read_text;
using testing::TempFolder;

struct HuggingFaceSetting {
  const char* name;
  int ranks, stage;
  const char* parallel;
  const char* zero;
  int rows = 2;  ///< rows of the batch in a micro-batch; 1: each rank, or each micro-batch, has one
};

constexpr HuggingFaceSetting hugging_face_settings[] = {
    {"alone_stage_0", 1, 0, "{}", ""},
    {"two_stage_3", 2, 3, "{}", ""},
    {"four_stage_3_on_host", 4, 3, "{}",
     R"(, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"})"},
    {"two_stage_3_on_nvme", 2, 3, "{}",
     R"(, "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"},
         "offload_param": {"device": "nvme", "nvme_path": "/tmp"})"},
    {"tensor_2", 2, 0, R"({"tensor": 2})", ""},
    {"pipeline_2_stage_1", 2, 1, R"({"pipeline": 2})", ""},
    {"tensor_2_data_2_stage_3", 4, 3, R"({"tensor": 2})", ""}};
const char* const families[] = {"gpt2",
                                "llama",
                                "llama_linear",
                                "mistral",
                                "qwen2",
                                "qwen3",
                                "mixtral",
                                "qwen3_moe",
                                "phi3",
                                "gemma3_text",
                                "granite",
                                "smollm3",
                                "glm4",
                                "ministral3",
                                "olmo2",
                                "olmo3",
                                "phi3_long",
                                "bert",
                                "modernbert",
                                "bert_classifier",
                                "gemma2",
                                "gpt_oss",
                                "llama_biases",
                                "deepseek_v2",
                                "deepseek_v3",
                                "glm4_moe",
                                "qwen2_moe",
                                "qwen3_next",
                                "qwen3_5",
                                "t5",
                                "t5_gated",
                                "bert_tokens",
                                "modernbert_tokens",
                                "bert_pretraining"};

struct Optimizer {
  const char* text;
  /// The weight after the first step with that gradient.
  double (*update)(double weight, double gradient);
  double tolerance;
};
const Optimizer plain_sgd{R"({"type": "SGD", "params": {"lr": 0.1, "weight_decay": 0}})",
                          [](double w, double g) { return w - 0.1 * g; }, 1e-6};
const Optimizer adamw{
    R"({"type": "AdamW", "params": {"lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-3, "weight_decay": 0}})",
    [](double w, double g) { return w - 0.01 * g / (std::abs(g) + 1e-3); },
    2e-6};  // where a gradient is next to zero, its rounding counts 10 times

class Begun : public ::testing::TestWithParam<std::tuple<const char*, HuggingFaceSetting>> {
 protected:
  Begun()
      : setting_(std::get<1>(GetParam())),
        folder_(fs::path(SHERD_SOURCE_DIR) / "tests/models/reference/hugging_face" / std::get<0>(GetParam())),
        expected_(folder_ / "expected.safetensors") {}

  config::Config config_with(const Optimizer& optimizer) const {
    const auto published = models::from_hugging_face(read_text(folder_ / "config.json"), "config.json");
    const std::string model = config::section_of(published.model);
    return config::parse_text(
        model, "the model",
        {cat("optimizer=", optimizer.text), cat("parallel=", setting_.parallel), "gradient_clipping=0",
         cat("zero_optimization={\"stage\": ", setting_.stage, setting_.zero, "}"),
         cat("train_micro_batch_size_per_gpu=", setting_.rows),
         cat("gradient_accumulation_steps=", accumulation()), "model.dropout=0", "model.attention_dropout=0",
         "model.embedding_dropout=0"});
  }
  int accumulation() const {
    const bool by_stages =
        std::strstr(setting_.parallel, "pipeline") || std::strstr(setting_.parallel, "tensor");
    return setting_.rows == 2 ? 1 : by_stages ? 2 : 2 / setting_.ranks;
  }
  HuggingFaceWeights weights_for(const config::Config& config) const { return {folder_, layout_for(config)}; }
  static HuggingFaceLayout layout_for(const config::Config& config) {
    return HuggingFaceLayout(models::gpt_config(config, config.model->vocab_size));
  }
  /// The whole batch, or where micro-batches have one row that row.
  tensor::Batch batch(device::Device& device, int row = 0) const {
    tensor::Batch out;
    for (const char* name : {"token_types", "sentence_labels", "tokens", "labels"}) {
      if (!expected_.find(name)) continue;
      std::vector<std::int32_t> ids(static_cast<std::size_t>(12 * setting_.rows));
      expected_.read_bytes(expected_.at(name), static_cast<std::uint64_t>(row) * 48,
                           std::as_writable_bytes(std::span(ids)));
      out[name] = Tensor::of<std::int32_t>(device, {setting_.rows, 12}, ids);
      const auto targets =
          static_cast<std::int32_t>(std::count_if(ids.begin(), ids.end(), [](int id) { return id >= 0; }));
      out["target_tokens"] =
          Tensor::of<std::int32_t>(device, {1}, std::vector<std::int32_t>{targets});  // of labels
    }
    return out;
  }
  /// The mean over all targets, as transformers has it.
  double published_loss() const {
    float loss = 0;
    expected_.read_bytes(expected_.at("loss"), 0, std::as_writable_bytes(std::span(&loss, 1)));
    return loss;
  }
  /// A parameter of what transformers has, "grad." for gradients, as fp32. All layouts of a family look at
  /// it.
  const std::vector<float>& published(const HuggingFaceLayout& layout, const std::string& parameter,
                                      bool gradient) const {
    static std::map<std::tuple<std::string, std::string, bool>, std::vector<float>> known;
    std::vector<float>& values = known[{folder_.string(), parameter, gradient}];
    if (!values.empty()) return values;
    const tensor::SafetensorsFolder files(folder_);
    const HostTensor host =
        models::from_dict(layout, parameter, [&](const std::string& name) -> std::optional<HostTensor> {
          const auto* entry = gradient ? expected_.find("grad." + name) : files.find(name);
          if (!entry) return std::nullopt;
          HostTensor out{tensor::Shape{std::span<const std::int64_t>(entry->shape)}, *entry->dtype,
                         std::vector<std::byte>(entry->bytes)};
          gradient ? expected_.read_bytes(*entry, 0, out.bytes) : files.read_bytes(name, 0, out.bytes);
          return out;
        });
    values.resize(host.bytes.size() / sizeof(float));
    std::memcpy(values.data(), host.bytes.data(), host.bytes.size());
    return values;
  }

  HuggingFaceSetting setting_;
  fs::path folder_;
  SafetensorsFile expected_;
};

/// A pipeline is refused where the balance loss is one of all layers together, as Mixtral's, and tensor ranks
/// where all heads have one norm, as OLMo's.
bool is_refused(std::string_view family, const char* parallel) {
  return ((family == "mixtral" || family == "gpt_oss") && std::strstr(parallel, "pipeline")) ||
         (family.starts_with("olmo") && std::strstr(parallel, "tensor"));
}

/// The families that the suite tries in every layout, and with an optimizer that has states.
bool is_everywhere(std::string_view family) {
  return test::full_suite() || family == "gpt2" || family == "llama" || family == "mixtral" ||
         family == "qwen3_moe";
}

/// The suite tries the other families, whose blocks tests/engine/equality/blocks_equality_test.cpp has in all
/// layouts, in those of one axis alone.
std::vector<std::tuple<const char*, HuggingFaceSetting>> cases() {
  std::vector<std::tuple<const char*, HuggingFaceSetting>> out;
  for (const char* family : families)
    for (const HuggingFaceSetting& setting : hugging_face_settings) {
      const std::string_view name = setting.name;
      const bool one_axis = name == "two_stage_3" || name == "tensor_2" || name == "pipeline_2_stage_1";
      if (!is_everywhere(family) && !one_axis) continue;
      if (!is_refused(family, setting.parallel)) out.emplace_back(family, setting);
    }
  for (const char* family : {"gemma3_text", "smollm3", "glm4", "ministral3", "olmo3", "phi3_long", "bert",
                             "modernbert", "gemma2", "gpt_oss", "deepseek_v3"})
    out.emplace_back(family, HuggingFaceSetting{"context_2_stage_3", 2, 3, R"({"context": 2})",
                                                R"(, "offload_param": {"device": "cpu"})"});
  return out;
}

/// Rows of 7 and 11 targets in micro-batches of their own: the mean over all tokens does not see how they
/// lie.
std::vector<std::tuple<const char*, HuggingFaceSetting>> cases_of_rows() {
  std::vector<std::tuple<const char*, HuggingFaceSetting>> out;
  const char* host = R"(, "offload_optimizer": {"device": "cpu"})";
  for (const char* family : {"gpt2", "llama"})
    for (const HuggingFaceSetting& setting :
         {HuggingFaceSetting{"alone_stage_0", 1, 0, "{}", "", 1},
          HuggingFaceSetting{"alone_stage_2", 1, 2, "{}", host, 1},
          HuggingFaceSetting{"two_stage_1", 2, 1, "{}", "", 1},
          HuggingFaceSetting{"two_stage_3", 2, 3, "{}", "", 1},
          HuggingFaceSetting{"tensor_2", 2, 0, R"({"tensor": 2})", "", 1},
          HuggingFaceSetting{"layered", 1, 3, R"({"schedule": "layered"})", "", 1},
          HuggingFaceSetting{"pipeline_2", 2, 0, R"({"pipeline": 2})", "", 1}})
      out.emplace_back(family, setting);
  return out;
}

TEST_P(Begun, AStepMovesTheWeightsAsTheGradientsOfTransformersSay) {
  for (const Optimizer* each : {&plain_sgd, &adamw}) {
    const Optimizer& optimizer = *each;
    if (each == &adamw && !is_everywhere(std::get<0>(GetParam()))) break;
    const config::Config config = config_with(optimizer);
    const TempFolder saved;
    launch_ranks(setting_.ranks, [&](DistributedPtr dist) {
      const auto groups = make_groups(dist, config);
      const auto options = models::gpt_config(config, config.model->vocab_size);
      Engine engine(dist, std::make_shared<models::Gpt>(options, layout_of(*groups, config)), config, nullptr,
                    nullptr, groups);
      HuggingFaceWeights weights = weights_for(config);
      engine.load_weights(weights);
      engine.save_checkpoint(saved.path().string(), "begun");
      int row = engine.data_ranks().rank();
      const auto& report = engine.train_batch([&] {
        return batch(engine.device(),
                     setting_.rows == 2 ? 0 : std::exchange(row, row + engine.data_ranks().size()));
      });
      if (setting_.rows == 1) {
        EXPECT_NEAR(report.loss, published_loss(), 1e-5);
      }
      engine.synchronize();
      engine.save_checkpoint(saved.path().string(), "stepped");
    });
    const HuggingFaceLayout layout = layout_for(config);
    const auto begun = testing::whole_tensors(saved / "begun"),
               stepped = testing::whole_tensors(saved / "stepped");
    for (const auto& [name, bytes] : stepped) {
      if (!name.starts_with("fp32.")) continue;
      SCOPED_TRACE(name);
      const std::string parameter = name.substr(5);
      const std::vector<float>&want = published(layout, parameter, false),
            &g = published(layout, parameter, true);
      ASSERT_EQ(bytes.size(), want.size() * sizeof(float));
      EXPECT_EQ(std::memcmp(begun.at(name).data(), want.data(), bytes.size()), 0) << "loaded to the bit";
      std::vector<float> got(want.size());
      std::memcpy(got.data(), bytes.data(), bytes.size());
      for (std::size_t i = 0; i < want.size(); ++i) {
        const double expected = optimizer.update(want[i], g[i]);
        if (std::abs(got[i] - expected) <= optimizer.tolerance) continue;
        ASSERT_NEAR(got[i], expected, optimizer.tolerance) << "element " << i;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(RowByRow, Begun, ::testing::ValuesIn(cases_of_rows()), [](const auto& test) {
  return cat(std::get<0>(test.param), "_", std::get<1>(test.param).name);
});

INSTANTIATE_TEST_SUITE_P(All, Begun, ::testing::ValuesIn(cases()), [](const auto& test) {
  return cat(std::get<0>(test.param), "_", std::get<1>(test.param).name);
});

}  // namespace
}  // namespace sherd
