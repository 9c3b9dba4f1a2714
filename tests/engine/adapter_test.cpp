// Training of adapters that PEFT wrote (tests/models/adapters_test.cpp), in every layout: the adapter after a
// step against PEFT's gradients, and the model's own weights, which stay as they are.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>

#include "config/hugging_face.h"
#include "engine/checkpoint.h"
#include "engine/initialize.h"
#include "engine/process_grid.h"
#include "engine/weights.h"
#include "models/adapters.h"
#include "models/from_config.h"
#include "models/gpt.h"
#include "models/hugging_face_weights.h"
#include "support/cpu_fixture.h"
#include "support/hugging_face_dict.h"
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

struct Setting {
  const char* name;
  int ranks, stage;
  const char* parallel;
  const char* zero;
};

constexpr Setting settings[] = {
    {"alone_stage_0", 1, 0, "{}", ""},
    {"two_stage_3", 2, 3, "{}", ""},
    {"two_stage_3_on_host", 2, 3, "{}",
     R"(, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"})"},
    {"tensor_2", 2, 0, R"({"tensor": 2})", ""},
    {"tensor_2_whole_streams", 2, 1, R"({"tensor": 2, "sequence_parallel": false})", ""},
    {"context_2", 2, 0, R"({"context": 2})", ""},
    {"pipeline_2_stage_1", 2, 1, R"({"pipeline": 2})", ""},
    {"tensor_2_data_2_stage_3", 4, 3, R"({"tensor": 2})", ""}};
const char* const adapters[] = {"gpt2_all",   "gpt2_default", "llama_all", "llama_default",
                                "qwen2_some", "gpt2_ia3",     "llama_ia3", "qwen2_ia3"};

constexpr double rate = 0.01, epsilon = 1e-3;

/// AdamW's first step, by its formula.
double updated(double weight, double gradient) {
  return weight - rate * gradient / (std::abs(gradient) + epsilon);
}

class Adapted : public ::testing::TestWithParam<std::tuple<const char*, Setting>> {
 protected:
  Adapted()
      : setting_(std::get<1>(GetParam())),
        folder_(reference() / "peft" / std::get<0>(GetParam())),
        family_(reference() / "hugging_face" /
                std::string(std::get<0>(GetParam()), std::strchr(std::get<0>(GetParam()), '_'))),
        expected_(folder_ / "expected.safetensors") {}

  static fs::path reference() { return fs::path(SHERD_SOURCE_DIR) / "tests/models/reference"; }
  config::Config config() const {
    const auto published = config::from_hugging_face(read_text(family_ / "config.json"), "config.json");
    config::Config out =
        config::parse_text(config::section_of(published.model), "the model",
                           {cat(R"(optimizer={"type": "AdamW", "params": {"lr": )", rate,
                                R"(, "betas": [0.9, 0.95], "eps": )", epsilon, R"(, "weight_decay": 0}})"),
                            cat("parallel=", setting_.parallel), "gradient_clipping=0",
                            cat("zero_optimization={\"stage\": ", setting_.stage, setting_.zero, "}"),
                            "train_micro_batch_size_per_gpu=2", "model.dropout=0",
                            "model.attention_dropout=0", "model.embedding_dropout=0"});
    out.training.adapter =
        config::from_peft(read_text(folder_ / "adapter_config.json"), "adapter_config.json");
    return out;
  }
  tensor::Batch batch(device::Device& device) const {
    tensor::Batch out;
    for (const char* name : {"tokens", "labels"}) {
      const Tensor ids = Tensor::empty(device, {2, 12}, DType::i32);
      expected_.read(name, 0, ids);
      out[name] = ids;
    }
    const auto* labels = out["labels"].data<std::int32_t>();
    const auto targets =
        static_cast<std::int32_t>(std::count_if(labels, labels + 24, [](int id) { return id >= 0; }));
    out["target_tokens"] = Tensor::of<std::int32_t>(device, {1}, std::vector<std::int32_t>{targets});
    return out;
  }
  double published_loss() const {
    float loss = 0;
    expected_.read_bytes(expected_.at("loss"), 0, std::as_writable_bytes(std::span(&loss, 1)));
    return loss;
  }
  /// PEFT's values of an adapter's parameter, or their gradients.
  std::vector<float> published(const HuggingFaceLayout& layout, const std::string& parameter,
                               bool gradient) const {
    const tensor::SafetensorsFolder files(folder_, "adapter_model");
    const HostTensor host =
        models::from_dict(layout, parameter, [&](const std::string& name) -> std::optional<HostTensor> {
          const auto* entry = gradient ? expected_.find("grad." + name) : files.find(name);
          if (!entry) return std::nullopt;
          HostTensor out{tensor::Shape{std::span<const std::int64_t>(entry->shape)}, *entry->dtype,
                         std::vector<std::byte>(entry->bytes)};
          gradient ? expected_.read_bytes(*entry, 0, out.bytes) : files.read_bytes(name, 0, out.bytes);
          return out;
        });
    std::vector<float> values(host.bytes.size() / sizeof(float));
    std::memcpy(values.data(), host.bytes.data(), host.bytes.size());
    return values;
  }

