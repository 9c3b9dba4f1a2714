#pragma once

#include <string>
#include <vector>

#include "config/machine.h"
#include "planning/generation.h"
#include "planning/search.h"

namespace sherd::cli {

/// The findings of `sherd plan`.
struct PlanReport {
  config::Machine machine;
  int ranks = 1;
  planning::Goal goal = planning::Goal::time;
  std::int64_t parameters = 0;
  double tokens = 0;    ///< of a whole training; 0: nobody asked
  std::string written;  ///< the file with the best plan; empty: none
  planning::SearchResult result;
};

/// The command that trains a plan on the ranks of one machine, or as a launcher starts it on all.
std::string train_line(const std::string& config, int ranks);
/// Cells of a table: the layout, its micro-batch, ZeRO stage and recompute.
std::vector<std::string> layout_cells(const planning::PlanLayout& layout);

std::string text_of(const PlanReport& report);
/// One JSON object: bytes and seconds as numbers.
std::string json_of(const PlanReport& report);

/// Times of generation, as `sherd plan --generate` tells them.
std::string text_of(const std::vector<planning::GenerationTime>& times, const config::Machine& machine,
                    const planning::GenerationShape& shape);
std::string json_of(const std::vector<planning::GenerationTime>& times);

}  // namespace sherd::cli
