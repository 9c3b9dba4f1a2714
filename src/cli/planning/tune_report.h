#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "cli/planning/trial.h"
#include "planning/correction.h"
#include "planning/search.h"

namespace sherd::cli {

/// A layout that was to be tried.
struct TunedLayout {
  planning::Plan plan;
  TrialResult result;
  bool tried = false;    ///< false: time was over before
  bool known = false;    ///< an earlier call has tried it
  std::string config;    ///< its file
  double corrected = 0;  ///< seconds of a step by corrected rates
  bool ran() const { return tried && result.failure.empty(); }
};

/// The findings of `sherd tune`.
struct TuneReport {
  std::vector<TunedLayout> layouts;  ///< the one that was predicted to be the fastest first
  std::string folder, launcher;
  planning::Correction correction;
  std::string machine_file;       ///< with corrected rates; empty: nothing ran
  std::string best_file;          ///< the fastest's configuration; empty: nothing ran
  std::vector<std::string> next;  ///< keys of the first layout by corrected rates, where nobody tried it

  /// The places of those that ran, the fastest first.
  std::vector<std::size_t> ran() const;
  std::vector<planning::MeasuredStep> measured() const;
  /// The median and the largest of the relative errors of predictions, and of corrected ones.
  struct Errors {
    double median = 0, worst = 0;
  };
  Errors errors(bool corrected) const;
};

std::string text_of(const TuneReport& report);
/// One JSON object.
std::string json_of(const TuneReport& report);
/// An SVG picture: predicted beside measured steps of those that ran. Throws Error{data} where none did.
std::string plot_of(const TuneReport& report);

}  // namespace sherd::cli
