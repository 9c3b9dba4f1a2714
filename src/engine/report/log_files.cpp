#include "engine/report/log_files.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>

#include "base/error.h"
#include "base/files.h"
#include "engine/report/report.h"

namespace sherd::engine {

AppendFile::AppendFile(std::filesystem::path path, bool keep, std::string what)
    : path_(std::move(path)), what_(std::move(what)) {
  descriptor_ = ::open(path_.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC | (keep ? O_APPEND : O_TRUNC), 0666);
  if (descriptor_ < 0) fail_errno("open");
}

AppendFile::~AppendFile() {
  ::close(descriptor_);
}

void AppendFile::write(std::string_view piece) {
  while (!piece.empty()) {
    const ssize_t wrote = ::write(descriptor_, piece.data(), piece.size());
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) fail_errno("write to");
    piece.remove_prefix(static_cast<std::size_t>(wrote));
  }
}

void AppendFile::sync() {
  // A pipe has nothing to sync.
  if (::fsync(descriptor_) != 0 && errno != EINVAL && errno != EROFS && errno != ENOTSUP) fail_errno("sync");
}

void AppendFile::fail_errno(const char* action) const {
  fail(ErrorKind::io, "cannot ", action, " ", what_, " '", path_.string(), "': ", std::strerror(errno));
}

namespace fs = std::filesystem;
namespace {

constexpr const char* csv_prefix = "Train_Samples_";
constexpr std::string_view names = "step,";

/// The file's rows up to a step; a last row without its line's end is what a crash left.
void trim_csv(const fs::path& path, std::int64_t last_step) {
  std::ifstream in(path, std::ios::binary);
  if (!in) fail(ErrorKind::io, "csv_monitor: cannot read '", path.string(), "', which the run goes on from");
  std::vector<std::string> rows;
  std::size_t own = 0;  // the first row of this run
  std::string row;
  bool whole = true;
  while (std::getline(in, row)) {
    if (!(whole = !in.eof())) break;
    rows.push_back(row + '\n');
    if (row.starts_with(names)) own = rows.size();
  }
  const auto beyond = [&](const std::string& line) {
    std::int64_t step = 0;
    return std::from_chars(line.data(), line.data() + line.size(), step).ec == std::errc() &&
           step > last_step;
  };
  const auto dropped = std::remove_if(rows.begin() + static_cast<std::ptrdiff_t>(own), rows.end(), beyond);
  if (whole && dropped == rows.end()) return;
  rows.erase(dropped, rows.end());
  std::string text;
  for (const std::string& line : rows) text += line;
  write_file_atomically(path, text);
}

}  // namespace

CsvFiles::CsvFiles(fs::path folder, std::optional<std::int64_t> resumed_at)
    : folder_(std::move(folder)), resumed_(resumed_at.has_value()) {
  if (!resumed_at) return;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder_))
    if (entry.path().filename().string().starts_with(csv_prefix) && entry.path().extension() == ".csv")
      trim_csv(entry.path(), *resumed_at);
}

void CsvFiles::write(std::int64_t step, const std::vector<Scalar>& scalars) {
  for (const Scalar& scalar : scalars) {
    std::unique_ptr<AppendFile>& file = files_[scalar.tag];
    std::string text;
    if (!file) {
      std::string name = scalar.tag;
      std::replace(name.begin(), name.end(), '/', '_');
      const fs::path path = folder_ / (name + ".csv");
      const bool goes_on = resumed_ && fs::exists(path);
      file = std::make_unique<AppendFile>(path, true, "the CSV file");
      if (!goes_on) text = cat(names, scalar.tag.substr(scalar.tag.rfind('/') + 1), "\r\n");
    }
    file->write(text + cat(step, ",", exact(scalar.value), "\r\n"));
  }
}

}  // namespace sherd::engine
