#include "config/keys.h"

#include <gmock/gmock.h>

#include <map>
#include <set>

#include "config/deepspeed_keys.h"
#include "config/key_bases.h"
#include "config/support.h"

namespace sherd::config {
namespace {

Config config_with(const KeyInfo& key, const std::string& value) {
  return parse_text(base_for(key.path), "run.json", {plain(key.path) + "=" + value});
}

/// A file that says what DeepSpeed does anyway asks for nothing.
TEST(KnownKeys, DeepSpeedsDefaultsAreKnown) {
  for (const deepspeed_keys::Key& key : deepspeed_keys::keys) {
    const std::string path = *key.section ? cat(key.section, ".", key.name) : key.name;
    EXPECT_EQ(error_of(R"({"train_micro_batch_size_per_gpu": 1})",
                       {cat("zero_optimization.stage=", path.ends_with("offload_param") ? 3 : 1),
                        cat(path, "=", key.value)}),
              "")
        << path;
  }
}

TEST(KnownKeys, EachIsEffectiveNotedOrRefused) {
  std::map<Effect, int> count;
  for (const KeyInfo& key : known_keys()) {
    SCOPED_TRACE(key.path + " = " + key.example);
    ++count[key.effect];
    const Config base = parse_text(base_for(key.path));
    if (key.effect == Effect::refused) {
      const std::string message = error_of(base_for(key.path), {plain(key.path) + "=" + key.example});
      EXPECT_THAT(message, ::testing::HasSubstr(plain(key.path)));
      EXPECT_THAT(message, ::testing::HasSubstr(key.reason));
      continue;
    }
    Config changed;
    ASSERT_NO_THROW(changed = config_with(key, key.example));
    if (key.effect == Effect::effective) {
      EXPECT_FALSE(changed == base) << "the key changed nothing";
    } else {
      EXPECT_TRUE(changed == base);
      EXPECT_THAT(changed.notes, ::testing::Contains(plain(key.path) + ": " + key.reason));
    }
  }
  EXPECT_GT(count[Effect::effective], 90);
  EXPECT_GT(count[Effect::noted], 40);
  EXPECT_GT(count[Effect::refused], 50);
}

/// A run that goes on with another of these values trains otherwise; machines may differ in those.
TEST(KnownKeys, SayWhoDependsOnThem) {
  const Config config = parse_text(
      R"({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3},
          "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, "data": {"path": "x"},
          "model": {"type": "llama", "hidden_size": 64, "num_layers": 2, "num_heads": 4, "seq_length": 16}})");
  std::map<Concerns, std::set<std::string>> keys;
  for (const Setting& setting : settings(config)) {
    const std::string section = setting.key.substr(0, setting.key.find('.'));
    if (section != "model" && section != "optimizer" && section != "fp16" && section != "bf16")
      keys[setting.concerns].insert(setting.key);
  }
  EXPECT_THAT(keys[Concerns::training],
              ::testing::UnorderedElementsAre(
                  "data.packing", "data.seed", "data.shuffle", "data.split", "dataloader_drop_last",
                  "device.fused_gelu", "device.tf32", "gradient_clipping", "parallel.context_method",
                  "parallel.reduction", "parallel.sequence_parallel", "parallel.shard_size",
                  "train_micro_batch_size_per_gpu", "training.loss_average", "training.moments_dtype",
                  "training.seed"));
  EXPECT_THAT(keys[Concerns::machine],
              ::testing::UnorderedElementsAre(
                  "data.path", "device.bind_cores", "device.device_memory_limit", "device.host_memory_limit",
                  "device.peak_tflops", "device.threads_per_rank", "device.type", "parallel.timeout_seconds",
                  "training.local_save_dir", "training.save_dir"));
}

/// A key that cannot matter beside the rest of the file is told of.
TEST(KnownKeys, ThatCannotMatterAreNoted) {
  const Config config = parse_text(
      R"({"train_micro_batch_size_per_gpu": 1,
          "model": {"type": "gpt2", "hidden_size": 64, "num_layers": 2, "num_heads": 4, "seq_length": 16,
                    "rope_scaling": {"type": "linear", "factor": 2}}})");
  EXPECT_THAT(config.notes, ::testing::Contains(::testing::HasSubstr("model.rope_scaling")));
}

TEST(KnownKeys, HaveUniquePaths) {
  std::set<std::string> seen;
  for (const KeyInfo& key : known_keys()) EXPECT_TRUE(seen.insert(key.path).second) << key.path;
}

TEST(KnownKeys, NullMeansAbsent) {
  for (const KeyInfo& key : known_keys()) {
    SCOPED_TRACE(key.path);
    if (key.effect != Effect::refused || !key.path.ends_with("max_grad_norm")) {
      Config config;
      if (key.path.ends_with(".type") || key.path == "data.path" || key.path == "data.sources" ||
          key.path.find(".cycle_m") != std::string::npos || key.path.ends_with("total_num_steps") ||
          (key.path.starts_with("model.") && key.path.ends_with("s")) || key.path == "model.seq_length" ||
          key.path.starts_with("model.rope_scaling.") ||
          key.path.starts_with("model.sliding_rope.rope_scaling.") || key.path == "model.hidden_size" ||
          key.path.ends_with("warmup_max_lr"))
        continue;  // required keys, and the one for which null is a value
      ASSERT_NO_THROW(config = config_with(key, "null"));
    }
  }
}

TEST(KnownKeys, DumpReadsBackToTheSameConfig) {
  for (const KeyInfo& key : known_keys()) {
    if (key.effect != Effect::effective) continue;
    SCOPED_TRACE(key.path);
    const Config config = config_with(key, key.example);
    EXPECT_TRUE(parse_text(dump(config)) == config) << dump(config);
    EXPECT_EQ(dump(parse_text(dump(config))), dump(config));
  }
}

}  // namespace
}  // namespace sherd::config
