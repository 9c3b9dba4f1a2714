#include "config/keys.h"

#include <gmock/gmock.h>

#include <map>
#include <set>

#include "config/support.h"

namespace sherd::config {
namespace {

// A valid file in which the key's section is present, so that setting the key is the only difference.
const char* const llama3 = R"({"model": {"type": "llama", "seq_length": 8, "hidden_size": 96, "num_layers": 2,
    "num_heads": 4, "rope_scaling": {"rope_type": "llama3", "factor": 4, "low_freq_factor": 1, "high_freq_factor": 4,
    "original_max_position_embeddings": 16}}})";

std::string base_for(const std::string& path) {
  static const std::vector<std::pair<std::string, std::string>> bases = {
      {"optimizer[SGD].params.nesterov", R"({"optimizer": {"type": "SGD", "params": {"momentum": 0.5}}})"},
      {"optimizer", R"({"optimizer": {"type": "AdamW"}})"},
      {"scheduler[LRRangeTest]", R"({"scheduler": {"type": "LRRangeTest"}})"},
      {"scheduler[OneCycle]",
       R"({"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3}}})"},
      {"scheduler[WarmupLR]", R"({"scheduler": {"type": "WarmupLR"}})"},
      {"scheduler[WarmupDecayLR]",
       R"({"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 3000}}})"},
      {"scheduler[WarmupCosineLR]",
       R"({"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 3000}}})"},
      {"scheduler[linear]", R"({"scheduler": {"type": "linear", "params": {"total_num_steps": 3000}}})"},
      {"scheduler[cosine]", R"({"scheduler": {"type": "cosine", "params": {"total_num_steps": 3000}}})"},
      {"scheduler[constant_with_warmup]", R"({"scheduler": {"type": "constant_with_warmup"}})"},
      {"training.warmup", R"({"training": {"steps": 100, "learning_rate": 1e-3}})"},
      {"training.lr_scheduler_type", R"({"training": {"steps": 100, "learning_rate": 1e-3}})"},
      {"fp16", R"({"fp16": {"enabled": false}})"},
      {"bf16", R"({"bf16": {"enabled": false}})"},
      {"zero_optimization", R"({"zero_optimization": {"stage": 3}})"},
      {"model.moe.top_groups",
       R"({"model": {"seq_length": 8, "hidden_size": 96, "num_layers": 2, "num_heads": 4,
           "moe": {"experts": 6, "groups": 3}}})"},
      {"model.moe",
       R"({"model": {"seq_length": 8, "hidden_size": 96, "num_layers": 2, "num_heads": 4,
           "moe": {"experts": 6}}})"},
      {"model.rope_scaling.low_freq", llama3},
      {"model.rope_scaling.high_freq", llama3},
      {"model.rope_scaling",
       R"({"model": {"type": "llama", "seq_length": 8, "hidden_size": 96, "num_layers": 2, "num_heads": 4,
           "rope_scaling": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 16}}})"},
      {"model.position",
       R"({"model": {"seq_length": 8, "hidden_size": 96, "num_layers": 2, "num_heads": 4}})"},
      {"model",
       R"({"model": {"seq_length": 8, "hidden_size": 96, "num_layers": 2, "num_heads": 4, "position": "rotary"}})"},
      {"parallel.virtual_stages", R"({"parallel": {"schedule": "interleaved"}})"},
      {"training.keep_best", R"({"training": {"eval_interval": 50, "save_dir": "runs/a"}})"},
      {"training.patience", R"({"training": {"eval_interval": 50}})"},
      {"data", R"({"data": {"path": "corpus/a"}})"}};
  for (const auto& [prefix, text] : bases)
    if (path.starts_with(prefix) && path[prefix.size()] != '[') return text;
  if (path.starts_with("optimizer["))
    return R"({"optimizer": {"type": ")" + path.substr(10, path.find(']') - 10) + R"("}})";
  return "{}";
}

// "scheduler[OneCycle].params.x" → "scheduler.params.x"
std::string plain(std::string path) {
  const auto open = path.find('['), close = path.find(']');
  if (open != std::string::npos) path.erase(open, close - open + 1);
  return path;
}

Config with(const KeyInfo& key, const std::string& value) {
  return parse_text(base_for(key.path), "run.json", {plain(key.path) + "=" + value});
}

TEST(KnownKeys, EachIsEffectiveNotedOrRefused) {
  std::map<Effect, int> count;
  for (const KeyInfo& key : known_keys()) {
    SCOPED_TRACE(key.path + " = " + key.example);
    ++count[key.effect];
    const Config base = parse_text(base_for(key.path));
    if (key.effect == Effect::refused) {
      const std::string message = error_of(base_for(key.path), {plain(key.path) + "=" + key.example});
      EXPECT_THAT(message, testing::HasSubstr(plain(key.path)));
      EXPECT_THAT(message, testing::HasSubstr(key.reason));
      continue;
    }
    Config changed;
    ASSERT_NO_THROW(changed = with(key, key.example));
    if (key.effect == Effect::effective) {
      EXPECT_FALSE(changed == base) << "the key changed nothing";
    } else {
      EXPECT_TRUE(changed == base);
      EXPECT_THAT(changed.notes, testing::Contains(plain(key.path) + ": " + key.reason));
    }
  }
  EXPECT_GT(count[Effect::effective], 90);
  EXPECT_GT(count[Effect::noted], 40);
  EXPECT_GT(count[Effect::refused], 50);
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
      if (key.path.ends_with(".type") || key.path == "data.path" ||
          key.path.find(".cycle_m") != std::string::npos || key.path.ends_with("total_num_steps") ||
          (key.path.starts_with("model.") && key.path.ends_with("s")) || key.path == "model.seq_length" ||
          key.path.starts_with("model.rope_scaling.") || key.path == "model.hidden_size" ||
          key.path.ends_with("warmup_max_lr"))
        continue;  // required keys, and the one for which null is a value
      ASSERT_NO_THROW(config = with(key, "null"));
    }
  }
}

TEST(KnownKeys, DumpReadsBackToTheSameConfig) {
  for (const KeyInfo& key : known_keys()) {
    if (key.effect != Effect::effective) continue;
    SCOPED_TRACE(key.path);
    const Config config = with(key, key.example);
    EXPECT_TRUE(parse_text(dump(config)) == config) << dump(config);
    EXPECT_EQ(dump(parse_text(dump(config))), dump(config));
  }
}

}  // namespace
}  // namespace sherd::config
