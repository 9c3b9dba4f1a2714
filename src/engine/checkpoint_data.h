#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "config/config.h"
#include "engine/checksum.h"
#include "engine/token_data.h"

namespace sherd::engine {

class CheckpointReader;

/// The copy of the SentencePiece model in a checkpoint's folder; one that is there is among the manifest's
/// files.
inline constexpr const char* tokenizer_file = "tokenizer.model";

/// What a checkpoint says of the data that its run read.
struct DataRecord {
  std::optional<std::int64_t>
      position;           ///< of the training loader (LoaderPosition); none: the engine knew of no loader
  std::string tokenizer;  ///< "byte", or "spm:MODEL" by its path in that run; empty: unknown
  std::int64_t vocab_size = 0;  ///< of the token data, as are all that follow; 0: unknown
  std::int64_t tokens = 0, sequences = 0;
  std::uint32_t fingerprint = 0;  ///< IndexedDataset::fingerprint()

  static DataRecord of(const TokenData& tokens);
};

/// Throws Error{data} naming both tokenizers where `tokens` were made with another one than the checkpoint's:
/// by kind, number of ids, and the model file's bytes where both are known.
void require_same_tokenizer(const CheckpointReader& reader, const TokenData& tokens);

/// What a run with `config` and `tokens` (null: of another kind) trains otherwise than the one that wrote the
/// checkpoint: a line for each key and for the dataset.
std::vector<std::string> changes_since(const CheckpointReader& reader, const config::Config& config,
                                       const TokenData* tokens);

}  // namespace sherd::engine
