#pragma once

#include "config/config.h"
#include "config/published.h"
#include "config/rows.h"

// This folder holds the tables of keys, a source file for each section or group of keys, with the checks that
// a row cannot say. A new key is a row of its section's table (../reader.h says how rows are written) and a
// field of its struct (../config.h); a key without effect here, or one that is refused, is a line of
// foreign_table.h. Internal to this room.
namespace sherd::config {

// Sections, and runs of keys at the top, each with its file.

Key<Config> optimizer_key();                // optimizer_keys.cpp
Key<Config> scheduler_key();                // scheduler_keys.cpp
std::vector<Key<Config>> precision_keys();  // precision_keys.cpp: fp16, bf16, fp8, data_types, …
Key<Config> zero_key();                     // zero_keys.cpp
std::vector<Key<Zero>> offload_keys();      // offload_keys.cpp: those of zero_optimization
std::vector<Key<Config>> tier_keys();       // offload_keys.cpp: aio, activation_checkpointing
Key<Config> model_key();                    // model_keys.cpp
const Table<Model>& model_table();          // model_keys.cpp
const Table<RopeScaling>& rope_table();     // rope_keys.cpp: model.rope_scaling
Table<Moe> moe_table();                     // moe_keys.cpp: model.moe
Key<Config> data_key();                     // data_keys.cpp
Key<Config> training_key();                 // training_keys.cpp
std::vector<Key<Training>> trainer_keys();  // trainer_keys.cpp: arguments of transformers' Trainer
Key<Training> preference_key();  // preference_keys.cpp
/// Throws where what is learned of preferences does not fit the rest of the file. preference_keys.cpp
void check_preferences(const Config& config, const Value& file);
Key<Training> adapter_key();
std::vector<Key<Adapter>> base_keys();  // adapter_keys.cpp: how an adapter's base is kept
/// Notes under `key` that double quantisation does nothing where the format has none, and takes it away.
void drop_idle_double(Adapter& adapter, const Value& value, const std::string& key);
const Table<Adapter>& adapter_table();               // adapter_keys.cpp
std::vector<Key<PromptKeys>> prompt_keys();          // prompt_keys.cpp: keys of training.adapter
std::vector<Key<BottleneckKeys>> bottleneck_keys();  // bottleneck_keys.cpp: likewise
Key<Config> parallel_key();                          // parallel_keys.cpp
std::vector<Key<Parallel>> schedule_keys();  // pipeline_keys.cpp: the keys of parallel that cut a model
/// DeepSpeed's own keys for values of section parallel. parallel_keys.cpp, pipeline_keys.cpp
std::vector<Key<Config>> deepspeed_parallel_keys();
Key<Config> pipeline_key();
Key<Config> mics_shard_size_key();
Key<Config> device_key();  // device_keys.cpp
/// The whole file. top_keys.cpp
const Table<Config>& top_table();

struct Nothing {};

/// Keys that DeepSpeed, PEFT or AdapterHub have in `section` ("", "zero_optimization", "optimizer.params")
/// and that set nothing here: those that all types of the section have, or those of one of its types.
/// foreign_keys.cpp
std::vector<Key<Nothing>> foreign_rows(std::string_view section, std::string_view type = "");
/// The same, as keys of T.
template <class T>
std::vector<Key<T>> foreign_keys(std::string_view section, std::string_view type = "") {
  std::vector<Key<T>> out;
  for (const Key<Nothing>& row : foreign_rows(section, type))
    out.push_back(lifted<T>(row, [](auto&) -> Nothing& {
      static Nothing nothing;
      return nothing;
    }));
  return out;
}

/// dump() with all sections, also those that say nothing: the defaults of keys_page(). top_keys.cpp
std::map<std::string, std::string> every_value(const Config& config);

/// Arguments of transformers' Trainer, keys of section training; those that were given.
struct TrainerArguments {
  std::optional<double> learning_rate, weight_decay, adam_beta1, adam_beta2, adam_epsilon, max_grad_norm,
      warmup_steps, warmup_ratio;
  std::optional<std::int64_t> micro_batch_size, gradient_accumulation_steps;
  std::optional<std::string> precision, schedule;
};
Table<TrainerArguments> trainer_table();  // trainer_keys.cpp
/// The Trainer's values where arguments are not given. trainer_keys.cpp
const TrainerArguments& trainer_defaults();

/// Takes the arguments of transformers' Trainer out of a file and writes what they say into the sections of
/// DeepSpeed's that say the same, and into every "auto" there, as transformers does. Problems are the
/// context's. trainer_fill.cpp
void fill_from_trainer(Node& file, Context& context);

// These draw conclusions from the keys of a section that were given, and throw where they contradict each
// other.

bool is_number(const Node& item);  // rope_keys.cpp
/// How many items a list has, all of which are of a kind. rope_keys.cpp
std::size_t length_of(const Value& value, bool (*fits)(const Node&), const char* what);
void finish_rope(RopeScaling& rope, const Given& given, const Value& section);
void finish_prompt(Adapter& adapter, const Given& given, const Value& section);
void finish_bottleneck(const BottleneckKeys& keys, const Given& given, const Value& section);
/// Throws where documents are to be kept apart on ranks that hold parts of sequences.
void check_packing(const Config& config, const Value& file);
/// Throws where the model cannot learn what training.objective says. training_keys.cpp
void check_objective(const Config& config, const Value& file);
/// Throws where a prompt does not fit the model, or tasks do not fit the data.
void check_prompt(const Config& config, const Value& file);

// The optimizers. optimizer_types.cpp

std::vector<std::string> optimizer_names();
/// "Adam, AdamW and SGD", all of them.
std::string known_optimizers();
/// The `type` of a section.
OptimizerType read_optimizer_type(const Value& type);
/// `params` of an optimizer of that type.
const Table<OptimizerRule>& optimizer_params(OptimizerType type);
/// Patterns of parameter names: one, or a list, which may be empty. optimizer_groups.cpp
std::vector<std::string> read_patterns(const Value& value, const char* example);
/// The keys of a group of that type: `match`, `type`, and those of the type's `params`. optimizer_groups.cpp
const Table<OptimizerGroup>& group_table(OptimizerType type);
/// Notes the keys that are not in `given` and whose default is not DeepSpeed's; `params`: path of the
/// section.
void note_other_defaults(OptimizerType type, const std::string& params, const Given& given, Context& context);
/// Draws conclusions from the keys of a rule that were given; throws where they contradict each other.
void finish_rule(OptimizerRule& rule, const Value& params, const Given& given);
/// `optimizer.groups`, once the section's own rule is read. optimizer_groups.cpp
void read_optimizer_groups(Optimizer& optimizer, const Value& list);
/// Throws where a schedule cannot move the groups' rates in proportion. optimizer_groups.cpp
void check_group_rates(const Config& config, const Given& given, Context& context);

/// Settles what an optimizer whose replicas exchange momentum asks of the rest of the file: who the replicas
/// are, and fp32 moments. Throws where there would be none. optimizer_keys.cpp
void check_replicas(Config& config, const Value& file);

/// Draws conclusions from the keys of `section`, model.moe, that were given; throws where they contradict
/// each other. moe_keys.cpp
void finish_moe(Moe& moe, const Value& section);
/// Throws where experts do not fit the rest of the file.
void check_moe(const Config& config, const Value& file);

/// Adds what a table cannot: checks across precision keys once the whole file is read.
void check_precision(const Config& config, const Given& given);

/// Throws where the keys of a schedule contradict each other.
void check_schedule(const Parallel& parallel, const Value& file);

/// The rules of offload within the section, as errors.
void check_offload(const Zero& zero, const Given& given, const Value& section);
/// Throws where activations cannot lie where the keys say.
void check_tiers(const Config& config, const Value& file);
/// Notes that some parameters on NVMe stay in host memory, where the file does not say how many.
void note_resident_parameters(const Config& config, const Given& given, Context& context);
/// Notes where a schedule of rates ends before training does, or before it has begun to fall.
void note_short_schedule(const Config& config, Context& context);

}  // namespace sherd::config
