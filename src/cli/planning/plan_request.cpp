#include "cli/planning/plan_request.h"

#include <algorithm>
#include <set>

#include "base/error.h"
#include "base/files.h"
#include "base/text/excerpt.h"
#include "engine/token_data.h"

namespace sherd::cli {
namespace {

planning::Goal goal_of(const CommandLine& line, const std::string& command) {
  const std::vector<std::string> goals{"time", "tokens_per_day", "memory", "fewest_gpus"};
  const std::string goal = line.text("goal");
  for (std::size_t i = 0; i < goals.size(); ++i)
    if (goal == goals[i]) return static_cast<planning::Goal>(i);
  throw UsageError(
      cat("unknown goal '", excerpt(goal), "'; ", suggest(goal, goals), " See 'sherd ", command, " --help'"));
}

}  // namespace

void PlanRequest::declare(CommandLine& line, const std::string& top, const std::string& goals) {
  line.list("config", "F", "DeepSpeed-style JSON; later files add sections and override keys")
      .list("set", "a.b.c=V", "override one key, as zero_optimization.stage=3")
      .value("machine", "FILE", "the machine's rates (configs/machines/, or 'sherd bench machine')")
      .value("nodes", "M", "machines, all of whose places are taken (with --goal fewest_gpus at most)", "1")
      .value("gpus", "N", "ranks on each; by default as many as a machine has place for")
      .value("goal", goals, "what counts", "time")
      .value("global-batch", "N", "sequences of a step, whatever train_batch_size says")
      .value("top", "K", "how many layouts", top)
      .rest_to("config");
}

PlanRequest PlanRequest::of(const CommandLine& line, const std::string& command) {
  constexpr std::int64_t most_top = 1000, most_gpus = 1024, most_nodes = 100'000;
  PlanRequest out{
      .files = {line.all("config"), line.all("set")}, .machine = {}, .whole_machine = {}, .options = {}};
  if (out.files.paths.empty()) throw UsageError(cat("no --config given. See 'sherd ", command, " --help'"));
  out.machine = out.whole_machine = config::read_machine(line.required("machine"));
  if (line.has("gpus")) {
    const std::int64_t gpus = line.integer("gpus", 1, most_gpus);
    if (out.machine.accelerator() && gpus > out.machine.devices)
      fail(ErrorKind::config, "--gpus ", gpus, ": '", out.machine.name, "' has ", out.machine.devices,
           "; say how many machines with --nodes");
    out.machine = out.machine.with_devices(gpus);
  }
  out.options.ranks = static_cast<int>(out.machine.devices * line.integer("nodes", 1, most_nodes));
  out.options.goal = goal_of(line, command);
  out.options.top = static_cast<std::size_t>(line.integer("top", 1, most_top));
  if (line.has("global-batch")) out.options.global_batch = line.integer("global-batch", 1);
  return out;
}

config::Config PlanRequest::configuration() const {
  config::Config config = files.parse();
  if (!config.model)
    fail(ErrorKind::config,
         "there is no `model` section: add one to the configuration or give a further --config");
  return config;
}

planning::SearchResult PlanRequest::search() const {
  const std::set<std::string> given = config::given_keys(files.paths, files.overrides);
  return planning::search([&](const std::vector<std::string>& more) { return files.parse(more); },
                          [&](const std::string& key) { return given.contains(key); }, machine,
                          engine::vocabulary_size(configuration()), options);
}

std::vector<std::string> PlanRequest::overrides(const planning::Plan& plan) {
  std::vector<std::string> out;
  for (const auto& [key, value] : plan.keys()) out.push_back(cat(key, "=", value));
  return out;
}

void PlanRequest::write(const planning::Plan& plan, const std::string& path,
                        const std::vector<std::string>& more) const {
  std::vector<std::string> all = overrides(plan);
  all.insert(all.end(), more.begin(), more.end());
  write_file_atomically(path, config::dump(files.parse(all)) + "\n");
}

}  // namespace sherd::cli
