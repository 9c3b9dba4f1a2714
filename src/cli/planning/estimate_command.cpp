#include <algorithm>
#include <cstdio>
#include <optional>

#include "cli/command_line.h"
#include "cli/planning/estimate_report.h"
#include "cli/program.h"
#include "cli/weights.h"
#include "engine/setup/process_grid.h"
#include "engine/token_data.h"
#include "models/gpt_config.h"
#include "planning/search.h"

namespace sherd::cli {

namespace {

planning::World world_of(const CommandLine& line) {
  constexpr std::int64_t most_gpus = 1024, most_nodes = 100'000;
  if (line.has("ranks")) {
    if (line.has("gpus") || line.has("nodes"))
      throw UsageError("give either --ranks, all on one machine, or --gpus and --nodes");
    const auto ranks = static_cast<int>(line.integer("ranks", 1, most_gpus));
    return {ranks, ranks};
  }
  const auto local = static_cast<int>(line.integer("gpus", 1, most_gpus));
  return {local * static_cast<int>(line.integer("nodes", 1, most_nodes)), local};
}

/// Makes the report look at the rank `chosen`, else at that of the stage that takes most of the device.
void look_at(EstimateReport& report, std::optional<int> chosen) {
  const comm::Grid grid(report.world.ranks, engine::grid_sizes(report.config));
  const auto most = std::max_element(
      report.stages.begin(), report.stages.end(),
      [](const auto& a, const auto& b) { return a.peaks.tiers[0].total_peak < b.peaks.tiers[0].total_peak; });
  report.stage = chosen ? grid.coordinate(comm::Axis::pipeline, *chosen)
                        : static_cast<int>(most - report.stages.begin());
  report.rank = report.stages[static_cast<std::size_t>(report.stage)].rank;
}

/// The time of a step by the rates of a machine that was named, or why there is none.
void price(EstimateReport& report, std::int64_t vocabulary) {
  try {
    report.step_seconds =
        planning::plan_as_is(report.config, report.rates, vocabulary, report.world.ranks).time.seconds;
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::config) throw;
    report.not_priced = error.what();
  }
}

/// Fills in the report, which has its world. `machine`: the file of the machine by whose rates a step is
/// priced; empty: a usual one's.
void fill(EstimateReport& report, const ConfigFiles& files, std::optional<int> chosen,
          const std::string& machine) {
  const auto reparse = [&](const std::vector<std::string>& more) { return files.parse(more); };
  report.config = files.parse();
  if (!report.config.model)
    fail(ErrorKind::config,
         "there is no `model` section: add one to the configuration or give a further --config");
  const std::int64_t vocabulary = engine::vocabulary_size(report.config);
  report.parameters = models::gpt_config(report.config, vocabulary).num_parameters();
  report.machine = planning::this_machine(report.config);
  report.rates =
      machine.empty() ? planning::usual_machine(report.machine.on_gpus) : config::read_machine(machine);
  report.rates = report.rates.with_devices(report.world.local_ranks);
  if (!machine.empty() && report.rates.accelerator() != report.machine.on_gpus)
    fail(ErrorKind::config, "'", report.rates.name, "' ", report.rates.accelerator() ? "has" : "has no",
         " GPUs, and the run is ", report.machine.on_gpus ? "" : "not ",
         "one on GPUs: set device.type to \"cuda\" or \"cpu\", or name another machine");
  report.stages = planning::estimate_stages(report.config, vocabulary, report.world, chosen);
  look_at(report, chosen);
  if (!machine.empty()) price(report, vocabulary);
  report.missing = planning::shortfalls(report.config, report.stages, report.world, report.machine);
  if (!report.missing.empty())
    report.remedy =
        planning::cheapest_remedy(reparse, vocabulary, report.world, report.machine, &report.rates);
}

}  // namespace

CommandLine estimate_line() {
  CommandLine line(
      "estimate",
      "Tells what memory a run will take, by tier, category and rank, and what to change when it does "
      "not fit. The run itself is gone through without data; nothing is computed, allocated or written. Ends "
      "with exit code 3 when the run does not fit.",
      "--config F... [--set a.b.c=V]... [--ranks N | --gpus N --nodes M] [--rank R] [--machine FILE] "
      "[--json]");
  line.list("config", "F", "DeepSpeed-style JSON; later files add sections and override keys")
      .list("set", "a.b.c=V", "override one key, as zero_optimization.stage=3")
      .value("ranks", "N", "ranks, all on one machine, as of 'sherd train'")
      .value("gpus", "N", "ranks on each machine (one per accelerator, or per part of the cores)", "1")
      .value("nodes", "M", "machines", "1")
      .value("rank", "R",
             "the rank to look at; by default one that takes most (all ranks of a pipeline stage and of a "
             "replica have the same totals)")
      .value("machine", "FILE",
             "rates by which a step and the cheapest change are priced ('sherd plan' takes the same)")
      .json()
      .rest_to("config");
  return line;
}

void estimate_command(const CommandLine& line) {
  const ConfigFiles files{line.all("config"), line.all("set")};
  if (files.paths.empty()) throw UsageError("no --config given. See 'sherd estimate --help'");
  EstimateReport report;
  report.world = world_of(line);
  std::optional<int> chosen;
  if (line.has("rank")) {
    const std::int64_t rank = line.integer("rank", 0);
    if (rank >= report.world.ranks)
      throw UsageError(
          cat("--rank ", rank, " is not one of the ", report.world.ranks, " ranks, which count from 0"));
    chosen = static_cast<int>(rank);
  }
  files.in_their_words([&] { fill(report, files, chosen, line.text("machine")); });
  std::fputs((line.has("json") ? json_of(report) : text_of(report)).c_str(), stdout);
  if (!report.missing.empty()) throw Finding{does_not_fit};
}

}  // namespace sherd::cli
