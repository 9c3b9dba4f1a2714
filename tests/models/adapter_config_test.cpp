// adapter_config.json of PEFT and of AdapterHub.
#include "models/hub/adapter_config.h"

#include <gtest/gtest.h>

#include "config/config.h"
#include "support/expect_error.h"

namespace sherd::models {
namespace {

using config::Adapter;
using sherd::testing::expect_error;

TEST(PeftConfig, RefusesWhatWouldComputeSomethingElse) {
  const auto read = [](const std::string& keys) {
    return from_peft(R"({"peft_type": "LORA", "r": 4)" + keys + "}", "adapter_config.json");
  };
  EXPECT_EQ(read(R"(, "use_dora": false, "rank_pattern": {}, "modules_to_save": null, "bias": "none",
                   "something_new": null, "megatron_core": "megatron.core", "init_lora_weights": true)")
                .lora.rank,
            4);
  const auto keys = read(R"(, "rank_pattern": {"q": 3}, "alpha_pattern": {"k": 2.5}, "layers_to_transform": 0,
                              "layers_pattern": "layers", "exclude_modules": ["v_proj"])");
  EXPECT_EQ(keys.lora.rank_pattern, (std::vector<std::pair<std::string, std::int64_t>>{{"q", 3}}));
  EXPECT_EQ(keys.lora.alpha_pattern, (std::vector<std::pair<std::string, double>>{{"k", 2.5}}));
  EXPECT_EQ(keys.lora.layers, std::vector<std::int64_t>{0});
  EXPECT_EQ(keys.exclude, std::vector<std::string>{"v_proj"});
  EXPECT_TRUE(read(R"(, "use_dora": true)").lora.dora);
  for (const char* key : {R"("bias": "all")", R"("something_new": 7)"})
    expect_error(ErrorKind::config, "Sherd does not have it", [&] { read(cat(", ", key)); });
  using config::LoraInit;
  for (const auto& [name, init] :
       {std::pair{"gaussian", LoraInit::gaussian}, {"pissa", LoraInit::pissa}, {"olora", LoraInit::olora}})
    EXPECT_EQ(read(cat(R"(, "init_lora_weights": ")", name, '"')).lora.init, init);
  for (const char* plain : {"false", "null", R"("orthogonal")", R"("eva")", R"("mica")"})
    EXPECT_EQ(read(cat(R"(, "init_lora_weights": )", plain)).lora.rank, 4);
  for (const char* way : {"pissa_niter_16", "corda", "loftq", "lora_ga", "of tomorrow"})
    expect_error(ErrorKind::config, cat("init_lora_weights: \"", way, "\" begins by taking a part"),
                 [&] { read(cat(R"(, "init_lora_weights": ")", way, '"')); });
  EXPECT_EQ(read(R"(, "target_modules": ".*_proj")").targets, std::vector<std::string>{".*_proj"});
  expect_error(ErrorKind::config, "is a regular expression to PEFT",
               [&] { read(R"(, "target_modules": "q_proj")"); });
  expect_error(ErrorKind::config, "rank_pattern.q", [&] { read(R"(, "rank_pattern": {"q": 0})"); });
  expect_error(ErrorKind::config, "peft_type",
               [] { from_peft(R"({"peft_type": "PREFIX_TUNING"})", "adapter_config.json"); });
}

Adapter bottleneck(const std::string& keys) {
  return config::parse_text(cat(R"({"training": {"adapter": {"type": "bottleneck", )", keys, "}}}"))
      .training.adapter;
}

TEST(AdapterHub, ItsFileIsReadAndWritten) {
  for (const char* keys : {R"("mh_adapter": false, "non_linearity": "gelu_new", "scaling": 0.5)",
                           R"("reduction_factor": 5.5, "original_ln_before": true, "name": "tiny")"}) {
    const Adapter adapter = bottleneck(keys);
    const std::string text = to_adapter_hub(adapter, 48, "gpt2", "");
    EXPECT_TRUE(is_adapter_hub(text, "a"));
    EXPECT_EQ(from_adapter_hub(text, "a"), adapter);
  }
  // A size is written as the factor that gives it.
  for (std::int64_t size = 1; size < 200; ++size) {
    Adapter adapter = bottleneck(R"("name": "adapter")");
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
  EXPECT_EQ(same.non_linearity, config::NonLinearity::swish);
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
}  // namespace sherd::models
