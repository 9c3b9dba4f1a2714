#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/report/append_file.h"
#include "engine/report/monitor.h"

namespace sherd::engine {

/// DeepSpeed's csv_monitor: a file per tag, "Train_Samples_train_loss.csv", with a row of names, "step" and
/// the tag's last part, and one row per event. Lines end in CR LF, as Python's csv module writes them.
class CsvFiles {
 public:
  /// As DeepSpeed, a new run goes on behind what a file holds, with a row of names between. Of a resumed run,
  /// rows beyond `resumed_at` that stand behind the last such row are dropped.
  CsvFiles(std::filesystem::path folder, std::optional<std::int64_t> resumed_at);

  void write(std::int64_t step, const std::vector<Scalar>& scalars);

 private:
  std::filesystem::path folder_;
  bool resumed_;
  std::map<std::string, std::unique_ptr<AppendFile>> files_;  ///< by tag, from its first event on
};

}  // namespace sherd::engine
