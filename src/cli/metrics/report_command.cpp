#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "base/files.h"
#include "base/log.h"
#include "base/text/excerpt.h"
#include "cli/command_line.h"
#include "cli/metrics/report_page.h"
#include "cli/program.h"
#include "cli/weights.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/manifest.h"
#include "engine/report/report.h"
#include "engine/report/step_record.h"

namespace sherd::cli {
namespace {

namespace fs = std::filesystem;

/// Adds what the newest checkpoint of the run tells.
void add_checkpoint(const fs::path& run, ReportContent& content) {
  if (!holds_checkpoints(run.string())) {
    content.remarks.push_back("The run has saved no checkpoint yet: its configuration is not known here.");
    return;
  }
  const fs::path folder = engine::checkpoint_folder(run);
  const fs::path file = folder / "manifest.json";
  const engine::Manifest manifest = engine::Manifest::from_json(read_file(file), file);
  std::int64_t parameters = 0;
  for (const auto& [name, shape] : manifest.shapes) {
    std::int64_t numel = 1;
    for (const std::int64_t extent : shape) numel *= extent;
    parameters += numel;
  }
  std::string ranks = counted(manifest.world_size, "rank");
  for (const auto& [axis, size] : manifest.grid)
    if (size > 1) ranks += cat(", ", axis, " ", size);
  ReportContent::Facts& facts = content.facts;
  facts.emplace_back("Newest checkpoint", cat(folder.filename().string(), ", by ", ranks));
  facts.emplace_back("Parameters", cat(engine::human_count(static_cast<double>(parameters)), ", computed in ",
                                       manifest.compute_dtype));
  if (!manifest.data.tokenizer.empty())
    facts.emplace_back("Tokenizer", cat(manifest.data.tokenizer, ", ", manifest.data.vocab_size, " ids"));
  content.config = nlohmann::ordered_json::parse(manifest.config).dump(2);
}

/// Adds what the record of the run's steps tells of its machine, and gives the steps themselves.
Metrics add_record(const fs::path& run, ReportContent& content) {
  const engine::RecordedSteps record = engine::RecordedSteps::read(run);
  Metrics out;
  for (const engine::RecordedSteps::Step& step : record.steps) {
    std::vector<std::pair<std::string, double>> values;
    if (step.loss) values.emplace_back("loss", *step.loss);
    if (step.grad_norm) values.emplace_back("grad_norm", *step.grad_norm);
    out.add(step.step, values);
  }
  if (record.starts.empty()) return out;
  const engine::RunFacts& last = record.starts.back().facts;
  ReportContent::Facts& facts = content.facts;
  facts.emplace_back("Sherd", last.version);
  facts.emplace_back("Device", cat(last.device, ", ", last.instruction_set));
  facts.emplace_back("Products by", last.libraries);
  facts.emplace_back("Ranks",
                     cat(last.ranks, " (", last.world, "), ", counted(last.threads, "thread"), " each"));
  if (record.starts.size() > 1) facts.emplace_back("Starts of the run", std::to_string(record.starts.size()));
  return out;
}

/// Lines of JSON with a prompt and what a model wrote, as `sherd generate --output` has them.
ReportContent::Facts read_samples(const fs::path& path) {
  constexpr std::size_t most = 50;
  std::ifstream in(path, std::ios::binary);
  if (!in) fail(ErrorKind::io, "cannot open the samples '", path.string(), "'; check the path");
  ReportContent::Facts out;
  std::string line;
  for (std::int64_t row = 1; out.size() < most && std::getline(in, line); ++row) {
    const auto object = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (!object.is_object() || !object.contains("completion")) {
      if (in.eof()) break;  // the last line is still being written
      fail(ErrorKind::data, "line ", row, " of '", path.string(),
           "' is no sample: give what `sherd generate --prompts … --output` wrote");
    }
    const auto text = [&](const char* key) {
      const auto found = object.find(key);
      return found == object.end() ? std::string()
             : found->is_string()  ? found->get<std::string>()
                                   : found->dump();
    };
    out.emplace_back(object.contains("messages") ? text("messages") : text("prompt"), text("completion"));
  }
  return out;
}

struct ReportRequest {
  fs::path run, metrics;  ///< either may be empty
  fs::path samples, output;
};

ReportRequest request_of(const CommandLine& line) {
  const std::vector<std::string> given = line.all("run");
  if (given.size() != 1)
    throw UsageError("give one RUN (its training.save_dir) or metrics file. See 'sherd report --help'");
  ReportRequest out{.output = line.required("output")};
  std::error_code error;
  if (fs::is_directory(given[0], error)) {
    out.run = given[0], out.metrics = line.text("metrics");
    if (out.metrics.empty() && fs::exists(out.run / "metrics.jsonl", error))
      out.metrics = out.run / "metrics.jsonl";
  } else if (line.has("metrics")) {
    throw UsageError(cat("'", excerpt(given[0]),
                         "' is no folder, and --metrics belongs to a run's: name its "
                         "training.save_dir, or the metrics file alone"));
  } else {
    out.metrics = given[0];
  }
  out.samples = line.text("samples");
  if (out.samples.empty() && !out.run.empty() && fs::exists(out.run / "samples.jsonl", error))
    out.samples = out.run / "samples.jsonl";
  for (const fs::path& read : {out.metrics, out.samples})
    if (!read.empty())
      line.require_apart("output", read == out.metrics ? "metrics" : "samples", read.string());
  return out;
}

}  // namespace

CommandLine report_line() {
  CommandLine line(
      "report",
      "Writes one HTML file about a run, also one under way: losses, rates, memory, traffic, experts, "
      "configuration and machine. It needs no network and no program but a browser.",
      "RUN|METRICS.jsonl --output FILE.html [--metrics F.jsonl] [--samples F.jsonl] [--title TEXT]");
  line.list("run", "RUN", "a run's training.save_dir, or a file that `sherd train --metrics` wrote")
      .value("output", "FILE.html", "where the page goes")
      .value("metrics", "F.jsonl",
             "the metrics file of RUN; by default RUN/metrics.jsonl, else the run's own record of losses")
      .value("samples", "F.jsonl",
             "show these texts, as `sherd generate --output` wrote them; by default RUN/samples.jsonl")
      .value("title", "TEXT", "the page's title; by default the run's name")
      .rest_to("run");
  return line;
}

void report_command(const CommandLine& line) {
  const ReportRequest request = request_of(line);
  ReportContent content;
  Metrics recorded;
  if (!request.run.empty()) {
    recorded = add_record(request.run, content);
    add_checkpoint(request.run, content);
  }
  const fs::path& named = request.run.empty() ? request.metrics : request.run;
  content.title = line.has("title") ? line.text("title") : cat("Run ", named.lexically_normal().string());
  if (!request.samples.empty()) content.samples = read_samples(request.samples);
  if (request.metrics.empty()) {
    if (recorded.empty())
      fail(ErrorKind::io, "'", request.run.string(),
           "' holds no metrics.jsonl and no step in steps.jsonl: name the "
           "file that `sherd train --metrics` wrote with --metrics");
    content.remarks.push_back(
        "There is no metrics file beside the run: losses and gradient norms are from its record of steps. "
        "Rates, "
        "memory and traffic are in what `sherd train --metrics` writes; name it with --metrics.");
    write_file_atomically(request.output, report_page(recorded, content));
  } else {
    const MetricsFile file = read_metrics(request.metrics);
    if (file.metrics().empty())
      fail(ErrorKind::data, "'", request.metrics.string(),
           "' holds no step yet: write the report again when the run has done one");
    content.last_line = file.last_line();
    write_file_atomically(request.output, report_page(file.metrics(), content));
  }
  log_info("wrote ", request.output.string());
}

}  // namespace sherd::cli
