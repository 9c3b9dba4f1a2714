#include "config/trainer_keys.h"

#include "config/tables.h"

namespace sherd::config {
namespace {

using Arguments = TrainerArguments;

const std::vector<std::string> shapes = {"linear", "cosine", "constant", "constant_with_warmup"};
const std::vector<std::string> precisions = {"fp32", "fp16", "bf16"};

/// What the Trainer has where an argument is not given.
const Arguments defaults = {.learning_rate = 5e-5,
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

/// A key with its default.
template <class T>
Key<Arguments> with_default(Key<Arguments> key, std::optional<T> Arguments::*field) {
  const char* quote = std::is_same_v<T, std::string> ? "\"" : "";
  key.derived = cat("`", quote, (defaults.*field).value(), quote, "`");
  return key;
}

Key<Arguments> number(const char* name, std::optional<double> Arguments::*field, const char* example,
                      double max = infinity) {
  return with_default(
      custom<Arguments>(name, example,
                        [=](Arguments& target, const Value& value) { target.*field = value.real(0, max); })
          .takes(reals(0, max)),
      field);
}

Key<Arguments> count(const char* name, std::optional<std::int64_t> Arguments::*field) {
  return with_default(
      custom<Arguments>(name, "4",
                        [=](Arguments& target, const Value& value) { target.*field = value.integer(1); })
          .takes(integers(1)),
      field);
}

Key<Arguments> word(const char* name, std::optional<std::string> Arguments::*field, const char* example,
                    const std::vector<std::string>& words) {
  return with_default(custom<Arguments>(name, example,
                                        [field, &words](Arguments& target, const Value& value) {
                                          target.*field = words[value.choice(words)];
                                        })
                          .one_of(words),
                      field);
}

std::vector<Text> argument_texts() {
  return {
      {"learning_rate", "`optimizer.params.lr`, and `warmup_max_lr` of WarmupLR and WarmupDecayLR"},
      {"weight_decay", "`optimizer.params.weight_decay`"},
      {"adam_beta1", "the first of `optimizer.params.betas`"},
      {"adam_beta2", "the second of `optimizer.params.betas`"},
      {"adam_epsilon", "`optimizer.params.eps`"},
      {"max_grad_norm", "`gradient_clipping`"},
      {"warmup_steps", "`scheduler.params.warmup_num_steps`, at least 1; below 1 a share of `steps`"},
      {"warmup_ratio", "the same as a share, where `warmup_steps` is 0"},
      {"lr_scheduler_type", "`scheduler` where there is no section", "has more of them"},
      {"per_device_train_batch_size", "`train_micro_batch_size_per_gpu`", "knows no `micro_batch_size`"},
      {"gradient_accumulation_steps", "the key at the top"},
      {"precision", "`fp16.enabled` and `bf16.enabled`", "has the flags `fp16` and `bf16`"},
  };
}

}  // namespace

Table<TrainerArguments> trainer_table() {
  using A = Arguments;
  Table<Arguments> table{
      Auto::is_a_value,
      {number("learning_rate", &A::learning_rate, "0.0003"), number("weight_decay", &A::weight_decay, "0.1"),
       number("adam_beta1", &A::adam_beta1, "0.8", 1), number("adam_beta2", &A::adam_beta2, "0.95", 1),
       number("adam_epsilon", &A::adam_epsilon, "1e-6"), number("max_grad_norm", &A::max_grad_norm, "0.5"),
       number("warmup_steps", &A::warmup_steps, "10"), number("warmup_ratio", &A::warmup_ratio, "0.1", 1),
       word("lr_scheduler_type", &A::schedule, "\"cosine\"", shapes),
       count("per_device_train_batch_size", &A::micro_batch_size).alias("micro_batch_size"),
       count("gradient_accumulation_steps", &A::gradient_accumulation_steps),
       word("precision", &A::precision, "\"bf16\"", precisions)}};
  describe(table.keys, argument_texts());
  return table;
}

std::vector<Key<Training>> trainer_keys() {
  std::vector<Key<Training>> keys;
  for (const Key<Arguments>& key : trainer_table().keys)
    keys.push_back(copied<Training>(key, [](Training&, const Value&) {}));
  return keys;
}

}  // namespace sherd::config
