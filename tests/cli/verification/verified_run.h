#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "cli/train_fixture.h"

namespace sherd::cli {

/// A run with checkpoints, and `sherd verify` of it.
class VerifiedRun : public Train {
 protected:
  std::filesystem::path run() const { return folder_ / "run"; }
  static std::vector<std::string> with(std::vector<std::string> first, const std::vector<std::string>& keys) {
    for (const std::string& key : keys) first.push_back("--set"), first.push_back(key);
    return first;
  }
  /// Trains six steps and saves every second.
  void trained(const std::string& ranks, std::vector<std::string> keys = {}, const std::string& before = "") {
    for (const char* key : {"training.save_interval=2", "train_micro_batch_size_per_gpu=1"})
      keys.insert(keys.begin(), key);
    const Outcome outcome = shell(before + joined(with(train({"--ranks", ranks}), keys)));
    ASSERT_EQ(outcome.code, 0) << outcome.err;
  }
  Outcome verify(const std::vector<std::string>& more = {}, const std::string& before = "") const {
    std::vector<std::string> arguments{"verify", run().string()};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return shell(before + joined(arguments));
  }
};

}  // namespace sherd::cli
