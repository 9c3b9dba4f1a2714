#pragma once

#include <string>
#include <utility>
#include <vector>

// Files in which single keys are tried.
namespace sherd::config {

inline const char* const llama3 =
    R"({"model": {"type": "llama", "seq_length": 8, "hidden_size": 96, "num_layers": 2,
    "num_heads": 4, "rope_scaling": {"rope_type": "llama3", "factor": 4, "low_freq_factor": 1, "high_freq_factor": 4,
    "original_max_position_embeddings": 16}}})";

inline const char* const longrope =
    R"("rope_scaling": {"rope_type": "longrope", "original_max_position_embeddings": 4,
       "short_factor": [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], "long_factor": [2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2]})";

inline const char* const sliding_llama3 =
    R"(, "rope_scaling": {"rope_type": "llama3", "factor": 4, "low_freq_factor": 1, "high_freq_factor": 4,
       "original_max_position_embeddings": 16})";

/// A model whose layers with a window have positions of their own, scaled as the keys say.
inline std::string sliding(const std::string& scaling) {
  return R"({"model": {"type": "llama", "seq_length": 8, "hidden_size": 96, "num_layers": 2, "num_heads": 4,
      "sliding_window": 4, "sliding_rope": {"rotary_base": 3e4)" +
         scaling + "}}}";
}

inline const std::string with_longrope =
    std::string(
        R"({"model": {"type": "llama", "seq_length": 8, "hidden_size": 96, "num_layers": 2, "num_heads": 4, )") +
    longrope + "}}";

inline const char* const adapted =
    R"({"model": {"seq_length": 8, "hidden_size": 96, "num_layers": 2, "num_heads": 4},
    "training": {"adapter": {"type": "lora"}}})";
inline const char* const prompted =
    R"({"model": {"seq_length": 64, "hidden_size": 96, "num_layers": 2, "num_heads": 4},
    "training": {"adapter": {"type": "prompt_tuning"}}})";

inline const char* const encoder =
    R"({"model": {"type": "bert", "seq_length": 64, "hidden_size": 96, "num_layers": 2, "num_heads": 4}})";

inline const char* const t5 =
    R"({"model": {"type": "t5", "seq_length": 64, "hidden_size": 96, "num_layers": 4, "num_heads": 4}})";

inline const char* const bottlenecked = R"({"training": {"adapter": {"type": "bottleneck"}}})";

