#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

// This folder makes a first configuration (`sherd init`).
//
//   starting_config.h   what is wished for, as a configuration with notes
//   questions.h         what is wished for, asked for in a terminal
//   init_command.cpp    options, what fits the machine, the file

namespace sherd::cli {

enum class Method : std::uint8_t { full, lora, few_bit };
enum class Purpose : std::uint8_t { pretraining, instruction, preferences };

/// A decoder from nothing, of about as many parameters as its name says.
struct ModelSize {
  const char* name;
  std::int64_t hidden, layers, heads, seq_length;
  double learning_rate;
};
/// The smallest first.
const std::vector<ModelSize>& new_model_sizes();
/// Their names, for questions and errors: "10m, 60m, …".
std::string new_model_names();

/// The wishes that a first configuration is made for.
struct Wishes {
  const ModelSize* size = nullptr;  ///< of a new model; null: weights from `folder`
  std::string folder;               ///< Hugging Face's, or checkpoints
  std::string data, save_dir;
  Method method = Method::full;
  Purpose purpose = Purpose::pretraining;
  std::int64_t seq_length = 0, batch = 0, steps = 0;
  int ranks = 1;
  std::int64_t vocabulary = 0;  ///< written where there are no data yet to tell it; 0: it is left out
};

/// The precision to compute in, and why.
struct PrecisionChoice {
  std::string name;  ///< "bf16", "fp16" or "fp32"
  std::string reason;
};
/// The precision in which this machine's GPU, or without one its processor, multiplies fast.
PrecisionChoice precision_of_this_machine();

/// The configuration as JSON, in which keys that begin with // are notes to its readers.
std::string starting_config(const Wishes& wishes, const PrecisionChoice& precision);

/// The configuration, with dotted keys set to values that are JSON, or else strings.
std::string with_keys(const std::string& config,
                      const std::vector<std::pair<std::string, std::string>>& keys);

}  // namespace sherd::cli