  Setting setting_;
  fs::path folder_, family_;
  SafetensorsFile expected_;
};

TEST_P(Adapted, AStepMovesTheAdapterAsPeftsGradientsSayAndNothingElse) {
  const config::Config config = this->config();
  const models::GptOptions options = models::gpt_options(config, config.model->vocab_size);
  const HuggingFaceLayout layout(options, options.adapter.family);
  const TempFolder saved;
  launch_ranks(setting_.ranks, [&](DistributedPtr dist) {
    const auto groups = make_groups(dist, config);
    Engine engine(dist, std::make_shared<models::Gpt>(options, layout_of(*groups, config)), config, nullptr,
                  nullptr, groups);
    HuggingFaceWeights base(family_, layout), adapter(folder_, layout, "adapter_model");
    models::WithAdapter weights(base, &adapter);
    engine.load_weights(weights);
    engine.save_checkpoint(saved.path().string(), "begun");
    EXPECT_NEAR(engine.train_batch([&] { return batch(engine.device()); }).loss, published_loss(), 1e-5);
    engine.synchronize();
    engine.save_checkpoint(saved.path().string(), "stepped");
    // Of what stays as it is there is one copy and no more.
    for (const auto& unit : engine.sharded().units())
      for (const auto& segment : unit->segments())
        if (!segment->key().trainable) {
          EXPECT_TRUE(segment->moments().empty());
        }
  });
  const auto begun = testing::whole_tensors(saved / "begun"),
             stepped = testing::whole_tensors(saved / "stepped");
  int trained = 0, frozen = 0;
  for (const auto& [name, bytes] : stepped) {
    SCOPED_TRACE(name);
    const std::string kind = name.substr(0, name.find('.')), parameter = name.substr(kind.size() + 1);
    EXPECT_EQ(models::is_adapter(parameter), kind != "frozen");
    if (kind == "frozen") {
      ++frozen;
      EXPECT_EQ(bytes, begun.at(name));
    }
    if (kind != "fp32") continue;
    ++trained;
    const std::vector<float> want = published(layout, parameter, false),
                             g = published(layout, parameter, true);
    ASSERT_EQ(bytes.size(), want.size() * sizeof(float));
    EXPECT_EQ(std::memcmp(begun.at(name).data(), want.data(), bytes.size()), 0) << "loaded to the bit";
    std::vector<float> got(want.size());
    std::memcpy(got.data(), bytes.data(), bytes.size());
    for (std::size_t i = 0; i < want.size(); ++i)
      ASSERT_NEAR(got[i], updated(want[i], g[i]), 2e-6) << "element " << i;
  }
  EXPECT_GT(trained, 0);
  EXPECT_GT(frozen, 10);
}

INSTANTIATE_TEST_SUITE_P(All, Adapted,
                         ::testing::Combine(::testing::ValuesIn(adapters), ::testing::ValuesIn(settings)),
                         [](const auto& test) {
                           return cat(std::get<0>(test.param), "_", std::get<1>(test.param).name);
                         });

}  // namespace
}  // namespace sherd
