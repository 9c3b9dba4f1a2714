// training.adapter of prompts and bottlenecks, and their adapter_config.json.
#include <gtest/gtest.h>

#include "config/config.h"
#include "support/expect_error.h"

namespace sherd::config {
namespace {

using sherd::testing::expect_error;

Config parse(const std::string& adapter, const std::string& rest = "") {
  return parse_text(R"({"training": {"adapter": {)" + adapter + "}}" + rest + "}");
}

Adapter prompt(const std::string& keys) {
  return parse(R"("type": "prompt_tuning", )" + keys).training.adapter;
}

void expect_wrong(const std::string& adapter, const std::string& rest, const char* text) {
  expect_error(ErrorKind::config, text, [&] { parse(adapter, rest); });
}

TEST(PromptKeys, PeftsNamesDoAsWell) {
  EXPECT_EQ(
      prompt(R"("num_virtual_tokens": 4, "prompt_tuning_init": "TEXT", "prompt_tuning_init_text": "a")"),
      prompt(R"("virtual_tokens": 4, "init_text": "a")"));
  EXPECT_EQ(prompt(R"("virtual_tokens": 4)").prompt.init, PromptInit::random);
  EXPECT_EQ(prompt(R"("virtual_tokens": 4)").prompt.prompts(), 1);
  EXPECT_EQ(parse(R"("type": "p_tuning", "encoder_reparameterization_type": "MLP")").training.adapter.type,
            AdapterType::p_tuning);
}

TEST(PromptKeys, TasksAreFoundByName) {
  const PromptKeys keys = prompt(
                              R"("virtual_tokens": 4,
                 "tasks": [{"name": "a", "init_text": "x"}, {"name": "b", "init_text": "y"}])")
                              .prompt;
  EXPECT_EQ(keys.init, PromptInit::text);
  EXPECT_EQ(keys.prompts(), 2);
  EXPECT_EQ(keys.find("b"), 1);
  EXPECT_EQ(keys.find("c"), -1);
  EXPECT_EQ(keys.task_names(), "a, b");
  // Behind the padded vocabulary, one prompt's behind the other's.
  EXPECT_EQ(first_virtual_id(keys, 257, 128, 0), 384);
  EXPECT_EQ(first_virtual_id(keys, 256, 128, 1), 260);
}

TEST(PromptKeys, ComeBackFromADump) {
  for (const char* keys :
       {R"("type": "prompt_tuning", "virtual_tokens": 3, "init": "sample_vocab")",
        R"("type": "prompt_tuning", "init_text": "a",
            "tasks": [{"name": "a"}, {"name": "b", "init_text": "c"}])",
        R"("type": "p_tuning", "encoder_hidden_size": 7, "tasks": [{"name": "a"}])",
        R"("type": "bottleneck", "mh_adapter": false, "reduction_factor": 2.5, "name": "x")",
        R"("type": "bottleneck", "bottleneck_size": 9, "non_linearity": "tanh", "scaling": 3)"}) {
    const Adapter adapter = parse(keys).training.adapter;
    EXPECT_EQ(parse_text(section_of(adapter)).training.adapter, adapter) << keys;
  }
}

TEST(PromptKeys, ContradictionsAreNamed) {
  const std::string type = R"("type": "prompt_tuning")";
  expect_wrong(type + R"(, "init": "text")", "", "there is no \"init_text\"");
  expect_wrong(type + R"(, "init": "random", "init_text": "a")", "", "init is not \"text\"");
  expect_wrong(type + R"(, "tasks": [{"name": "a", "init_text": "x"}, {"name": "b"}])", "",
               "has none: give each task one, or none");
  expect_wrong(type + R"(, "tasks": [{"name": "a"}, {"name": "a"}])", "", "a second task is called a");
  expect_wrong(type + R"(, "tasks": [{"init_text": "a"}])", "", "needs \"name\"");
  expect_wrong(type + R"(, "tasks": [{"name": "a b"}])", "", "is of letters, digits");
  expect_wrong(type + R"(, "virtual_tokens": 0)", "", "training.adapter.virtual_tokens");
  expect_wrong(R"("type": "p_tuning", "encoder_reparameterization_type": "LSTM")", "", "its default, MLP");
  const std::string model =
      R"(, "model": {"seq_length": 8, "hidden_size": 96, "num_layers": 2, "num_heads": 4})";
  expect_wrong(type + R"(, "virtual_tokens": 8)", model, "leaves no token of text");
  const std::string tasks = type + R"(, "virtual_tokens": 2, "tasks": [{"name": "a"}, {"name": "b"}])";
  const auto data = [](const char* task) {
    return cat(R"(, "data": {"sources": [{"path": "x")", task, "}]}");
  };
  expect_wrong(tasks, model + data(""), "training.adapter.tasks are a, b");
  expect_wrong(tasks, model + data(R"(, "task": "c")"), "no task is called 'c'; there are a, b");
  expect_wrong(type + R"(, "virtual_tokens": 2)", model + data(R"(, "task": "a")"),
               "training.adapter.tasks names none");
  EXPECT_EQ(parse(tasks, model + data(R"(, "task": "b")")).data->sources[0].task, "b");
}

TEST(BottleneckKeys, DefaultsAreHoulsbys) {
  const BottleneckKeys keys = parse(R"("type": "bottleneck")").training.adapter.bottleneck;
  EXPECT_TRUE(keys.attention);
  EXPECT_TRUE(keys.mlp);
  EXPECT_FALSE(keys.of_sum);
  EXPECT_EQ(keys.non_linearity, NonLinearity::swish);
  EXPECT_EQ(keys.width(768), 48);
}

/// As Python's hidden // reduction_factor, at least one.
TEST(BottleneckKeys, WidthsAreAdapterHubs) {
  const auto width = [](double factor, std::int64_t hidden) {
    BottleneckKeys keys;
    keys.reduction_factor = factor;
    return keys.width(hidden);
  };
  EXPECT_EQ(width(5.5, 16), 2);
  EXPECT_EQ(width(3, 16), 5);
  EXPECT_EQ(width(32, 16), 1);
  EXPECT_EQ(width(0.5, 16), 32);
  EXPECT_EQ(width(0.1, 1), 9);  // 0.1 is a little more than a tenth
}

TEST(BottleneckKeys, WhatSherdDoesNotHaveIsNamed) {
  const std::string type = R"("type": "bottleneck", )";
  for (const char* key : {"original_ln_after", "residual_before_ln"}) {
    expect_wrong(type + '"' + key + R"(": false)", "", key);
    parse(type + '"' + key + R"(": true)");
  }
  for (const char* key : {"is_parallel", "use_gating", "ln_before", "ln_after"}) {
    expect_wrong(type + '"' + key + R"(": true)", "", key);
    parse(type + '"' + key + R"(": false)");
  }
  expect_wrong(type + R"("mh_adapter": false, "output_adapter": false)", "", "one of them must be true");
  expect_wrong(type + R"("bottleneck_size": 4, "reduction_factor": 4)", "", "take one of them away");
  expect_wrong(type + R"("name": "a.b")", "", "has no '.'");
  expect_wrong(type + R"("scaling": "learned")", "", "training.adapter.scaling");
  expect_wrong(type + R"("non_linearity": "leakyrelu")", "", "training.adapter.non_linearity");
}

TEST(AdapterHub, ItsFileIsReadAndWritten) {
  for (const char* keys : {R"("mh_adapter": false, "non_linearity": "gelu_new", "scaling": 0.5)",
                           R"("reduction_factor": 5.5, "original_ln_before": true, "name": "tiny")"}) {
    const Adapter adapter = parse(cat(R"("type": "bottleneck", )", keys)).training.adapter;
    const std::string text = to_adapter_hub(adapter, 48, "gpt2", "");
    EXPECT_TRUE(is_adapter_hub(text, "a"));
    EXPECT_EQ(from_adapter_hub(text, "a"), adapter);
  }
  // A size is written as the factor that gives it.
  for (std::int64_t size = 1; size < 200; ++size) {
    Adapter adapter = parse(R"("type": "bottleneck")").training.adapter;
    adapter.bottleneck.size = size;
    EXPECT_EQ(from_adapter_hub(to_adapter_hub(adapter, 768, "gpt2", ""), "a").bottleneck.width(768), size);
  }
  EXPECT_FALSE(is_adapter_hub(R"({"peft_type": "LORA"})", "a"));
}

TEST(AdapterHub, RefusesWhatWouldComputeSomethingElse) {
  const auto file = [](const std::string& config, const char* version = R"(, "version": "adapters.1.3.0")") {
    return cat(R"({"config": {"mh_adapter": true, "output_adapter": true, "reduction_factor": 4,
                   "non_linearity": "relu")",
               config, R"(}, "name": "a")", version, "}");
  };
  EXPECT_EQ(from_adapter_hub(file(R"(, "leave_out": [], "phm_layer": false, "phm_dim": 4, "dropout": 0.0,
                                     "init_weights": "mam_adapter", "inv_adapter": null)"),
                             "a")
                .bottleneck.name,
            "a");
  // Transformers' other name of a function; a switch that nothing reads without the norm's sum.
  const auto same =
      from_adapter_hub(R"({"config": {"mh_adapter": true, "output_adapter": true, "reduction_factor": 4,
      "non_linearity": "silu", "original_ln_before": false, "residual_before_ln": false}, "name": "a@b",
      "version": "adapters.1.3.0"})",
                       "a")
          .bottleneck;
  EXPECT_EQ(same.non_linearity, NonLinearity::swish);
  EXPECT_EQ(same.name, "a@b");
  expect_error(ErrorKind::config, "residual_before_ln", [&] {
    from_adapter_hub(file(R"(, "original_ln_before": true, "residual_before_ln": false)"), "a");
  });
  for (const char* key :
       {R"("leave_out": [1])", R"("phm_layer": true)", R"("dropout": 0.1)", R"("inv_adapter": "nice")",
        R"("is_parallel": true)", R"("something_new": 1)", R"("reduction_factor": {"1": 2})"}) {
    const std::string name = std::string(key).substr(1, std::string(key).find('"', 1) - 1);
    expect_error(ErrorKind::config, name, [&] { from_adapter_hub(file(cat(", ", key)), "a"); });
  }
  expect_error(ErrorKind::config, "has no \"version\"", [&] { from_adapter_hub(file("", ""), "a"); });
  expect_error(ErrorKind::config, "needs \"mh_adapter\"", [&] {
    from_adapter_hub(R"({"config": {"reduction_factor": 4}, "version": "adapters.1.3.0"})", "a");
  });
  expect_error(ErrorKind::config, "config.architecture", [&] {
    from_adapter_hub(R"({"config": {"architecture": "lora"}, "version": "adapters.1.3.0"})", "a");
  });
}

}  // namespace
}  // namespace sherd::config
