// training.adapter.
#include "config/adapter.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "config/config.h"
#include "support/expect_error.h"
#include "support/temp_folder.h"

namespace sherd::config {
namespace {

using sherd::testing::expect_error;

Config parse_adapter(const std::string& adapter) {
  return parse_text(R"({"training": {"adapter": )" + adapter + "}}");
}

TEST(AdapterKeys, PeftsNamesAndDefaults) {
  const Adapter own =
      parse_adapter(
          R"({"type": "lora", "rank": 4, "alpha": 32, "dropout": 0.1, "targets": ["q_proj", "v_proj"],
                "use_rslora": true})")
          .training.adapter;
  const Adapter pefts = parse_adapter(R"({"type": "lora", "r": 4, "lora_alpha": 32, "lora_dropout": 0.1,
                "target_modules": ["q_proj", "v_proj"], "use_rslora": true})")
                            .training.adapter;
  EXPECT_EQ(own, pefts);
  EXPECT_DOUBLE_EQ(own.lora.scale(own.lora.rank, own.lora.alpha), 16);
  const Adapter plain = parse_adapter(R"({"type": "lora"})").training.adapter;
  EXPECT_EQ(plain.lora.rank, 8);
  EXPECT_DOUBLE_EQ(plain.lora.scale(plain.lora.rank, plain.lora.alpha), 1);
  EXPECT_EQ(parse_adapter(R"({"type": "lora", "targets": "all-linear"})").training.adapter.targets,
            std::vector<std::string>{"all-linear"});
  EXPECT_EQ(parse_text("{}").training.adapter.type, AdapterType::none);
}

TEST(AdapterKeys, ComeBackFromADump) {
  for (const char* text : {R"({"type": "lora", "rank": 3, "alpha": 2.5, "targets": ["a"], "dropout": 0.25})",
                           R"({"type": "ia3", "base_dtype": "int8"})",
                           R"({"type": "ia3", "base_format": "nf4", "base_double_quant": true})",
                           R"({"type": "ia3", "targets": ["k_proj"], "rank": 3})", R"({"type": "ia3"})"}) {
    const Config config = parse_adapter(text);
    EXPECT_EQ(parse_text(dump(config)), config) << text;
    EXPECT_EQ(parse_text(section_of(config.training.adapter)).training.adapter, config.training.adapter);
  }
  EXPECT_EQ(dump(parse_text("{}")).find("adapter"), std::string::npos);
}

TEST(AdapterKeys, WrongValuesAreNamed) {
  expect_error(ErrorKind::config, "needs a \"type\"", [] { parse_adapter(R"({"rank": 8})"); });
  expect_error(ErrorKind::config, "training.adapter.rank",
               [] { parse_adapter(R"({"type": "lora", "rank": 0})"); });
  expect_error(ErrorKind::config, "training.adapter.dropout",
               [] { parse_adapter(R"({"type": "lora", "dropout": 1})"); });
  expect_error(ErrorKind::config, "training.adapter.targets[0]",
               [] { parse_adapter(R"({"type": "lora", "targets": [""]})"); });
  expect_error(ErrorKind::config, "training.adapter.base_dtype",
               [] { parse_adapter(R"({"type": "lora", "base_dtype": "int4"})"); });
  expect_error(ErrorKind::config, "write \"base_format\": \"int8\"",
               [] { parse_adapter(R"({"type": "lora", "load_in_8bit": true})"); });
  // PEFT's own switches may be there, off.
  parse_adapter(
      R"({"type": "lora", "use_dora": false, "bias": "none", "modules_to_save": null, "load_in_4bit": false})");
  expect_error(ErrorKind::config, "give init_from, the weights to begin with",
               [] { parse_adapter(R"({"type": "lora", "use_dora": true})"); });
  for (const char* on : {R"("bias": "all")", R"("load_in_4bit": true)"})
    expect_error(ErrorKind::config, "Sherd does not support",
                 [&] { parse_adapter(cat(R"({"type": "lora", )", on, "}")); });
  EXPECT_TRUE(parse_adapter(R"({"type": "ia3", "base_dtype": "int8"})").training.adapter.base_format ==
              StoredFormat::int8);
  const auto stored = [](const std::string& text) {
    return parse_adapter(text).training.adapter.stored_base();
  };
  EXPECT_EQ(stored(R"({"type": "ia3", "base_format": "fp4"})"), StoredFormat::fp4);
  EXPECT_EQ(stored(R"({"type": "ia3", "base_format": "nf4", "base_double_quant": true})"),
            StoredFormat::nf4_double);
  EXPECT_EQ(stored(R"({"type": "ia3", "base_format": "fp8", "base_double_quant": true})"), StoredFormat::fp8);
  const Config beside = parse_text(
      R"({"training": {"base_format": "nf4", "base_double_quant": true, "adapter": {"type": "ia3"}}})");
  EXPECT_EQ(beside.training.adapter.stored_base(), StoredFormat::nf4_double);
  for (const char* text :
       {R"({"training": {"adapter": {"type": "ia3", "base_format": "int8", "base_double_quant": true}}})",
        R"({"training": {"base_format": "int8", "base_double_quant": true, "adapter": {"type": "ia3"}}})"}) {
    const Config none = parse_text(text);
    EXPECT_FALSE(none.training.adapter.base_double_quant);
    EXPECT_THAT(none.notes, ::testing::Contains(::testing::HasSubstr("base_format is neither nf4 nor fp4")));
  }
  expect_error(ErrorKind::config, "is in training.adapter, too", [] {
    parse_text(R"({"training": {"base_format": "nf4", "adapter": {"type": "ia3", "base_dtype": "int8"}}})");
  });
  EXPECT_FALSE(parse_adapter(R"({"type": "lora", "base_dtype": "compute"})").training.adapter.base_format ==
               StoredFormat::int8);
  expect_error(ErrorKind::config, "training.adapter.type", [] { parse_adapter(R"({"type": "dora"})"); });
}

