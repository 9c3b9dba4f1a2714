#pragma once

#include <string>
#include <utility>
#include <vector>

#include "cli/metrics/metrics_file.h"

namespace sherd::cli {

/// The content of a page about a run. Texts are as they were read: the page escapes them.
struct ReportContent {
  using Facts = std::vector<std::pair<std::string, std::string>>;

  std::string title{};
  std::string last_line{};             ///< of the metrics file, for the table of experts; empty: none
  Facts facts{};                       ///< about versions, machine and checkpoint
  std::string config{};                ///< JSON; empty: unknown
  Facts samples{};                     ///< prompts and what the model wrote
  std::vector<std::string> remarks{};  ///< what the page lacks, and why
};

/// One HTML page without anything from elsewhere: it is read without a network, on paper, on a telephone, in
/// light and dark, and without its script, which only tells the values under the pointer.
std::string report_page(const Metrics& metrics, const ReportContent& content);

}  // namespace sherd::cli
