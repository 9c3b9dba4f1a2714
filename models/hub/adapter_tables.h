#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "models/gpt_config.h"

// The model's own parameters that are trained with an adapter: the table of tokens and the head, whole or by
// rows.
namespace sherd::models {

/// The parameters of the model itself that are trained beside its adapter (Adapter::modules_to_save), which
/// resolved_adapter() gave.
std::vector<std::string> saved_parameters(const GptConfig& model);

/// The ids whose rows are trained while the others stay (LoraKeys::token_indices): of the table of tokens,
/// and of a head of its own.
struct TrainedTokenIds {
  std::vector<std::int64_t> of_table, of_head;
  /// The ids of the layer "tokens" or "head".
  const std::vector<std::int64_t>& of(std::string_view layer) const {
    return layer == "tokens" ? of_table : of_head;
  }
};
TrainedTokenIds trained_tokens(const GptConfig& model);

/// Throws Error{config} where an adapter of layers, whose targets are known, names tables or ids that there
/// are not, or twice.
void check_tables(const GptConfig& model);

}  // namespace sherd::models
