#pragma once

#include <cstdint>
#include <string_view>

namespace sherd::config {

enum class ModelType : std::uint8_t { gpt2, llama };
enum class Positions : std::uint8_t { learned, rotary };
enum class Norm : std::uint8_t { layernorm, rmsnorm };
enum class FfnActivation : std::uint8_t { gelu_tanh, gelu, swiglu };

/// The largest that a model may be along each axis. Far above what anyone trains, and such that no count of
/// elements overflows and nothing that is held per layer grows large.
inline constexpr std::int64_t most_layers = 2048, most_hidden = 1 << 20, most_ffn_hidden = 1 << 22,
                              most_heads = 1 << 16, most_positions = 1 << 24, most_vocabulary = 1 << 24;

/// Section `model`: a decoder-only transformer. `type` picks the defaults of the fields marked "by type";
/// every field may still be set by itself. The section is for `sherd train`; callers with a model of their
/// own leave it out.
struct Model {
  ModelType type = ModelType::gpt2;  ///< gpt2 | llama
  std::int64_t vocab_size = 0;       ///< token ids; 0 (default): as the dataset's tokenizer says
  /// The embedding's rows are rounded up to a multiple of this; the extra rows take no part in the loss.
  std::int64_t pad_vocab_to_multiple_of = 128;
  std::int64_t seq_length = 0;    ///< tokens per sample, required
  std::int64_t hidden_size = 0;   ///< required; a multiple of num_heads
  std::int64_t num_layers = 0;    ///< required
  std::int64_t num_heads = 0;     ///< required; query heads
  std::int64_t num_kv_heads = 0;  ///< key-value heads, divides num_heads; default num_heads
  /// Default 4·hidden (gpt2), 8/3·hidden rounded up to a multiple of 64 (llama).
  std::int64_t ffn_hidden_size = 0;
  Positions position = Positions::learned;  ///< by type: learned (gpt2), rotary (llama)
  double rotary_base = 10000;               ///< > 1; rotary only
  Norm norm = Norm::layernorm;              ///< by type: layernorm (gpt2), rmsnorm (llama)
  double norm_epsilon = 1e-5;               ///< > 0
  /// By type: gelu_tanh (gpt2), swiglu (llama); gelu is x·Φ(x).
  FfnActivation activation = FfnActivation::gelu_tanh;
  double dropout = 0;            ///< of residual branches, [0, 1); by type: 0.1 (gpt2), 0 (llama)
  double attention_dropout = 0;  ///< of attention weights; default `dropout`
  double embedding_dropout = 0;  ///< of the embeddings' sum; default `dropout`
  bool tie_embeddings = true;    ///< the output projection is the embedding; by type: gpt2 yes, llama no
  bool bias = true;              ///< of linear layers; by type: gpt2 yes, llama no
  /// Of normal initial weights, > 0; divided by √(2·num_layers) where they feed the residual stream.
  double init_std = 0.02;

  std::int64_t head_dim() const { return hidden_size / num_heads; }
  /// `vocabulary` rounded up to a multiple of pad_vocab_to_multiple_of.
  std::int64_t padded_vocab(std::int64_t vocabulary) const {
    return (vocabulary + pad_vocab_to_multiple_of - 1) / pad_vocab_to_multiple_of * pad_vocab_to_multiple_of;
  }
  bool operator==(const Model&) const = default;
};

std::string_view name_of(ModelType type);            ///< "gpt2", "llama"
std::string_view name_of(Positions positions);       ///< "learned", "rotary"
std::string_view name_of(Norm norm);                 ///< "layernorm", "rmsnorm"
std::string_view name_of(FfnActivation activation);  ///< "gelu_tanh", "gelu", "swiglu"

}  // namespace sherd::config
