#include "config/sections/tables.h"

namespace sherd::config {
namespace {

using Arguments = TrainerArguments;

const std::vector<std::string> schedule_types = {"linear", "cosine", "constant", "constant_with_warmup"};
const std::vector<std::string> precisions = {"fp32", "fp16", "bf16"};

/// Row of an argument that `read` takes; its default is the Trainer's.
template <class T, class Read>
Key<Arguments> argument(std::string_view name, std::optional<T> Arguments::*field, std::string_view example,
                        Takes takes, std::string_view sets, Read read) {
  Key<Arguments> key = custom<Arguments>(
      name, example, [=](Arguments& target, const Value& value) { target.*field = read(value); });
  key.argument = true;
  return std::move(key).takes(std::move(takes)).means(sets, by(cat("`", *(trainer_defaults().*field), "`")));
}

Key<Arguments> number_argument(const char* name, std::optional<double> Arguments::*field, const char* example,
                               const char* sets, double max = infinity) {
  return argument(name, field, example, reals(0, max), sets,
                  [max](const Value& value) { return value.real(0, max); });
}

Key<Arguments> count_argument(const char* name, std::optional<std::int64_t> Arguments::*field,
                              const char* sets) {
  return argument(name, field, "4", integers(1), sets, [](const Value& value) { return value.integer(1); });
}

Key<Arguments> word_argument(const char* name, std::optional<std::string> Arguments::*field,
                             const char* example, const std::vector<std::string>& all, const char* sets) {
  return argument(name, field, example, words(all), sets,
                  [&all](const Value& value) { return all[value.choice(all)]; })
      .one_of(all)
      .with(by(cat("`\"", *(trainer_defaults().*field), "\"`")));
}

}  // namespace

const TrainerArguments& trainer_defaults() {
  static const TrainerArguments defaults = {.learning_rate = 5e-5,
                                            .weight_decay = 0.0,
                                            .adam_beta1 = 0.9,
                                            .adam_beta2 = 0.999,
                                            .adam_epsilon = 1e-8,
                                            .max_grad_norm = 1.0,
                                            .warmup_steps = 0.0,
                                            .warmup_ratio = 0.0,
                                            .micro_batch_size = 8,
                                            .gradient_accumulation_steps = 1,
                                            .precision = "fp32",
                                            .schedule = "linear"};
  return defaults;
}

Table<TrainerArguments> trainer_table() {
  using A = Arguments;
  return {
      Auto::is_a_value,
      {number_argument("learning_rate", &A::learning_rate, "0.0003",
                       "`optimizer.params.lr`, and `warmup_max_lr` of WarmupLR and WarmupDecayLR"),
       number_argument("weight_decay", &A::weight_decay, "0.1", "`optimizer.params.weight_decay`"),
       number_argument("adam_beta1", &A::adam_beta1, "0.8", "the first of `optimizer.params.betas`", 1),
       number_argument("adam_beta2", &A::adam_beta2, "0.95", "the second of `optimizer.params.betas`", 1),
       number_argument("adam_epsilon", &A::adam_epsilon, "1e-6", "`optimizer.params.eps`"),
       number_argument("max_grad_norm", &A::max_grad_norm, "0.5", "`gradient_clipping`"),
       number_argument("warmup_steps", &A::warmup_steps, "10",
                       "`scheduler.params.warmup_num_steps`, at least 1; below 1 a share of `steps`"),
       number_argument("warmup_ratio", &A::warmup_ratio, "0.1",
                       "the same as a share, where `warmup_steps` is 0", 1),
       word_argument("lr_scheduler_type", &A::schedule, "\"cosine\"", schedule_types,
                     "`scheduler` where there is no section")
           .with("has more of them"),
       count_argument("per_device_train_batch_size", &A::micro_batch_size, "`train_micro_batch_size_per_gpu`")
           .with(also("micro_batch_size"), "knows no `micro_batch_size`"),
       count_argument("gradient_accumulation_steps", &A::gradient_accumulation_steps, "the key at the top"),
       word_argument("precision", &A::precision, "\"bf16\"", precisions, "`fp16.enabled` and `bf16.enabled`")
           .with("has the flags `fp16` and `bf16`")}};
}

std::vector<Key<Training>> trainer_keys() {
  std::vector<Key<Training>> keys;
  for (const Key<Arguments>& argument : trainer_table().keys) {
    Key<Training>& key = keys.emplace_back();
    static_cast<KeyInfo&>(key) = argument;
    key.read = [](Training&, const Value&) {};
  }
  return keys;
}

}  // namespace sherd::config