/// The files' own keys go over those of the adapter's folder.
TEST(AdapterKeys, InitFromBringsTheSection) {
  const auto sections = [](const std::string& from, const std::string&) {
    EXPECT_EQ(from, "adapters/a");
    Adapter adapter;
    adapter.type = AdapterType::lora, adapter.lora.rank = 16, adapter.lora.alpha = 4;
    return section_of(adapter);
  };
  const sherd::testing::TempFolder folder;
  sherd::testing::write_text(folder / "a.json",
                             R"({"training": {"adapter": {"init_from": "adapters/a", "alpha": 2}}})");
  const Adapter got = parse_files({(folder / "a.json").string()}, {}, nullptr, sections).training.adapter;
  EXPECT_EQ(got.type, AdapterType::lora);
  EXPECT_EQ(got.lora.rank, 16);
  EXPECT_EQ(got.lora.alpha, 2);
  EXPECT_EQ(got.init_from, "adapters/a");
}

/// Keys of the folder that the files' own replace under another name are gone, and with another adapter all.
TEST(AdapterKeys, WhatTheFilesReplaceGoes) {
  const sherd::testing::TempFolder folder;
  const auto laid = [&](const std::string& file, const std::string& section, bool from_weights) {
    const auto sections = [&](const std::string&, const std::string&) {
      return R"({"training": {"adapter": {)" + section + "}}}";
    };
    sherd::testing::write_text(folder / "a.json", R"({"training": {)" + file + "}}");
    const WeightSections of_model = from_weights ? WeightSections(sections) : nullptr;
    return parse_files({(folder / "a.json").string()}, {}, of_model, sections).training.adapter;
  };
  const std::string bottleneck = R"("type": "bottleneck", "reduction_factor": 4)",
                    prompt = R"("type": "prompt_tuning", "virtual_tokens": 3, "init_text": "x")";
  EXPECT_EQ(laid(R"("adapter": {"init_from": "a", "bottleneck_size": 9})", bottleneck, false).bottleneck.size,
            9);
  // PEFT's names replace Sherd's, and a format beside the section the one in it.
  const Adapter peft =
      laid(R"("base_format": "int8", "adapter": {"init_from": "a", "r": 2, "target_modules": ["q_proj"]})",
           R"("type": "lora", "rank": 4, "targets": ["v_proj"], "base_format": "nf4")", false);
  EXPECT_EQ(peft.lora.rank, 2);
  EXPECT_EQ(peft.targets, std::vector<std::string>{"q_proj"});
  EXPECT_EQ(peft.base_format, StoredFormat::int8);
  const Adapter goes_on = laid(R"("adapter": {"init_from": "a", "init": "random"})", prompt, false);
  EXPECT_EQ(goes_on.prompt.virtual_tokens, 3);
  EXPECT_EQ(goes_on.prompt.init_text, "");
  // A checkpoint with an adapter is begun from.
  EXPECT_EQ(laid(R"("init_from": "a")", bottleneck, true).bottleneck.reduction_factor, 4);
  const Adapter other = laid(R"("init_from": "a", "adapter": {"type": "lora"})", bottleneck, true);
  EXPECT_EQ(other.type, AdapterType::lora);
}

TEST(AdapterKeys, WhatHasNoEffectIsNoted) {
  const auto noted = [](const std::string& text, const std::string& start) {
    const Config config = parse_text(text);
    return std::any_of(config.notes.begin(), config.notes.end(),
                       [&](const std::string& note) { return note.starts_with(start); });
  };
  const std::string adapter = R"("training": {"adapter": {"type": "lora"}})";
  const std::string model =
      R"("model": {"type": "mixtral", "seq_length": 8, "hidden_size": 96, "num_layers": 2,
      "num_heads": 4, "moe": {"experts": 4, "router": "sigmoid", "bias_update": 0.1}})";
  EXPECT_TRUE(noted("{" + adapter + "}", "training.adapter: no effect"));
  EXPECT_TRUE(noted("{" + model + ", " + adapter + "}", "model.moe.bias_update: no effect"));
  EXPECT_FALSE(noted("{" + model + ", " + adapter + "}", "training.adapter"));
  EXPECT_FALSE(noted("{" + model + "}", "model.moe.bias_update"));
}

}  // namespace
}  // namespace sherd::config
