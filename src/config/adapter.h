#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/choices.h"

namespace sherd::config {

enum class AdapterType : std::uint8_t {
  none,
  lora,           ///< low-rank products beside the layers (Hu et al. 2021)
  ia3,            ///< factors for what goes into layers, or comes out of them (Liu et al. 2022)
  prompt_tuning,  ///< vectors of tokens in front of each text (Lester et al. 2021)
  p_tuning,       ///< such vectors, made by a small network (Liu et al. 2021)
  bottleneck      ///< small networks between a block's parts and the stream (Houlsby et al. 2019)
};

inline constexpr std::int64_t most_adapter_rank = 4096, most_virtual_tokens = 4096, most_tasks = 1024;

/// How LoRA's A and B begin. But for the first two B·A is a part of the weight, which is taken away from it.
enum class LoraInit : std::uint8_t {
  uniform,   ///< A in ±1/√in, B zero
  gaussian,  ///< A normal(0, 1/rank), B zero
  pissa,     ///< of the largest singular values (Meng et al. 2024, "PiSSA")
  olora      ///< of the first columns of a QR decomposition (Büyükakyüz 2024, "OLoRA")
};
/// Whether the weight that stays is another than the model's.
inline bool takes_from_base(LoraInit init) {
  return init == LoraInit::pissa || init == LoraInit::olora;
}

/// The keys of `lora` alone.
struct LoraKeys {
  std::int64_t rank = 8;  ///< rank of the products, 1 to most_adapter_rank
  double alpha = 8;       ///< the products are multiplied by alpha/rank, > 0
  bool rslora = false;    ///< they are multiplied by alpha/√rank instead (Kalajdzievski 2023)
  bool dora = false;      ///< magnitudes of the sum's rows are trained apart (Liu et al. 2024, "DoRA")
  double dropout = 0;     ///< dropout of what goes into the products, [0, 1)
  /// Ranks and alphas of modules whose name, or an end of it behind a dot, matches a regular expression; the
  /// first that does holds.
  std::vector<std::pair<std::string, std::int64_t>> rank_pattern;
  std::vector<std::pair<std::string, double>> alpha_pattern;
  std::vector<std::int64_t> layers;  ///< blocks that have an adapter, ascending; empty: all
  /// Weights of all experts that have one, by ends of their names in transformers' memory
  /// ("experts.gate_up_proj").
  std::vector<std::string> target_parameters;
  /// How A and B begin.
  LoraInit init = LoraInit::uniform;
  /// Ids whose rows are trained, of the table of tokens or the head, by the published names of these modules
  /// ("lm_head"), or ends of them; "": the table of tokens.
  std::vector<std::pair<std::string, std::vector<std::int64_t>>> token_indices;

  /// The products of a rank and an alpha are multiplied by this.
  double scale(std::int64_t of_rank, double of_alpha) const;
  bool operator==(const LoraKeys&) const = default;
};

/// How a prompt's vectors begin.
enum class PromptInit : std::uint8_t {
  random,        ///< drawn, normal(0, 1)
  sample_vocab,  ///< vectors of ids that are drawn
  text           ///< vectors of a text's tokens, repeated or cut
};

/// A prompt of its own for one of several tasks.
struct PromptTask {
  std::string name;       ///< letters, digits, '_' and '-'
  std::string init_text;  ///< stands in place of PromptKeys::init_text; empty: that one holds
  bool operator==(const PromptTask&) const = default;
};

/// The keys of `prompt_tuning` and `p_tuning`.
struct PromptKeys {
  std::int64_t virtual_tokens = 20;  ///< tokens of each prompt, 1 to most_virtual_tokens
  PromptInit init = PromptInit::random;
  std::string init_text;
  std::vector<PromptTask> tasks;         ///< empty: one prompt, for all texts
  std::int64_t encoder_hidden_size = 0;  ///< width of p-tuning's network; 0: the model's

