#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/report/monitor.h"

namespace sherd::engine {

/// A file that grows by whole pieces: each is handed to the system at once, so that it outlives the process.
/// Throws Error{io} that names the file by `what`, as "the metrics file".
class AppendFile {
 public:
  /// `keep`: go on behind what is there, else begin anew.
  AppendFile(std::filesystem::path path, bool keep, std::string what);
  ~AppendFile();
  AppendFile(const AppendFile&) = delete;
  AppendFile& operator=(const AppendFile&) = delete;

  void write(std::string_view piece);
  /// Waits until all of it outlives the machine as well.
  void sync();

 private:
  [[noreturn]] void fail_errno(const char* action) const;

  std::filesystem::path path_;
  std::string what_;
  int descriptor_ = -1;
};

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
