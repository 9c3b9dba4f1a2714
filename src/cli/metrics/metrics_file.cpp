#include "cli/metrics/metrics_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>

#include "base/error.h"
#include "base/files.h"

namespace sherd::cli {
namespace {

using Values = std::vector<std::pair<std::string, double>>;

/// Gathers the numbers of a line by their names.
class NumbersOfLine final : public nlohmann::json_sax<nlohmann::json> {
 public:
  /// `detailed`: also those of objects within the line, but `objective` and `metrics`, which it always reads.
  explicit NumbersOfLine(bool detailed) : detailed_(detailed) {}

  Values values;
  bool is_object = false, stopped = false;

  bool null() override { return true; }
  bool boolean(bool value) override { return number(value ? 1 : 0); }
  bool number_integer(number_integer_t value) override { return number(static_cast<double>(value)); }
  bool number_unsigned(number_unsigned_t value) override { return number(static_cast<double>(value)); }
  bool number_float(number_float_t value, const string_t&) override { return number(value); }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool key(string_t& name) override {
    if (lists_ > 0) return true;
    name_.resize(ends_.empty() ? 0 : ends_.back());
    name_ += name;
    return true;
  }
  bool start_object(std::size_t) override {
    if (lists_ > 0) return ++lists_, true;  // numbers of objects in lists have no name
    if (ends_.empty()) is_object = true;
    if (ends_.size() == 1 && !detailed_ && name_ != "objective" && name_ != "metrics")
      return stopped = true, false;
    if (!ends_.empty()) name_ += '.';
    ends_.push_back(name_.size());
    return true;
  }
  bool end_object() override {
    if (lists_ > 0) return --lists_, true;
    ends_.pop_back();
    return true;
  }
  bool start_array(std::size_t) override {
    if (lists_++ == 0) sum_ = 0, most_ = 0, count_ = 0;
    return true;
  }
  bool end_array() override {
    if (--lists_ > 0 || count_ == 0) return true;
    values.emplace_back(name_, sum_ / count_);
    values.emplace_back(name_ + ".most", most_);
    return true;
  }
  bool parse_error(std::size_t, const std::string&, const nlohmann::detail::exception&) override {
    return false;
  }

 private:
  bool number(double value) {
    if (lists_ == 0)
      values.emplace_back(name_, value);
    else if (lists_ == 1)
      most_ = count_ == 0 ? value : std::max(most_, value), sum_ += value, ++count_;
    return true;
  }

