#pragma once

#include <string>
#include <vector>

#include "cli/metrics/picture.h"

namespace sherd::cli {

/// The charts that the numbers make, those that are looked at first in front; without those that would be
/// empty or 0 alone. They refer to `metrics`, which must outlive them.
std::vector<Chart> charts_of(const Metrics& metrics);

/// The chart of that id: "loss", "rewards", "accuracy", "rate", "time", "norm", "memory", …; null: it is not
/// among them.
const Chart* find_chart(const std::vector<Chart>& charts, const std::string& id);

}  // namespace sherd::cli
