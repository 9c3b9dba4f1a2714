#pragma once

#include <functional>
#include <string>
#include <vector>

#include "config/config.h"

namespace sherd::cli {

/// The files of --config, with the overrides of --set.
struct ConfigFiles {
  std::vector<std::string> paths, overrides;
  bool resumes = false;  ///< the run's own checkpoints go before what it began from

  /// With further overrides.
  config::Config parse(const std::vector<std::string>& more = {}) const;
  /// Calls `run`, whose errors about the configuration then name keys as the files have them.
  void in_their_words(const std::function<void()>& run) const;
};

}  // namespace sherd::cli
