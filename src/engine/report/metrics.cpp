#include "engine/report/metrics.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "base/error.h"
#include "base/files.h"
#include "engine/report/log_files.h"
#include "engine/report/report.h"

namespace sherd::engine {
namespace fs = std::filesystem;
namespace {

/// Builds one flat JSON object whose keys need no escaping.
class JsonLine {
 public:
  template <class T>
  void add(std::string_view key, const T& value) {
    begin(key);
    put(value);
  }
  void open(std::string_view key) { begin(key), text_ += '{', first_ = true; }
  void close() { text_ += '}', first_ = false; }
  std::string finish() { return text_ + '}'; }

 private:
  void begin(std::string_view key) {
    if (!std::exchange(first_, false)) text_ += ',';
    text_ += nlohmann::json(key).dump() + ':';
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
  void put(std::uint64_t value) { text_ += std::to_string(value); }
  void put(bool value) { text_ += value ? "true" : "false"; }
  void put(const std::string& text) { text_ += nlohmann::json(text).dump(); }
  void put(double value) { text_ += std::isfinite(value) ? exact(value) : "null"; }
  std::string text_ = "{";
  bool first_ = true;
};

bool is_metrics(const nlohmann::json& object) {
  return object.is_object() && object.contains("step") && object["step"].is_number_integer();
}

[[noreturn]] void refuse(const fs::path& path, std::int64_t line, const StepFileWords& words) {
  fail(ErrorKind::data, "line ", line, " of '", path.string(), "' is not a line of ", words.lines, ". ",
       words.advice);
}

/// The lines of `path` that belong to steps before `first_step`. A last line without its newline is what a
/// crash left.
std::string lines_before(const fs::path& path, std::int64_t first_step, const StepFileWords& words) {
  std::ifstream in(path, std::ios::binary);
  if (!in) return "";
  std::string kept, line;
  for (std::int64_t number = 1; std::getline(in, line) && !in.eof(); ++number) {
    const auto object = nlohmann::json::parse(line, nullptr, false);
    if (!is_metrics(object)) refuse(path, number, words);
    if (object["step"].get<std::int64_t>() < first_step) kept += line, kept += '\n';
  }
  return kept;
}

/// A run that begins anew replaces metrics of another, and no other file.
void require_metrics(const fs::path& path, const StepFileWords& words) {
  std::error_code absent;
  if (!fs::is_regular_file(path, absent)) return;
  std::ifstream in(path, std::ios::binary);
  std::string line;
  if (std::getline(in, line) && !in.eof() && !is_metrics(nlohmann::json::parse(line, nullptr, false)))
    refuse(path, 1, words);
}

using Experts = std::vector<std::pair<std::string, parallel::RoutingTotals>>;

void add_experts(JsonLine& line, const Experts& layers, const RoutingMeans& means) {
  if (layers.empty()) return;
  std::vector<std::string> names;
  std::vector<double> imbalance, dropped;
  std::vector<std::vector<std::int64_t>> tokens;
  for (const auto& [name, layer] : layers) {
    names.push_back(name), tokens.push_back(layer.per_expert);
    imbalance.push_back(layer.imbalance()), dropped.push_back(layer.dropped_share());
  }
  line.open("moe");
  line.add("balance_loss", means.balance);
  line.add("z_loss", means.z);
  line.add("layers", names);
  line.add("imbalance", imbalance);
  line.add("dropped", dropped);
  line.add("tokens", tokens);
  line.close();
}

/// Each rank's where they are few, else what bounds them.
void add_ranks(JsonLine& line, const std::vector<RankTimes>& ranks) {
  constexpr std::size_t most_listed = 16;
  if (ranks.empty()) return;
  const auto add = [&](std::string_view key, const auto& value) {
    std::vector<double> values;
    for (const RankTimes& each : ranks) values.push_back(std::round(value(each) * 1e3) / 1e3);
    if (ranks.size() <= most_listed) return line.add(key, values);
    line.open(key);
    line.add("slowest", std::int64_t{std::max_element(values.begin(), values.end()) - values.begin()});
    std::sort(values.begin(), values.end());
    line.add("min", values.front());
    line.add("median", values[(values.size() - 1) / 2]);
    line.add("max", values.back());
    line.close();
  };
  line.open("ranks");
  add("compute_ms", [](const RankTimes& each) { return double{each.own()}; });
  add("wait_ms", [](const RankTimes& each) { return double{each.wait}; });
  add("data_ms", [](const RankTimes& each) { return double{each.parts[RankTimes::data]}; });
  add("nvme_ms", [](const RankTimes& each) { return double{each.parts[RankTimes::storage]}; });
  line.close();
}

}  // namespace

RoutingMeans routing_means(const StepMetrics& metrics) {
  RoutingMeans means;
  const auto layers = static_cast<double>(metrics.experts.size());
  for (const auto& [name, layer] : metrics.experts) {
    const double of_all = static_cast<double>(layer.micro_batches) * layers;
    means.balance += layer.balance / of_all, means.z += layer.z / of_all;
    means.dropped += layer.dropped_share() / layers;
  }
  return means;
}

std::string to_json(const StepMetrics& m) {
  constexpr double unknown = std::numeric_limits<double>::quiet_NaN();
  JsonLine line;
  line.add("step", m.step);
  line.add("loss", m.loss);
  if (!m.objective.empty()) {
    line.open("objective");
    for (const auto& [name, value] : m.objective) line.add(name, value);
    line.close();
  }
  if (m.val_loss) line.add("val_loss", *m.val_loss);
  if (!m.metrics.empty()) {
    line.open("metrics");
    for (const auto& [name, value] : m.metrics) line.add(name, value);
    line.close();
  }
  line.add("lr", m.lr);
  if (m.lrs.size() > 1) line.add("lrs", m.lrs);
  line.add("grad_norm", m.grad_norm);
  line.add("loss_scale", m.loss_scale);
  line.add("skipped", m.skipped);
  line.add("tokens", m.tokens);
  line.add("step_ms", m.step_ms);
  line.add("tokens_per_s", m.tokens_per_s);
  line.add("mfu", m.mfu.value_or(unknown));
  add_experts(line, m.experts, routing_means(m));
  if (m.fp8) {
    line.open("fp8");
    line.add("to_zero", m.fp8->to_zero);
    line.add("not_finite", m.fp8->not_finite);
    line.close();
  }
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
  line.add("read_bytes", m.io.read);
  line.add("write_bytes", m.io.written);
  line.close();
  add_ranks(line, m.ranks);
  return line.finish();
}

MetricsWriter::MetricsWriter(fs::path path, std::int64_t first_step, const StepFileWords& words) {
  // A pipe or device holds nothing to keep and cannot be replaced.
  if (first_step <= 1)
    require_metrics(path, words);
  else if (!fs::exists(path) || fs::is_regular_file(path))
    write_file_atomically(path, lines_before(path, first_step, words));
  file_ = std::make_unique<AppendFile>(std::move(path), first_step > 1, words.what);
}

MetricsWriter::~MetricsWriter() = default;

void MetricsWriter::write(const std::string& line) {
  file_->write(line + '\n');
}

void MetricsWriter::sync() {
  file_->sync();
}

}  // namespace sherd::engine
