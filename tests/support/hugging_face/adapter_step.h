#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/weights.h"
#include "engine/initialize.h"
#include "engine/setup/process_grid.h"
#include "models/adapters/adapters.h"
#include "models/gpt.h"
#include "models/gpt_config.h"
#include "models/hub/adapter_names.h"
#include "models/hub/adapter_tables.h"
#include "models/hub/config_json.h"
#include "support/temp_folder.h"
#include "support/whole_tensors.h"

// A step of training of an adapter, in every layout, against gradients that another implementation gives.
namespace sherd::test {

struct StepSetting {
  const char* name;
  int ranks, stage;
  const char* parallel;
  const char* zero;
};

inline constexpr StepSetting step_settings[] = {
    {"alone_stage_0", 1, 0, "{}", ""},
    {"two_stage_3", 2, 3, "{}", ""},
    {"two_stage_3_on_host", 2, 3, "{}",
     R"(, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"})"},
    {"tensor_2", 2, 0, R"({"tensor": 2})", ""},
    {"tensor_2_whole_streams", 2, 1, R"({"tensor": 2, "sequence_parallel": false})", ""},
    {"context_2", 2, 0, R"({"context": 2})", ""},
    {"pipeline_2_stage_1", 2, 1, R"({"pipeline": 2})", ""},
    {"tensor_2_data_2_stage_3", 4, 3, R"({"tensor": 2})", ""}};

/// A step of training, and what is known of it.
struct KnownStep {
  config::Config of;  ///< the model and the adapter
  std::function<void(Engine&)> load;
  std::function<tensor::Batch(device::Device&)> batch;  ///< "tokens" and "labels"
  double loss = 0;
  /// Values of an adapter's parameter, or their gradients.
  std::function<std::vector<float>(const std::string& parameter, bool gradient)> known;
};

/// The loss, the adapter after AdamW's first step, by its formula, and the model's own weights, which stay.
inline void expect_step(const KnownStep& step, const StepSetting& setting) {
  constexpr double rate = 0.01, epsilon = 1e-3;
  config::Config config =
      config::parse_text(config::section_of(*step.of.model), "the model",
                         {cat(R"(optimizer={"type": "AdamW", "params": {"lr": )", rate,
                              R"(, "betas": [0.9, 0.95], "eps": )", epsilon, R"(, "weight_decay": 0}})"),
                          cat("parallel=", setting.parallel), "gradient_clipping=0",
                          cat("zero_optimization={\"stage\": ", setting.stage, setting.zero, "}"),
                          "train_micro_batch_size_per_gpu=2", "model.dropout=0", "model.attention_dropout=0",
                          "model.embedding_dropout=0"});
  config.training.adapter = step.of.training.adapter;
  const models::GptConfig options = models::gpt_config(config, config.model->vocab_size);
  const std::vector<std::string> whole = models::saved_parameters(options);
  const auto next = [&](device::Device& device) {
    tensor::Batch out = step.batch(device);
    const tensor::Tensor& labels = out.at("labels");
    const auto* label = labels.data<std::int32_t>();
    const auto targets = static_cast<std::int32_t>(
        std::count_if(label, label + labels.numel(), [](int id) { return id >= 0; }));
    out["target_tokens"] = tensor::Tensor::of<std::int32_t>(device, {1}, std::vector<std::int32_t>{targets});
    return out;
  };
  const testing::TempFolder saved;
  launch_ranks(setting.ranks, [&](DistributedPtr dist) {
    const auto groups = make_groups(dist, config);
    Engine engine(dist, std::make_shared<models::Gpt>(options, layout_of(*groups, config)), config, nullptr,
                  nullptr, groups);
    step.load(engine);
    engine.save_checkpoint(saved.path().string(), "begun");
    EXPECT_NEAR(engine.train_batch([&] { return next(engine.device()); }).loss, step.loss, 1e-5);
    engine.synchronize();
    engine.save_checkpoint(saved.path().string(), "stepped");
    // There is one copy, and no more, of all that stays as it is.
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
    EXPECT_EQ(
        models::is_adapter(parameter) || std::find(whole.begin(), whole.end(), parameter) != whole.end(),
        kind != "frozen");
    if (kind == "frozen") {
      ++frozen;
      EXPECT_EQ(bytes, begun.at(name));
    }
    if (kind != "fp32") continue;
    ++trained;
    const std::vector<float> want = step.known(parameter, false), g = step.known(parameter, true);
    ASSERT_EQ(bytes.size(), want.size() * sizeof(float));
    EXPECT_EQ(std::memcmp(begun.at(name).data(), want.data(), bytes.size()), 0) << "loaded to the bit";
    std::vector<float> got(want.size());
    std::memcpy(got.data(), bytes.data(), bytes.size());
    for (std::size_t i = 0; i < want.size(); ++i)
      ASSERT_NEAR(got[i], want[i] - rate * g[i] / (std::abs(g[i]) + epsilon), 2e-6) << "element " << i;
  }
  EXPECT_GT(trained, 0);
  EXPECT_GT(frozen, 10);
}

}  // namespace sherd::test
