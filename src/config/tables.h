#pragma once

#include "config/config.h"
#include "config/published.h"
#include "config/reader.h"
#include "config/schedule.h"

// The tables of keys, one source file per group. Internal to this room.
namespace sherd::config {

Key<Config> optimizer_key();  // optimizer_keys.cpp
Key<Config> scheduler_key();  // scheduler_keys.cpp
std::vector<Key<Config>>
precision_keys();        // precision_keys.cpp: fp16, bf16, data_types, communication_data_type, …
Key<Config> zero_key();  // zero_keys.cpp
/// Offload in the section zero_optimization, deprecated switches included. offload_keys.cpp
std::vector<Key<Zero>> offload_keys();
std::vector<Key<Config>> tier_keys();   // offload_keys.cpp: aio, activation_checkpointing
Key<Config> model_key();                // model_keys.cpp
Key<Model> moe_key();                   // moe_keys.cpp
std::vector<Key<Config>> sherd_keys();  // sherd_keys.cpp: training; model, data, parallel, device
Key<Config> data_key();                 // data_keys.cpp
/// Throws where documents are to be kept apart on ranks that hold parts of sequences.
void check_packing(const Config& config, const Value& file);
Key<Training> adapter_key();  // adapter_keys.cpp
/// Keys of training.adapter that prompts have, and whether adapters of that type have one of these.
/// prompt_keys.cpp
std::vector<Key<PromptKeys>> prompt_keys();
bool has_prompt_key(AdapterType type, const std::string& key);
/// What follows from the keys of a prompt that were given; throws where they contradict each other.
void finish_prompt(Adapter& adapter, const Given& given, const Value& section);
/// Keys of training.adapter that bottleneck adapters have, and what follows from those that were given;
/// throws where they contradict each other. bottleneck_keys.cpp
std::vector<Key<BottleneckKeys>> bottleneck_keys();
void finish_bottleneck(const BottleneckKeys& keys, const Given& given, const Value& section);
/// Throws where a prompt does not fit the model, or tasks do not fit the data.
void check_prompt(const Config& config, const Value& file);
/// Keys of section training that are arguments of transformers' Trainer. trainer_keys.cpp
std::vector<Key<Training>> trainer_keys();
/// Takes these out of a file and writes what they say into the sections of DeepSpeed's that say the same, and
/// into every "auto" there, as transformers does. Problems are the context's.
void fill_from_trainer(Node& file, Context& context);  // trainer_fill.cpp
Key<Config> parallel_key();                            // parallel_keys.cpp
Key<Config> device_key();                              // device_keys.cpp
/// Keys of section parallel that cut a model into stages and order its micro-batches. pipeline_keys.cpp
std::vector<Key<Parallel>> schedule_keys();
/// DeepSpeed's section for these.
Key<Config> pipeline_key();
/// `training.recompute`, which DeepSpeed's section may give too.
void read_recompute(Training& training, const Value& value);
/// DeepSpeed's section and switch for parallel.tensor and parallel.context. parallel_keys.cpp
Key<Config> tensor_parallel_key();
Key<Config> sequence_parallel_size_key();
/// `zero_optimization.mics_shard_size`, which means parallel.shard_size; 0 or less: off.
void read_mics_shard_size(Config& config, const Value& value);
/// Sections and switches that DeepSpeed knows and Sherd does not have. foreign_keys.cpp
std::vector<Key<Config>> foreign_keys();
/// The whole file. top_keys.cpp
const Table<Config>& top_table();

// The optimizers. optimizer_types.cpp

std::vector<std::string> optimizer_names();
/// "Adam, AdamW and SGD", all of them.
std::string known_optimizers();
/// The `type` of a section.
OptimizerType read_optimizer_type(const Value& type);
/// `params` of an optimizer of that type.
Table<OptimizerRule> optimizer_params(OptimizerType type);
using ParamValue =
    std::variant<double, bool, std::pair<double, double>, std::int64_t, std::array<double, 3>, std::string>;
/// The keys of `params` that have an effect, with their values.
std::vector<std::pair<std::string, ParamValue>> param_values(const OptimizerRule& rule);
/// Notes the keys that are not in `given` and whose default is not DeepSpeed's; `params`: path of the
/// section.
void note_other_defaults(OptimizerType type, const std::string& params, const Given& given, Context& context);
/// What follows from the keys of a rule that were given; throws where they contradict each other.
void finish_rule(OptimizerRule& rule, const Value& params, const Given& given);
/// `optimizer.groups`, once the section's own rule is read. optimizer_groups.cpp
void read_optimizer_groups(Optimizer& optimizer, const Value& list);
/// Throws where a schedule cannot move the groups' rates in proportion. optimizer_groups.cpp
void check_group_rates(const Config& config, const Given& given, Context& context);

/// What an optimizer whose replicas exchange momentum asks of the rest of the file: who the replicas are, and
/// fp32 moments. Throws where there would be none. optimizer_keys.cpp
void check_replicas(Config& config, const Value& file);

/// What follows from the keys of `section`, model.moe, that were given; throws where they contradict each
/// other. moe_keys.cpp
void finish_moe(Moe& moe, const Value& section);
/// Throws where experts do not fit the rest of the file.
void check_moe(const Config& config, const Value& file);

/// flat_dump() with all sections, also those that say nothing: the defaults of keys_page(). dump.cpp
std::map<std::string, std::string> every_value(const Config& config);

/// Adds what a table cannot: checks across precision keys once the whole file is read.
void check_precision(const Config& config, const Given& given);

/// Throws where the keys of a schedule contradict each other.
void check_schedule(const Parallel& parallel, const Value& file);

/// The rules of offload within the section, as errors, and a note for every key of it that cannot matter.
void check_offload(const Zero& zero, const Given& given, const Value& section);
/// Throws where activations cannot lie where the keys say.
void check_tiers(const Config& config, const Value& file);
/// Notes what cannot matter given the whole file: aio without NVMe, activation offload without recompute, …
void note_idle_tiers(const Config& config, const Given& given, Context& context);
/// Notes the keys of the section parallel that matter only where several ranks share layers or sequences.
/// Where a schedule of rates ends before training does, or before it has begun to fall.
void note_short_schedule(const Config& config, Context& context);
void note_idle_parallel(const Config& config, const Given& given, Context& context);
/// Notes the keys of stages and recompute that matter only where there are any.
void note_idle_schedule(const Config& config, const Given& given, Context& context);
/// Notes the keys of the section device that only GPUs know, where no GPU would ask for them.
void note_idle_device(const Config& config, const Given& given, Context& context);

template <class T>
void append(std::vector<Key<T>>& keys, std::vector<Key<T>> more) {
  for (Key<T>& key : more) keys.push_back(std::move(key));
}

}  // namespace sherd::config
