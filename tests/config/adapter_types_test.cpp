// training.adapter of prompts and bottlenecks.
#include <gtest/gtest.h>

#include "config/config.h"
#include "support/expect_error.h"

namespace sherd::config {
namespace {

using sherd::testing::expect_error;

Config parse_adapter_keys(const std::string& adapter, const std::string& rest = "") {
  return parse_text(R"({"training": {"adapter": {)" + adapter + "}}" + rest + "}");
}

Adapter prompt(const std::string& keys) {
  return parse_adapter_keys(R"("type": "prompt_tuning", )" + keys).training.adapter;
}

void expect_wrong(const std::string& adapter, const std::string& rest, const char* text) {
  expect_error(ErrorKind::config, text, [&] { parse_adapter_keys(adapter, rest); });
}

TEST(PromptKeys, PeftsNamesDoAsWell) {
  EXPECT_EQ(
      prompt(R"("num_virtual_tokens": 4, "prompt_tuning_init": "TEXT", "prompt_tuning_init_text": "a")"),
      prompt(R"("virtual_tokens": 4, "init_text": "a")"));
  EXPECT_EQ(prompt(R"("virtual_tokens": 4)").prompt.init, PromptInit::random);
  EXPECT_EQ(prompt(R"("virtual_tokens": 4)").prompt.prompts(), 1);
  EXPECT_EQ(parse_adapter_keys(R"("type": "p_tuning", "encoder_reparameterization_type": "MLP")")
                .training.adapter.type,
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
    const Adapter adapter = parse_adapter_keys(keys).training.adapter;
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
  EXPECT_EQ(parse_adapter_keys(tasks, model + data(R"(, "task": "b")")).data->sources[0].task, "b");
}

TEST(BottleneckKeys, DefaultsAreHoulsbys) {
  const BottleneckKeys keys = parse_adapter_keys(R"("type": "bottleneck")").training.adapter.bottleneck;
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
    parse_adapter_keys(type + '"' + key + R"(": true)");
  }
  for (const char* key : {"is_parallel", "use_gating", "ln_before", "ln_after"}) {
    expect_wrong(type + '"' + key + R"(": true)", "", key);
    parse_adapter_keys(type + '"' + key + R"(": false)");
  }
  expect_wrong(type + R"("mh_adapter": false, "output_adapter": false)", "", "one of them must be true");
  expect_wrong(type + R"("bottleneck_size": 4, "reduction_factor": 4)", "", "take one of them away");
  expect_wrong(type + R"("name": "a.b")", "", "has no '.'");
  expect_wrong(type + R"("scaling": "learned")", "", "training.adapter.scaling");
  expect_wrong(type + R"("non_linearity": "leakyrelu")", "", "training.adapter.non_linearity");
}

}  // namespace
}  // namespace sherd::config
