#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace sherd::config {

enum class AdapterType : std::uint8_t {
  none,
  lora,  ///< low-rank products beside the layers (Hu et al. 2021)
  ia3    ///< factors for what goes into layers, or comes out of them (Liu et al. 2022)
};

inline constexpr std::int64_t most_adapter_rank = 4096;

/// Section `training.adapter`: what is trained beside a model whose own weights stay as they are. Names and
/// defaults are PEFT's.
struct Adapter {
  AdapterType type = AdapterType::none;
  std::int64_t rank = 8;  ///< of LoRA's products, 1 to most_adapter_rank
  double alpha = 8;       ///< LoRA's products are multiplied by alpha/rank, > 0
  bool rslora = false;    ///< by alpha/√rank instead (Kalajdzievski 2023)
  double dropout = 0;     ///< of what goes into LoRA's products, [0, 1)
  /// Ends of published modules' names ("q_proj", "attn.c_proj"), or "all-linear" alone; empty: the family's
  /// default.
  std::vector<std::string> targets;
  /// The model's own weights in linear layers are kept in 8 bits (tensor/int8_blocks.h), not in the dtype
  /// that the run computes in.
  bool int8_base = false;
  std::string init_from;  ///< folder of an adapter to go on from: PEFT's, or a checkpoint; empty: none

  /// What LoRA's products are multiplied by.
  double scale() const;
  bool operator==(const Adapter&) const = default;
};

std::string_view name_of(AdapterType type);  ///< "lora", "ia3"; of none ""

/// The section alone, {"training": {"adapter": {…}}}, as text that the parser reads to the same.
std::string section_of(const Adapter& adapter);

/// Reads PEFT's adapter_config.json; `name` stands for the file in errors. Throws Error{config} naming each
/// key that would change what the adapter computes and that Sherd does not have.
Adapter from_peft(std::string_view text, const std::string& name);

/// The adapter as an adapter_config.json. `targets`: ends of the names of all modules that have one, those of
/// `feedforward` among them that IA³ takes at their input; `transposed`: published weights are [in, out], as
/// GPT-2's are; `base`: a name or path of the model, or empty.
std::string to_peft(const Adapter& adapter, const std::vector<std::string>& targets,
                    const std::vector<std::string>& feedforward, bool transposed, const std::string& base);

}  // namespace sherd::config
