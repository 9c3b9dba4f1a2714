#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "config/reader.h"

namespace sherd::config {

/// Arguments of transformers' Trainer, keys of section training; those that were given. Internal to this
/// room.
struct TrainerArguments {
  std::optional<double> learning_rate, weight_decay, adam_beta1, adam_beta2, adam_epsilon, max_grad_norm,
      warmup_steps, warmup_ratio;
  std::optional<std::int64_t> micro_batch_size, gradient_accumulation_steps;
  std::optional<std::string> precision, schedule;
};

Table<TrainerArguments> trainer_table();

}  // namespace sherd::config
