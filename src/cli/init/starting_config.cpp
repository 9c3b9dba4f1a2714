#include "cli/init/starting_config.h"

#include <nlohmann/json.hpp>

#include "base/cpu_isa.h"
#include "base/error.h"
#include "base/text/excerpt.h"
#include "device/cuda.h"

namespace sherd::cli {
namespace {

using NotedJson = nlohmann::ordered_json;

/// Rates that papers and model cards begin from: small ones for all weights of a trained model, a tenth of
/// these and less for preferences, ten to twenty times as much for adapters.
double learning_rate(const Wishes& wishes) {
  if (wishes.size) return wishes.size->learning_rate;
  const bool adapter = wishes.method != Method::full;
  switch (wishes.purpose) {
    case Purpose::preferences:
      return adapter ? 1e-5 : 5e-7;
    case Purpose::instruction:
      return adapter ? 2e-4 : 1e-5;
    case Purpose::pretraining:
      break;
  }
  return adapter ? 2e-4 : 2e-5;
}

NotedJson model_of(const Wishes& wishes) {
  NotedJson out;
  if (!wishes.size) {
    out["//"] = "Everything else is as in the folder of training.init_from. seq_length: tokens of a sample.";
    out["seq_length"] = wishes.seq_length;
    return out;
  }
  out["//"] = cat("A new decoder of Llama's kind, about ", wishes.size->name,
                  " parameters. docs/config.md tells of other types and sizes.");
  out["type"] = "llama";
  out["seq_length"] = wishes.seq_length;
  out["hidden_size"] = wishes.size->hidden;
  out["num_layers"] = wishes.size->layers;
  out["num_heads"] = wishes.size->heads;
  if (wishes.vocabulary == 0) return out;
  out["//vocab_size"] = "There were no data yet: remove this line once there are, and it follows from them.";
  out["vocab_size"] = wishes.vocabulary;
  return out;
}

NotedJson data_of(const Wishes& wishes) {
  NotedJson out;
  out["//"] =
      wishes.purpose == Purpose::pretraining ? "What `sherd prepare --output` was given: texts."
      : wishes.purpose == Purpose::instruction
          ? "What `sherd prepare --output` was given: conversations, of which the answers are learned."
          : "What `sherd prepare --output` was given: pairs of a chosen and a rejected answer.";
  out["path"] = wishes.data;
  if (wishes.purpose != Purpose::pretraining) {
    out["//packing"] = "documents: whole texts share a row without seeing each other.";
    out["packing"] = "documents";
  }
  out["//split"] = "Shares for training and for validation.";
  out["split"] = {0.95, 0.05};
  return out;
}

NotedJson adapter_of(const Wishes& wishes) {
  NotedJson out{{"type", "lora"}, {"rank", 16}, {"alpha", 32}, {"targets", "all-linear"}};
  if (wishes.method == Method::few_bit) out["base_format"] = "nf4";
  return out;
}

NotedJson training_of(const Wishes& wishes) {
  NotedJson out;
  out["steps"] = wishes.steps;
  if (!wishes.size) {
    out["//init_from"] = "The weights that training begins with.";
    out["init_from"] = wishes.folder;
  }
  if (wishes.purpose == Purpose::preferences) {
    out["//objective"] = "DPO. beta says how near the model is kept to the one it began as.";
    out["objective"] = "dpo";
    out["preference"] = {{"beta", 0.1}};
  }
  if (wishes.method != Method::full) {
    out["//adapter"] = wishes.method == Method::lora
                           ? "LoRA: the model's own weights stay, and small products beside them are trained."
                           : "LoRA beside the model's own weights, which stay, in 4 bits each (QLoRA).";
    out["adapter"] = adapter_of(wishes);
  }
  out["//eval_interval"] = "Steps between evaluations on the validation share.";
  out["eval_interval"] = std::max<std::int64_t>(1, wishes.steps / 10);
  out["save_dir"] = wishes.save_dir;
  out["//save_interval"] =
      "Steps between checkpoints; the newest keep_last stay. --resume goes on from them.";
  out["save_interval"] = std::max<std::int64_t>(1, wishes.steps / 5);
  out["keep_last"] = 2;
  return out;
}

}  // namespace

const std::vector<ModelSize>& new_model_sizes() {
  static const std::vector<ModelSize> sizes{
      {"10m", 320, 8, 5, 256, 1e-3},      {"60m", 640, 12, 10, 512, 6e-4},
      {"125m", 768, 12, 12, 1024, 6e-4},  {"350m", 1024, 24, 16, 1024, 3e-4},
      {"1b", 2048, 20, 16, 2048, 3e-4},   {"3b", 2560, 36, 20, 2048, 1.5e-4},
      {"7b", 4096, 32, 32, 2048, 1.2e-4},
  };
  return sizes;
}

std::string new_model_names() {
  return joined_text(new_model_sizes(), ", ", &ModelSize::name);
}

PrecisionChoice precision_of_this_machine() {
  const device::CudaStatus status = device::cuda_status();
  if (status.usable()) {
    const device::CudaGpu& gpu = status.gpus[0];
    if (gpu.major >= 8) return {"bf16", cat(gpu.name, " multiplies bf16 in hardware")};
    return {"fp16", cat(gpu.name, " multiplies fp16 in hardware, and not bf16; the loss is scaled for it")};
  }
  if (cpu_has_bf16_products()) return {"bf16", "this processor multiplies bf16 in hardware"};
  return {"fp32", "this processor multiplies no bf16 in hardware, which would take longer here"};
}

std::string starting_config(const Wishes& wishes, const PrecisionChoice& precision) {
  NotedJson out;
  out["//"] =
      "Written by `sherd init`. Keys that begin with // are notes; `sherd info --keys` lists all keys.";
  out["//train_batch_size"] = "Samples of a step, over all ranks. Micro-batches share them out.";
  out["train_batch_size"] = wishes.batch;
  const double rate = learning_rate(wishes);
  out["//optimizer"] =
      "lr is where to begin: halve it where the loss jumps, double it where it hardly falls.";
  out["optimizer"] = {{"type", "AdamW"},
                      {"params", {{"lr", rate}, {"weight_decay", wishes.size ? 0.1 : 0.0}}}};
  out["//scheduler"] = "The rate rises for a few steps and then falls; its steps are training.steps.";
  out["scheduler"] = {{"type", "WarmupCosineLR"},
                      {"params",
                       {{"total_num_steps", wishes.steps},
                        {"warmup_num_steps", std::max<std::int64_t>(1, wishes.steps / 30)},
                        {"warmup_type", "linear"}}}};
  out["gradient_clipping"] = 1.0;
  out["//precision"] = cat(precision.name, ": ", precision.reason, ".");
  if (precision.name != "fp32") out[precision.name] = {{"enabled", true}};
  out["//zero_optimization"] = "";  // told when it is known
  out["zero_optimization"] = {{"stage", wishes.ranks > 1 ? 1 : 0}};
  out["model"] = model_of(wishes);
  out["data"] = data_of(wishes);
  out["training"] = training_of(wishes);
  return out.dump(2);
}

std::string with_keys(const std::string& config,
                      const std::vector<std::pair<std::string, std::string>>& keys) {
  NotedJson out = NotedJson::parse(config);
  for (const auto& [key, value] : keys) {
    NotedJson* at = &out;
    std::size_t begin = 0;
    for (std::size_t end; (end = key.find('.', begin)) != std::string::npos; begin = end + 1)
      at = &(*at)[key.substr(begin, end - begin)];
    NotedJson parsed = NotedJson::parse(value, nullptr, /*allow_exceptions=*/false);
    (*at)[key.substr(begin)] = parsed.is_discarded() ? NotedJson(value) : std::move(parsed);
  }
  return out.dump(2);
}

}  // namespace sherd::cli
