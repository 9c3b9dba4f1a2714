#pragma once

#include <cstdint>
#include <vector>

#include "config/machine.h"
#include "planning/fit.h"

namespace sherd::planning {

/// Texts that are continued together, as `sherd generate --batch-size` does.
struct GenerationShape {
  std::int64_t batch = 1;   ///< texts under way
  std::int64_t prompt = 1;  ///< tokens of each prompt
  std::int64_t tokens = 1;  ///< tokens that follow each
};

/// The time that a batch of texts takes on ranks that share a model (parallel.tensor).
struct GenerationTime {
  int tensor = 1;
  std::int64_t batch = 1;
  double prefill = 0;  ///< seconds until all texts have their first token
  double decode = 0;   ///< seconds of each further token of all texts, in the mean
  double tokens_per_second = 0;
  std::uint64_t memory = 0;  ///< bytes on a device: weights and keys, without activations
  bool fits = true;          ///< the memory, in a device or the host that ranks share
};

/// The time of generating by a machine's rates. Nothing runs: the passes of models::generate_texts() over the
/// model of `config`, with its weights on the device, are gone through dry. Choosing tokens, which the host
/// does, is not in it. Throws Error{config} for shapes beyond the model's seq_length and for ranks that
/// cannot share it, and what engine::require_rates() throws.
GenerationTime generation_time(const config::Config& config, const config::Machine& machine,
                               std::int64_t vocabulary, int tensor, const GenerationShape& shape);

/// Ranks of one machine that can share the model: powers of two, 1 first.
std::vector<int> tensor_ranks(const config::Config& config, const config::Machine& machine,
                              std::int64_t vocabulary);

}  // namespace sherd::planning
