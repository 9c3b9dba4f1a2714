#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/report/append_file.h"
#include "engine/report/monitor.h"

namespace sherd::engine {

/// One of TensorBoard's event files: records framed as TensorFlow's TFRecord (length, data, and masked
/// CRC-32C of both), each an Event in protobuf's encoding.
class EventFile {
 public:
  /// Begins a file of its own in `folder`, as TensorBoard's writers do. Of a resumed run, events beyond
  /// `resumed_at` are taken out of the run's earlier files, each replaced whole; programs that have read them
  /// already drop them by what the new file says.
  EventFile(const std::filesystem::path& folder, std::optional<std::int64_t> resumed_at);

  /// All scalars of a step, in one record.
  void write(std::int64_t step, const std::vector<Scalar>& scalars);

 private:
  std::unique_ptr<AppendFile> file_;
};

/// Files of TensorBoard's in a folder, oldest first.
std::vector<std::filesystem::path> event_files(const std::filesystem::path& folder);

}  // namespace sherd::engine