  /// Prompts that there are.
  std::int64_t prompts() const;
  /// "a, b", the tasks' names.
  std::string task_names() const;
  /// Which of the prompts is that task's; -1: none is.
  std::int64_t find(const std::string& task) const;
  bool operator==(const PromptKeys&) const = default;
};

/// The function within a bottleneck adapter; names and functions are AdapterHub's.
enum class NonLinearity : std::uint8_t {
  swish,  ///< x·sigmoid(x)
  relu,
  gelu,      ///< x·Φ(x)
  gelu_new,  ///< its tanh approximation
  tanh
};

/// The keys of `bottleneck`. Names are AdapterHub's, and defaults those of its "double_seq_bn" (Houlsby et
/// al. 2019); "seq_bn" (Pfeiffer et al. 2020) has no mh_adapter, original_ln_before and relu.
struct BottleneckKeys {
  bool attention = true;         ///< mh_adapter: behind attention
  bool mlp = true;               ///< output_adapter: behind the feed-forward part
  double reduction_factor = 16;  ///< the stream's width is divided by it, > 0
  std::int64_t size = 0;         ///< bottleneck_size, in place of the factor; 0: not given
  NonLinearity non_linearity = NonLinearity::swish;
  double scale = 1;              ///< scaling: factor of what the network gives
  bool of_sum = false;           ///< original_ln_before: it reads the stream that the part was added to
  std::string name = "adapter";  ///< its name in AdapterHub's files: letters, digits, '_' and '-'

  /// Features within, of a stream of that width; at least one.
  std::int64_t width(std::int64_t hidden) const;
  bool operator==(const BottleneckKeys&) const = default;
};

/// Section `training.adapter`: what is trained beside a model whose own weights stay as they are. Names and
/// defaults are PEFT's.
struct Adapter {
  AdapterType type = AdapterType::none;
  LoraKeys lora;
  PromptKeys prompt;
  BottleneckKeys bottleneck;
  /// For lora and ia3: ends of published modules' names ("q_proj", "attn.c_proj"), or "all-linear" alone;
  /// empty: the family's default.
  /// One with a character that names have not is a regular expression of whole names.
  std::vector<std::string> targets;
  std::vector<std::string> exclude;  ///< likewise modules that get none
  /// Ends of names of modules that are trained whole beside lora and ia3: the table of tokens and the head.
  std::vector<std::string> modules_to_save;
  StoredFormat base_format = StoredFormat::compute;
  bool base_double_quant = false;  ///< nf4 and fp4 are kept in their double forms
  bool save_base = true;  ///< checkpoints hold the model's own weights; else they refer to their files

  /// The format that base_format and base_double_quant mean together.
  StoredFormat stored_base() const;
  void keep_base_as(StoredFormat stored);
  std::string init_from;  ///< folder of an adapter to go on from: PEFT's, or a checkpoint; empty: none

  /// Virtual tokens stand in front of texts.
  bool has_prompt() const { return type == AdapterType::prompt_tuning || type == AdapterType::p_tuning; }
  /// Whether the model without the adapter is the model that it began from: the adapter begins as nothing,
  /// and no weights of the model train beside it.
  bool can_be_switched_off() const;
  /// Tokens of each prompt; 0: there is none.
  std::int64_t virtual_tokens() const { return has_prompt() ? prompt.virtual_tokens : 0; }
  bool operator==(const Adapter&) const = default;
};

std::string_view name_of(AdapterType type);   ///< "lora", "ia3", …; of none ""
std::string_view name_of(NonLinearity kind);  ///< "swish", "relu", …
/// The first id of the virtual tokens of prompt `prompt`: they lie behind a vocabulary of `vocabulary` ids,
/// padded to a multiple of `multiple`, one prompt's behind the other's.
std::int64_t first_virtual_id(const PromptKeys& keys, std::int64_t vocabulary, std::int64_t multiple,
                              std::int64_t prompt = 0);

/// The section alone, {"training": {"adapter": {…}}}, as text that the parser reads to the same.
std::string section_of(const Adapter& adapter);

}  // namespace sherd::config
