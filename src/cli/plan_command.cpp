#include <algorithm>
#include <cstdio>
#include <fstream>
#include <set>

#include "base/error.h"
#include "base/excerpt.h"
#include "cli/command_line.h"
#include "cli/plan_report.h"
#include "cli/program.h"
#include "cli/weights.h"
#include "engine/token_data.h"
#include "models/gpt_config.h"

namespace sherd::cli {

namespace {

planning::Goal goal_of(const CommandLine& line) {
  const std::vector<std::string> goals{"time", "tokens_per_day", "memory", "fewest_gpus"};
  const std::string goal = line.text("goal");
  for (std::size_t i = 0; i < goals.size(); ++i)
    if (goal == goals[i]) return static_cast<planning::Goal>(i);
  throw UsageError(
      cat("unknown goal '", excerpt(goal), "'; ", suggest(goal, goals), " See 'sherd plan --help'"));
}

/// The configuration of the best plan, as `sherd train` takes it.
void write_configuration(const std::string& path, const ConfigFiles& files, const planning::Plan& plan) {
  std::vector<std::string> overrides;
  for (const auto& [key, value] : plan.keys()) overrides.push_back(cat(key, "=", value));
  std::ofstream out(path);
  out << config::dump(files.parse(overrides)) << '\n';
  if (!out.flush())
    fail(ErrorKind::io, "cannot write ", excerpt(path, 300), "; check the path and its permissions");
}

/// The machine with `gpus` ranks on each: links inside of it join no more.
config::Machine with_ranks(config::Machine machine, std::int64_t gpus) {
  for (config::Link& link : machine.links)
    if (link.ranks > 0 && link.ranks <= machine.devices) link.ranks = std::min(link.ranks, gpus);
  machine.devices = gpus;
  return machine;
}

CommandLine plan_line() {
  CommandLine line(
      "plan",
      "Finds the layout of ranks with which a model trains best on a machine: tensor, context, pipeline, "
      "expert and data parallelism, chunks, micro-batch, ZeRO stage and recompute. Nothing runs: steps are "
      "simulated from the machine's rates, and what does not fit by the exact estimate is left out. Keys "
      "that "
      "the configuration gives stay as they are. Ends with exit code 3 when nothing fits.",
      "--config F... [--set a.b.c=V]... --machine FILE [--nodes M] [--gpus N] [--goal G] [--global-batch N] "
      "[--tokens N] [--top K] [--output FILE] [--as-is] [--json]");
  line.list("config", "F", "DeepSpeed-style JSON; later files add sections and override keys")
      .list("set", "a.b.c=V", "override one key, as zero_optimization.stage=3")
      .value("machine", "FILE", "the machine's rates (configs/machines/, or 'sherd bench machine')")
      .value("nodes", "M", "machines; with --goal fewest_gpus the most", "1")
      .value("gpus", "N", "ranks on each; by default as many as a machine has place for")
      .value("goal", "G", "time, tokens_per_day, memory or fewest_gpus", "time")
      .value("global-batch", "N", "sequences of a step, whatever train_batch_size says")
      .value("tokens", "N", "tells days and GPU-hours for so many tokens, as 300G")
      .value("top", "K", "how many layouts to show", "10")
      .value("output", "FILE", "writes the best as a configuration that 'sherd train' takes")
      .flag("as-is", "tells the time of the configuration as it is, and searches nothing")
      .flag("json", "print one JSON object")
      .rest_to("config");
  return line;
}

planning::SearchOptions options_of(const CommandLine& line, const PlanReport& report) {
  constexpr std::int64_t most_top = 1000;
  for (const char* of_search : {"global-batch", "output"})
    if (line.has("as-is") && line.has(of_search))
      throw UsageError(
          cat("--as-is searches nothing, so --", of_search, " has no effect: leave one of them out"));
  planning::SearchOptions options{.ranks = report.ranks, .goal = report.goal};
  options.top = static_cast<std::size_t>(line.integer("top", 1, most_top));
  if (line.has("global-batch")) options.global_batch = line.integer("global-batch", 1);
  return options;
}

/// Fills in what is found for the configuration of `files`.
void find_plans(const ConfigFiles& files, const CommandLine& line, const planning::SearchOptions& options,
                PlanReport& report) {
  const config::Config config = files.parse();
  if (!config.model)
    fail(ErrorKind::config,
         "there is no `model` section: add one to the configuration or give a further --config");
  const std::int64_t vocabulary = engine::vocabulary_size(config);
  report.parameters = models::gpt_config(config, vocabulary).num_parameters();
  if (line.has("as-is")) {
    report.result.best = {planning::plan_as_is(config, report.machine, vocabulary, report.ranks)};
    report.result.tried = 1;
    return;
  }
  const std::set<std::string> given = config::given_keys(files.paths, files.overrides);
  report.result = planning::search([&](const std::vector<std::string>& more) { return files.parse(more); },
                                   [&](const std::string& key) { return given.contains(key); },
                                   report.machine, vocabulary, options);
}

}  // namespace

void plan_command(const Arguments& arguments) {
  CommandLine line = plan_line();
  if (!line.parse(arguments)) return;
  const ConfigFiles files{line.all("config"), line.all("set")};
  if (files.paths.empty()) throw UsageError("no --config given. See 'sherd plan --help'");
  constexpr std::int64_t most_gpus = 1024, most_nodes = 100'000;
  PlanReport report;
  report.machine = config::read_machine(line.required("machine"));
  if (line.has("gpus")) report.machine = with_ranks(report.machine, line.integer("gpus", 1, most_gpus));
  report.ranks = static_cast<int>(report.machine.devices * line.integer("nodes", 1, most_nodes));
  report.goal = goal_of(line);
  if (line.has("tokens")) report.tokens = static_cast<double>(line.amount("tokens", 1, 1000));
  const planning::SearchOptions options = options_of(line, report);
  files.in_their_words([&] { find_plans(files, line, options, report); });
  const std::string path = line.has("output") ? line.text("output") : "";
  if (!report.result.best.empty()) report.written = path;
  std::fputs((line.has("json") ? json_of(report) : text_of(report)).c_str(), stdout);
  if (report.result.best.empty() || !report.result.best.front().lacks.empty()) throw Finding{does_not_fit};
  if (!path.empty()) write_configuration(path, files, report.result.best.front());
}

}  // namespace sherd::cli
