#include "engine/metrics.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "base/atomic_file.h"
#include "base/error.h"

namespace sherd::engine {
namespace fs = std::filesystem;
namespace {

/// Builds one flat JSON object whose keys need no escaping.
class JsonLine {
 public:
  void add(std::string_view key, double value) { begin(key), put(value); }
  template <class T>
  void add(std::string_view key, const std::vector<T>& values) {
    begin(key);
    put(values);
  }
  void add(std::string_view key, std::int64_t value) { begin(key), text_ += std::to_string(value); }
  void add(std::string_view key, std::uint64_t value) { begin(key), text_ += std::to_string(value); }
  void add(std::string_view key, bool value) { begin(key), text_ += value ? "true" : "false"; }
  void open(std::string_view key) { begin(key), text_ += '{', first_ = true; }
  void close() { text_ += '}', first_ = false; }
  std::string finish() { return text_ + '}'; }

 private:
  void begin(std::string_view key) {
    if (!std::exchange(first_, false)) text_ += ',';
    text_ += '"', text_ += key, text_ += "\":";
  }
  template <class T>
  void put(const std::vector<T>& values) {
    text_ += '[';
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (i > 0) text_ += ',';
      put(values[i]);
    }
    text_ += ']';
  }
  void put(std::int64_t value) { text_ += std::to_string(value); }
  void put(const std::string& text) { text_ += nlohmann::json(text).dump(); }
  void put(double value) {
    if (!std::isfinite(value)) {
      text_ += "null";
      return;
    }
    std::array<char, 32> digits;
    const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr;
    text_.append(digits.data(), end);
  }
  std::string text_ = "{";
  bool first_ = true;
};

[[noreturn]] void fail_errno(const char* action, const fs::path& path) {
  fail(ErrorKind::io, "cannot ", action, " the metrics file '", path.string(), "': ", std::strerror(errno));
}

/// The lines of `path` that belong to steps before `first_step`. A last line without its newline is what a
/// crash left.
std::string lines_before(const fs::path& path, std::int64_t first_step) {
  std::ifstream in(path, std::ios::binary);
  if (!in) return "";
  std::string kept, line;
  for (std::int64_t number = 1; std::getline(in, line) && !in.eof(); ++number) {
    const auto object = nlohmann::json::parse(line, nullptr, false);
    const bool valid = object.is_object() && object.contains("step") && object["step"].is_number_integer();
    if (!valid)
      fail(ErrorKind::data, "line ", number, " of '", path.string(),
           "' is not a line of metrics. Give --metrics another file, or move this one away");
    if (object["step"].get<std::int64_t>() < first_step) kept += line, kept += '\n';
  }
  return kept;
}

using Experts = std::vector<std::pair<std::string, parallel::RoutingTotals>>;

/// Losses are means over layers, as over micro-batches.
void add_experts(JsonLine& line, const Experts& layers) {
  if (layers.empty()) return;
  double balance = 0, z = 0;
  std::vector<std::string> names;
  std::vector<double> imbalance, dropped;
  std::vector<std::vector<std::int64_t>> tokens;
  for (const auto& [name, layer] : layers) {
    const double of_all = static_cast<double>(layer.micro_batches) * static_cast<double>(layers.size());
    balance += layer.balance / of_all, z += layer.z / of_all;
    names.push_back(name), tokens.push_back(layer.per_expert);
    imbalance.push_back(layer.imbalance()), dropped.push_back(layer.dropped_share());
  }
  line.open("moe");
  line.add("balance_loss", balance);
  line.add("z_loss", z);
  line.add("layers", names);
  line.add("imbalance", imbalance);
  line.add("dropped", dropped);
  line.add("tokens", tokens);
  line.close();
}

}  // namespace

std::string to_json(const StepMetrics& m) {
  constexpr double unknown = std::numeric_limits<double>::quiet_NaN();
  JsonLine line;
  line.add("step", m.step);
  line.add("loss", m.loss);
  if (m.val_loss) line.add("val_loss", *m.val_loss);
  line.add("lr", m.lr);
  if (m.lrs.size() > 1) line.add("lrs", m.lrs);
  line.add("grad_norm", m.grad_norm);
  line.add("loss_scale", m.loss_scale);
  line.add("skipped", m.skipped);
  line.add("tokens", m.tokens);
  line.add("step_ms", m.step_ms);
  line.add("tokens_per_s", m.tokens_per_s);
  line.add("mfu", m.mfu.value_or(unknown));
  add_experts(line, m.experts);
  line.open("mem");
  line.add("device_peak", m.mem.device_peak);
  line.add("host_peak", m.mem.host_peak);
  line.add("nvme_peak", m.mem.nvme_peak);
  line.close();
  line.open("comm");
  line.add("all_reduce_bytes", m.comm.all_reduce);
  line.add("all_gather_bytes", m.comm.all_gather);
  line.add("reduce_scatter_bytes", m.comm.reduce_scatter);
  line.add("all_to_all_bytes", m.comm.all_to_all);
  line.add("broadcast_bytes", m.comm.broadcast);
  line.add("p2p_bytes", m.comm.p2p);
  line.open("axes");
  for (const auto& [axis, bytes] : m.axes) line.add(comm::name_of(axis), bytes.payload());
  line.close();
  line.close();
  line.open("io");
  line.add("read_bytes", m.io.read_bytes);
  line.add("write_bytes", m.io.write_bytes);
  line.close();
  return line.finish();
}

MetricsWriter::MetricsWriter(fs::path path, std::int64_t first_step) : path_(std::move(path)) {
  if (first_step > 1) {
    // A pipe or device holds nothing to keep and cannot be replaced.
    if (!fs::exists(path_) || fs::is_regular_file(path_))
      write_file_atomically(path_, lines_before(path_, first_step));
  }
  const int mode = first_step > 1 ? O_APPEND : O_TRUNC;
  descriptor_ = ::open(path_.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC | mode, 0666);
  if (descriptor_ < 0) fail_errno("open", path_);
}

MetricsWriter::~MetricsWriter() {
  ::close(descriptor_);
}

void MetricsWriter::write(const StepMetrics& metrics) {
  const std::string line = to_json(metrics) + '\n';
  for (std::size_t done = 0; done < line.size();) {
    const ssize_t wrote = ::write(descriptor_, line.data() + done, line.size() - done);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) fail_errno("write to", path_);
    done += static_cast<std::size_t>(wrote);
  }
}

}  // namespace sherd::engine
