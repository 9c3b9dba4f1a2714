#pragma once

#include <cstdint>
#include <iosfwd>
#include <string>

#include "cli/inference/inference.h"
#include "data/indexed_dataset.h"

namespace sherd::cli {

/// Scores the answers of a dataset of preferences, the first `limit` (0: all) of its documents: how likely
/// they are, or with a reward model their rewards. Returns what a report says, a table or an object of JSON:
/// of how many pairs the chosen answer is above, and the means of both. `details`, where it is not null, gets
/// a line of JSON for each document. most_rows: of a pass. Throws Error{data} for a dataset without anything
/// to score.
std::string preference_report(const Inference& from, const data::IndexedDataset& dataset, std::size_t limit,
                              std::int64_t most_rows, bool json, std::ostream* details);

}  // namespace sherd::cli
