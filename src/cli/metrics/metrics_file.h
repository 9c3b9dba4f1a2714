#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

// This folder reads what a run wrote about its steps, and shows it: as pictures (`sherd plot`), in a terminal
// (`sherd watch`) and as a page (`sherd report`).
//
//   metrics_file.h   the numbers of a metrics file, also while it grows
//   picture.h        charts as SVG; plot.h: the losses alone
//   charts.h         which charts the numbers make, for all three commands
//   text_picture.h   charts as text; screen.h: the terminal that shows them
//   report_page.h    the page

namespace sherd::cli {

/// A value at a step.
struct Point {
  double step = 0, value = 0;
};

/// The numbers of a run's steps, by name: "loss", "mem.device_peak", "objective.rewards/chosen". A list of
/// numbers (of ranks, of layers) has its mean under its name, and its largest under NAME.most. Values that
/// are not finite are left out.
class Metrics {
 public:
  /// By step, each once.
  const std::vector<Point>& of(std::string_view name) const;
  /// All names that have values and begin so.
  std::vector<std::string> names(std::string_view prefix) const;

  std::int64_t last_step() const { return last_step_; }
  bool empty() const { return last_step_ < 0; }
  /// How often steps began again from an earlier one, as where a run was resumed.
  std::int64_t restarts() const { return restarts_; }

  /// A step that is not behind the last takes the place of those from it on, which the run does again, as in
  /// a file that a resumed run continues.
  void add(std::int64_t step, const std::vector<std::pair<std::string, double>>& values);

 private:
  std::map<std::string, std::vector<Point>, std::less<>> curves_;
  std::int64_t last_step_ = -1, restarts_ = 0;
};

/// A metrics file that may not be there yet, may grow, and may be replaced. Of a very large one the objects
/// within lines (memory, traffic, ranks, experts) are read of some lines, evenly spread; numbers that stand
/// in the line itself are read of all.
class MetricsFile {
 public:
  /// `detailed_bytes`: of lines, beyond which objects are read of some lines alone.
  explicit MetricsFile(std::filesystem::path path, std::int64_t detailed_bytes = std::int64_t{64} << 20)
      : path_(std::move(path)), detailed_bytes_(detailed_bytes) {}

  /// Reads what was written since the last call, but for an unfinished last line, and says whether that was
  /// anything. A file that was cut or replaced is read from its beginning. Throws Error{data} naming a line
  /// that is not one of metrics, Error{io} where it cannot be read.
  bool poll();
  /// Takes a last line that lacks only its newline, and ignores half of one.
  void finish();

  bool exists() const { return exists_; }
  const Metrics& metrics() const { return metrics_; }
  /// The text of the last line that was read.
  const std::string& last_line() const { return last_line_; }
  const std::filesystem::path& path() const { return path_; }

 private:
  bool was_replaced(int file, std::uint64_t size, std::pair<std::uint64_t, std::uint64_t> identity) const;
  void begin_again();
  void take(std::string_view text);
  /// Whether the text is a whole line of metrics; if so, its values are added.
  bool add_line(std::string_view line);

  std::filesystem::path path_;
  Metrics metrics_;
  bool exists_ = false;
  std::pair<std::uint64_t, std::uint64_t> identity_{};  ///< device and number of the file
  std::uint64_t offset_ = 0;                            ///< bytes that were read
  std::string tail_;  ///< the last of them, by which the file is known again
  std::string rest_;  ///< a line without its end
  std::string last_line_;
  std::int64_t row_ = 0, stride_ = 1, detailed_bytes_;
};

/// All of a file. Throws Error{io} where there is none, and as MetricsFile::poll().
MetricsFile read_metrics(const std::filesystem::path& path);

}  // namespace sherd::cli