  bool detailed_;
  std::string name_;
  std::vector<std::size_t> ends_;  ///< of the names of the objects around
  int lists_ = 0;                  ///< around, with objects in them
  double sum_ = 0, most_ = 0, count_ = 0;
};

/// The step among the values; nothing where there is none.
std::optional<std::int64_t> step_in(const Values& values) {
  for (const auto& [name, value] : values)
    if (name == "step" && value >= 0 && value < 9e15) return static_cast<std::int64_t>(value);
  return std::nullopt;
}

}  // namespace

const std::vector<Point>& Metrics::of(std::string_view name) const {
  static const std::vector<Point> none;
  const auto found = curves_.find(name);
  return found == curves_.end() ? none : found->second;
}

std::vector<std::string> Metrics::names(std::string_view prefix) const {
  std::vector<std::string> out;
  for (auto at = curves_.lower_bound(prefix); at != curves_.end() && at->first.starts_with(prefix); ++at)
    if (!at->second.empty()) out.push_back(at->first);
  return out;
}

void Metrics::add(std::int64_t step, const Values& values) {
  if (step <= last_step_) {
    ++restarts_;
    for (auto& [name, points] : curves_)
      while (!points.empty() && points.back().step >= static_cast<double>(step)) points.pop_back();
  }
  last_step_ = step;
  for (const auto& [name, value] : values)
    if (std::isfinite(value) && name != "step") curves_[name].push_back({static_cast<double>(step), value});
}

bool MetricsFile::add_line(std::string_view line) {
  NumbersOfLine numbers(row_ % stride_ == 0);
  const bool whole = nlohmann::json::sax_parse(line.begin(), line.end(), &numbers);
  // Where reading stopped at an object, its end is the line's.
  if (!numbers.is_object || !(whole || (numbers.stopped && line.ends_with('}')))) return false;
  const std::optional<std::int64_t> step = step_in(numbers.values);
  if (!step) return false;
  metrics_.add(*step, numbers.values);
  last_line_ = line;
  return true;
}

void MetricsFile::take(std::string_view text) {
  constexpr std::size_t most_line = std::size_t{64} << 20;
  const auto refuse = [&] {
    fail(ErrorKind::data, "line ", row_ + 1, " of '", path_.string(),
         "' is not a line of metrics. Give a file that `sherd train --metrics` wrote, or mend or remove the "
         "line");
  };
  for (std::size_t end; (end = text.find('\n')) != std::string_view::npos; text.remove_prefix(end + 1)) {
    std::string_view line = text.substr(0, end);
    if (!rest_.empty()) line = rest_.append(line);
    if (!add_line(line)) refuse();
    rest_.clear();
    ++row_;
  }
  rest_ += text;
  if (rest_.size() > most_line) refuse();
}

bool MetricsFile::was_replaced(int file, std::uint64_t size,
                               std::pair<std::uint64_t, std::uint64_t> identity) const {
  if (identity != identity_ || size < offset_) return true;
  std::string there(tail_.size(), '\0');
  const auto begin = static_cast<off_t>(offset_ - tail_.size());
  return ::pread(file, there.data(), there.size(), begin) != static_cast<ssize_t>(there.size()) ||
         there != tail_;
}

void MetricsFile::begin_again() {
  metrics_ = {};
  offset_ = 0, row_ = 0;
  tail_.clear(), rest_.clear(), last_line_.clear();
}

bool MetricsFile::poll() {
  constexpr std::size_t tail_bytes = 256;
  const auto refuse = [&](const char* verb) {
    fail(ErrorKind::io, "cannot ", verb, " the metrics file '", path_.string(), "': ", std::strerror(errno));
  };
  const FileDescriptor file(::open(path_.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file && errno == ENOENT) return std::exchange(exists_, false);
  struct stat found {};
  if (!file || ::fstat(file.get(), &found) != 0) refuse("open");
  const bool regular = S_ISREG(found.st_mode);
  const auto size = static_cast<std::uint64_t>(found.st_size);
  const std::pair<std::uint64_t, std::uint64_t> identity{found.st_dev, found.st_ino};
  const bool again = offset_ > 0 && regular && was_replaced(file.get(), size, identity);
  bool news = !std::exchange(exists_, true) || again;
  if (again) begin_again();
  identity_ = identity;
  if (regular && size == offset_) return news;
  if (offset_ == 0) stride_ = 1 + static_cast<std::int64_t>(size) / detailed_bytes_;
  if (regular && ::lseek(file.get(), static_cast<off_t>(offset_), SEEK_SET) < 0) refuse("read");
  std::vector<char> part(std::size_t{1} << 20);
  for (;;) {
    const ssize_t got = ::read(file.get(), part.data(), part.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) refuse("read");
    if (got == 0) return news;
    news = true;
    const std::string_view text(part.data(), static_cast<std::size_t>(got));
    offset_ += text.size();
    tail_.append(text.substr(text.size() - std::min(text.size(), tail_bytes)));
    tail_.erase(0, tail_.size() - std::min(tail_.size(), tail_bytes));
    take(text);
  }
}

void MetricsFile::finish() {
  if (!rest_.empty() && add_line(rest_)) ++row_;
  rest_.clear();
}

MetricsFile read_metrics(const std::filesystem::path& path) {
  MetricsFile file(path);
  file.poll();
  if (!file.exists())
    fail(ErrorKind::io, "cannot open the metrics file '", path.string(), "': ", std::strerror(ENOENT),
         ". Give what `sherd train --metrics` wrote");
  file.finish();
  return file;
}

}  // namespace sherd::cli