/// A valid file in which the key's section is present, so that setting the key is the only difference.
inline std::string base_for(const std::string& path) {
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
      {"model.labels",
       R"({"model": {"type": "bert", "seq_length": 64, "hidden_size": 96, "num_layers": 2, "num_heads": 4,
           "head": "sequence_classification", "labels": ["a", "b", "c"]}})"},
      {"training.mlm_probability", encoder},
      {"training.whole_word_mask", encoder},
      {"training.warmup", R"({"training": {"steps": 100, "learning_rate": 1e-3}})"},
      {"training.lr_scheduler_type", R"({"training": {"steps": 100, "learning_rate": 1e-3}})"},
      {"fp16", R"({"fp16": {"enabled": false}})"},
      {"bf16", R"({"bf16": {"enabled": false}})"},
      {"fp8", R"({"bf16": {"enabled": true}})"},
      {"zero_optimization", R"({"zero_optimization": {"stage": 3}})"},
      {"model.moe.top_groups",
       R"({"model": {"seq_length": 8, "hidden_size": 96, "num_layers": 2, "num_heads": 4,
           "moe": {"experts": 6, "groups": 3}}})"},
      {"model.moe",
       R"({"model": {"seq_length": 8, "hidden_size": 96, "num_layers": 2, "num_heads": 4,
           "moe": {"experts": 6}}})"},
      {"model.mla",
       R"({"model": {"type": "llama", "seq_length": 8, "hidden_size": 96, "num_layers": 2, "num_heads": 4,
           "mla": {"kv_lora_rank": 16}}})"},
      {"model.encoder", t5},
      {"model.relative_attention", t5},
      {"model.decoder_start_token_id", t5},
      {"training.span_", t5},
      {"model.layer_types", sliding("")},
      {"model.sliding_rope.rope_scaling.short_factor", sliding(std::string(", ") + longrope)},
      {"model.sliding_rope.rope_scaling.long_factor", sliding(std::string(", ") + longrope)},
      {"model.sliding_rope.rope_scaling.low_freq", sliding(sliding_llama3)},
      {"model.sliding_rope.rope_scaling.high_freq", sliding(sliding_llama3)},
      {"model.sliding_rope.rope_scaling",
       sliding(
           R"(, "rope_scaling": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 16})")},
      {"model.sliding_rope", sliding("")},
      {"model.rope_scaling.short_factor", with_longrope},
      {"model.rope_scaling.long_factor", with_longrope},
      {"model.rope_scaling.low_freq", llama3},
      {"model.rope_scaling.high_freq", llama3},
      {"model.rope_scaling",
       R"({"model": {"type": "llama", "seq_length": 8, "hidden_size": 96, "num_layers": 2, "num_heads": 4,
           "rope_scaling": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 16}}})"},
      {"model.norm_unit_offset",
       R"({"model": {"seq_length": 8, "hidden_size": 96, "num_layers": 2, "num_heads": 4, "norm": "rmsnorm"}})"},
      {"model.position",
       R"({"model": {"seq_length": 8, "hidden_size": 96, "num_layers": 2, "num_heads": 4}})"},
      {"model",
       R"({"model": {"seq_length": 8, "hidden_size": 96, "num_layers": 2, "num_heads": 4, "position": "rotary"}})"},
      {"parallel.virtual_stages", R"({"parallel": {"schedule": "interleaved"}})"},
      {"training.adapter.use_dora", R"({"training": {"init_from": "a", "adapter": {"type": "lora"}}})"},
      {"training.adapter.base_double_quant",
       R"({"training": {"adapter": {"type": "lora", "base_format": "nf4"}}})"},
      {"training.base_double_quant", R"({"training": {"adapter": {"type": "lora", "base_format": "nf4"}}})"},
      {"training.base_format", R"({"training": {"adapter": {"type": "lora"}}})"},
      {"training.adapter.type", R"({"training": {"steps": 100}})"},
      {"training.adapter.encoder_hidden_size",
       R"({"model": {"seq_length": 64, "hidden_size": 96, "num_layers": 2, "num_heads": 4},
           "training": {"adapter": {"type": "p_tuning"}}})"},
      {"training.adapter.encoder_reparameterization_type",
       R"({"training": {"adapter": {"type": "p_tuning"}}})"},
      {"training.adapter.virtual_tokens", prompted},
      {"training.adapter.init_from", adapted},
      {"training.adapter.init_lora_weights",
       R"({"training": {"init_from": "a", "adapter": {"type": "lora"}}})"},
      {"training.adapter.trainable_token_indices",
       R"({"training": {"init_from": "a", "adapter": {"type": "lora"}}})"},
      {"training.adapter.save_base", R"({"training": {"init_from": "a", "adapter": {"type": "lora"}}})"},
      {"training.adapter.init", prompted},
      {"training.adapter.tasks", prompted},
      {"training.adapter.mh_adapter", bottlenecked},
      {"training.adapter.output_adapter", bottlenecked},
      {"training.adapter.reduction_factor", bottlenecked},
      {"training.adapter.bottleneck_size", bottlenecked},
      {"training.adapter.non_linearity", bottlenecked},
      {"training.adapter.scaling", bottlenecked},
      {"training.adapter.original_ln_before", bottlenecked},
      {"training.adapter.name", bottlenecked},
      {"training.adapter", adapted},
      {"training.sparsity.pattern", "{}"},
      {"training.sparsity", R"({"training": {"sparsity": {"pattern": "2:4"}}})"},
      {"training.keep_best", R"({"training": {"eval_interval": 50, "save_dir": "runs/a"}})"},
      {"training.patience", R"({"training": {"eval_interval": 50}})"},
      {"data.sources", R"({"data": {"sources": [{"path": "corpus/a"}]}})"},
      {"data", R"({"data": {"path": "corpus/a"}})"}};
  for (const auto& [prefix, text] : bases)
    if (path.starts_with(prefix) && path[prefix.size()] != '[') return text;
  if (path.starts_with("optimizer["))
    return R"({"optimizer": {"type": ")" + path.substr(10, path.find(']') - 10) + R"("}})";
  return "{}";
}

/// "scheduler[OneCycle].params.x" → "scheduler.params.x"
inline std::string plain(std::string path) {
  const auto open = path.find('['), close = path.find(']');
  if (open != std::string::npos) path.erase(open, close - open + 1);
  return path;
}

}  // namespace sherd::config
