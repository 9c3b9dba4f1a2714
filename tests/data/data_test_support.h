#pragma once

#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "data/dataset_builder.h"
#include "data/indexed_dataset.h"
#include "support/places.h"
#include "support/temp_folder.h"

namespace sherd::data {

inline const std::string tokenizers_folder = SHERD_SOURCE_DIR "/tests/data/tokenizers/";

/// Writes sequences of the given lengths, whose tokens count up from 0 over the whole dataset, and opens
/// them.
inline std::shared_ptr<const IndexedDataset> counting_dataset(const testing::TempFolder& folder,
                                                              const std::vector<std::int32_t>& lengths,
                                                              std::int64_t vocab_size = 60000) {
  const std::string prefix = (folder / "counting").string();
  DatasetBuilder builder(prefix, vocab_size);
  std::int32_t next = 0;
  for (const std::int32_t length : lengths) {
    std::vector<std::int32_t> tokens(static_cast<std::size_t>(length));
    std::iota(tokens.begin(), tokens.end(), next);
    next += length;
    builder.add(tokens);
  }
  builder.finish();
  return IndexedDataset::open(prefix);
}

inline std::vector<std::int32_t> read_all(const IndexedDataset& dataset) {
  std::vector<std::int32_t> tokens;
  for (std::int64_t i = 0; i < dataset.sequences(); ++i) {
    const std::size_t at = tokens.size();
    tokens.resize(at + static_cast<std::size_t>(dataset.length(i)));
    dataset.read(i, 0, std::span(tokens).subspan(at));
  }
  return tokens;
}

}  // namespace sherd::data
