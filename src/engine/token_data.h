#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "config/config.h"
#include "data/dataset_info.h"
#include "data/indexed_dataset.h"
#include "data/loader.h"

namespace sherd::engine {

/// The datasets of a config's `data` section, opened and split. Safe to share between local ranks.
struct TokenData {
  std::vector<std::shared_ptr<const data::IndexedDataset>> datasets;  ///< at least one
  std::optional<data::DatasetInfo> info;  ///< the first dataset's; absent where another program wrote it
  std::string chat_template;              ///< that of the datasets with conversations; empty: none has any
  std::string tokenizer;                  ///< spec for data::make_tokenizer; empty: unknown
  /// The bytes of its file; empty where it has none, or the file cannot be read.
  std::string tokenizer_model;
  std::int64_t vocab_size = 0;    ///< ids in the data are below this
  std::uint32_t fingerprint = 0;  ///< IndexedDataset::fingerprint() of all, as they were opened
  /// For preferences: each dataset's part for training, and for validation, by itself; else empty.
  std::vector<std::shared_ptr<const data::Samples>> parts;
  std::shared_ptr<const data::Samples> train;
  std::shared_ptr<const data::Samples> validation;  ///< null where data.split leaves it no sequence

  /// The total over all datasets.
  std::int64_t tokens() const;
  std::int64_t sequences() const;
  /// The prefixes, for messages.
  std::string name() const;

  /// Batches of this rank from the training split, endless.
  std::unique_ptr<data::Loader> training_loader(const data::LoaderRank& rank, device::Device& device) const;
  /// Batches of this rank from the beginning of the validation split, over and over: `samples` of all ranks,
  /// or as many as there are.
  std::unique_ptr<data::Loader> validation_loader(const data::LoaderRank& rank, std::int64_t samples,
                                                  device::Device& device) const;
};

/// Opens what `data.path` or `data.sources` name. Throws Error{config} without a `data` or `model` section,
/// when model.vocab_size and the data disagree, or sources are of different tokenizers; Error{io} or
/// Error{data} naming the file for a missing or damaged dataset, or one that has too few tokens for a sample
/// in either split.
std::shared_ptr<const TokenData> open_token_data(const config::Config& config);

/// The model's token ids: model.vocab_size, or what the dataset's description or tokenizer says; the dataset
/// itself need not be there. Throws Error{config} when nothing tells.
std::int64_t vocabulary_size(const config::Config& config);

}  // namespace sherd::engine
