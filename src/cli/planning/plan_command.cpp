#include <cstdio>

#include "cli/command_line.h"
#include "cli/planning/plan_report.h"
#include "cli/planning/plan_request.h"
#include "cli/program.h"
#include "engine/token_data.h"
#include "models/gpt_config.h"

namespace sherd::cli {

namespace {

/// Prints the time that generation takes on one machine, for each number of ranks that can share the model.
void plan_generation(const PlanRequest& request, const CommandLine& line) {
  const std::vector<std::int64_t> batches = line.amounts("batch-sizes", 1, 1000);
  planning::GenerationShape shape;
  shape.prompt = line.integer("prompt-tokens", 1), shape.tokens = line.integer("max-tokens", 1);
  std::vector<planning::GenerationTime> times;
  request.files.in_their_words([&] {
    const config::Config config = request.configuration();
    const std::int64_t vocabulary = engine::vocabulary_size(config);
    for (const int tensor : planning::tensor_ranks(config, request.machine, vocabulary))
      for (const std::int64_t batch : batches) {
        shape.batch = batch;
        times.push_back(planning::generation_time(config, request.machine, vocabulary, tensor, shape));
      }
  });
  std::fputs((line.has("json") ? json_of(times) : text_of(times, request.machine, shape)).c_str(), stdout);
}

void check_as_is(const CommandLine& line) {
  for (const char* of_search : {"global-batch", "output"})
    if (line.has("as-is") && line.has(of_search))
      throw UsageError(
          cat("--as-is searches nothing, so --", of_search, " has no effect: leave one of them out"));
}

/// Fills in what is found.
void find_plans(const PlanRequest& request, bool as_is, PlanReport& report) {
  const config::Config config = request.configuration();
  const std::int64_t vocabulary = engine::vocabulary_size(config);
  report.parameters = models::gpt_config(config, vocabulary).num_parameters();
  if (!as_is) {
    report.result = request.search();
    return;
  }
  report.result.best = {planning::plan_as_is(config, report.machine, vocabulary, report.ranks)};
  report.result.tried = 1;
}

}  // namespace

CommandLine plan_line() {
  CommandLine line(
      "plan",
      "Finds the layout of ranks with which a model trains best on a machine: tensor, context, pipeline, "
      "expert and data parallelism, chunks, micro-batch, ZeRO stage and recompute. Nothing runs: steps are "
      "simulated from the machine's rates, and what does not fit by the exact estimate is left out. Keys "
      "that the configuration gives stay as they are. Ends with exit code 3 when nothing fits.",
      "--config F... [--set a.b.c=V]... --machine FILE [--nodes M] [--gpus N] [--goal G] [--global-batch N] "
      "[--tokens N] [--top K] [--output FILE] [--as-is] [--json]; or --generate "
      "[--batch-sizes N,...] [--prompt-tokens N] [--max-tokens N]");
  PlanRequest::declare(line, "10", "time|tokens_per_day|memory|fewest_gpus");
  line.value("tokens", "N", "tells days and GPU-hours for so many tokens, as 300G")
      .value("output", "FILE", "writes the best as a configuration that 'sherd train' takes")
      .flag("as-is", "tells the time of the configuration as it is, and searches nothing")
      .flag("generate",
            "tells of generation instead: latency and tokens per second by batch and tensor ranks")
      .value("batch-sizes", "N,...", "with --generate: texts that are continued together", "1,4,16,64")
      .value("prompt-tokens", "N", "with --generate: of each text", "512")
      .value("max-tokens", "N", "with --generate: that follow each", "128")
      .json();
  return line;
}

void plan_command(const CommandLine& line) {
  const PlanRequest request = PlanRequest::of(line, "plan");
  check_as_is(line);
  for (const char* of_training : {"nodes", "goal", "global-batch", "top", "tokens", "output", "as-is"})
    if (line.has("generate") && line.has(of_training))
      throw UsageError(cat("--generate tells of one machine and no training: leave --", of_training, " out"));
  if (line.has("generate")) return plan_generation(request, line);
  for (const char* of_generation : {"batch-sizes", "prompt-tokens", "max-tokens"})
    if (line.has(of_generation))
      throw UsageError(cat("--", of_generation, " belongs to --generate: give both"));
  PlanReport report;
  report.machine = request.machine;
  report.ranks = request.options.ranks, report.goal = request.options.goal;
  if (line.has("tokens")) report.tokens = static_cast<double>(line.amount("tokens", 1, 1000));
  request.files.in_their_words([&] { find_plans(request, line.has("as-is"), report); });
  const std::string path = line.has("output") ? line.text("output") : "";
  const bool fits = !report.result.best.empty() && report.result.best.front().lacks.empty();
  if (fits && !path.empty()) {
    request.write(report.result.best.front(), path);
    report.written = path;
  }
  std::fputs((line.has("json") ? json_of(report) : text_of(report)).c_str(), stdout);
  if (!fits) throw Finding{does_not_fit};
}

}  // namespace sherd::cli
