#include "config/trainer_keys.h"

#include "config/tables.h"

namespace sherd::config {
namespace {

using Arguments = TrainerArguments;

const std::vector<std::string> shapes = {"linear", "cosine", "constant", "constant_with_warmup"};
const std::vector<std::string> precisions = {"fp32", "fp16", "bf16"};

Key<Arguments> number(const char* name, std::optional<double> Arguments::*field, const char* example,
                      double max = infinity) {
  return custom<Arguments>(
      name, example, [=](Arguments& target, const Value& value) { target.*field = value.real(0, max); });
}

Key<Arguments> count(const char* name, std::optional<std::int64_t> Arguments::*field) {
  return custom<Arguments>(name, "4",
                           [=](Arguments& target, const Value& value) { target.*field = value.integer(1); });
}

Key<Arguments> word(const char* name, std::optional<std::string> Arguments::*field, const char* example,
                    const std::vector<std::string>& words) {
  return custom<Arguments>(name, example, [field, &words](Arguments& target, const Value& value) {
    target.*field = words[value.choice(words)];
  });
}

}  // namespace

Table<TrainerArguments> trainer_table() {
  using A = Arguments;
  return {
      Auto::is_a_value,
      {number("learning_rate", &A::learning_rate, "0.0003"), number("weight_decay", &A::weight_decay, "0.1"),
       number("adam_beta1", &A::adam_beta1, "0.8", 1), number("adam_beta2", &A::adam_beta2, "0.95", 1),
       number("adam_epsilon", &A::adam_epsilon, "1e-6"), number("max_grad_norm", &A::max_grad_norm, "0.5"),
       number("warmup_steps", &A::warmup_steps, "10"), number("warmup_ratio", &A::warmup_ratio, "0.1", 1),
       word("lr_scheduler_type", &A::schedule, "\"cosine\"", shapes),
       count("per_device_train_batch_size", &A::micro_batch_size).alias("micro_batch_size"),
       count("gradient_accumulation_steps", &A::gradient_accumulation_steps),
       word("precision", &A::precision, "\"bf16\"", precisions)}};
}

std::vector<Key<Training>> trainer_keys() {
  std::vector<Key<Training>> keys;
  for (const Key<Arguments>& key : trainer_table().keys)
    keys.push_back(custom<Training>(key.name, key.example, [](Training&, const Value&) {}));
  return keys;
}

}  // namespace sherd::config
