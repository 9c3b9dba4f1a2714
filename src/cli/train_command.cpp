#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <map>

#include "base/arena.h"
#include "base/log.h"
#include "base/text/excerpt.h"
#include "cli/command_line.h"
#include "cli/metrics/plot.h"
#include "cli/program.h"
#include "cli/train_run.h"
#include "cli/weights.h"
#include "comm/tcp/launch_environment.h"
#include "engine/checkpoint/checkpoint.h"
#include "engine/report/gemm_probe.h"
#include "engine/setup/make_device.h"
#include "engine/setup/process_grid.h"

namespace sherd::cli {
namespace {

bool launched() {
  return comm::launcher() != comm::Launcher::none;
}

/// The rate that MFU counts against: on GPUs the sum of their peaks (0: unknown), else what this machine's
/// ranks reach together, times the machines, at least `reached`, which they were seen to reach; that takes
/// 0.1 s unless it is cached.
double machine_rate(const config::Config& config, const engine::GpuSharing& sharing, int ranks,
                    int local_ranks, double reached) {
  if (sharing.gpus > 0) return sharing.peak;
  const int threads = engine::compute_threads(config, local_ranks);
  const int online = std::max(available_cores(), static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN)));
  // A launcher may have bound this rank to a part of the cores on which the machine's ranks run: each has as
  // many.
  const int total = std::min(launched() ? online : available_cores(), threads * local_ranks);
  const int own = std::min(available_cores(), total);
  const double parts = static_cast<double>(total) / own * ((ranks + local_ranks - 1) / local_ranks);
  engine::GemmProbe probe;
  probe.reached = reached / parts;
  return std::max(reached, engine::gemm_rate(own, config.precision.compute, probe).flops_per_second * parts);
}

/// Looks at training.save_dir first, so that a run neither ends at its first checkpoint nor removes those of
/// another run.
void check_save_dir(const TrainRequest& request) {
  const std::string& folder = request.config.training.save_dir;
  if (folder.empty()) return;
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error || ::access(folder.c_str(), W_OK | X_OK) != 0)
    fail(ErrorKind::io, "training.save_dir: checkpoints cannot be written to '", folder, "' (",
         error ? error.message() : std::strerror(errno), "): choose another folder");
  if (!request.resume) engine::require_no_checkpoints(folder, "go on with --resume");
}

bool is_of_data(const config::Data& data, const std::string& file) {
  std::error_code absent;
  for (const config::DataSource& source : data.sources)
    for (const char* ending : {".bin", ".idx", ".json", ".mask", ".model"})
      if (std::filesystem::equivalent(file, source.path + ending, absent)) return true;
  return false;
}

void check(const TrainRequest& request) {
  engine::takes_gpus(request.config);  // throws where it needs one and has none
  const config::Training& training = request.config.training;
  if (training.steps < 1)
    fail(ErrorKind::config, "how long to train is not given: set training.steps or --steps N");
  if (request.resume && training.save_dir.empty())
    fail(ErrorKind::config, "--resume reads training.save_dir, which is not set");
  std::map<std::filesystem::path, std::string> options;  // that write there
  for (const auto& [option, output] : {std::pair{"--metrics", request.metrics},
                                       {"--metrics-textfile", request.metrics_textfile},
                                       {"--plot", request.plot},
                                       {"--trace", request.trace}}) {
    if (output.empty()) continue;
    if (request.config.data && is_of_data(*request.config.data, output))
      fail(ErrorKind::usage, "'", excerpt(output),
           "' belongs to the dataset that is trained on: write to another file");
    const auto [other, first] = options.emplace(std::filesystem::weakly_canonical(output), option);
    if (!first)
      fail(ErrorKind::usage, other->second, " and ", option, " name the same file, '", excerpt(output),
           "': give each its own");
  }
  const auto plot_folder = std::filesystem::path(request.plot).parent_path();
  if (!plot_folder.empty() && !std::filesystem::is_directory(plot_folder))
    fail(ErrorKind::usage, "--plot: the folder '", plot_folder.string(), "' does not exist; create it first");
}

void draw(const TrainRequest& request, const engine::TokenData& data) {
  if (request.plot.empty()) return;
  if (std::error_code unknown; std::filesystem::file_size(request.metrics, unknown) == 0)
    return log_info("there is no loss to draw yet");
  PlotOptions plot;
  if (data.info && data.info->preferences == data::Preferences::none)
    plot.unigram_entropy = data.info->unigram_entropy;
  plot_metrics(request.metrics, request.plot, plot);
  log_info("drew the losses: ", request.plot);
}

/// One rank's part of a run under a launcher. It looks only now at what it needs, so that a rank that lacks
/// something tells the others.
int train_launched(const TrainRequest& request, const DistributedPtr& dist) {
  check(request);
  if (request.resume_or_start)  // of which parts of the configuration depend
    engine::require_same({{"checkpoint that --resume-or-start finds", request.resume ? "one" : "none"}},
                         *dist, ErrorKind::io);
  const auto data = engine::open_token_data(request.config);
  engine::require_same_setup(request.config, *dist);
  engine::require_same_data(*data, *dist);
  const engine::GpuSharing sharing = engine::share_gpus_of_world(request.config, *dist);
  if (dist->rank() == 0 && sharing.ranks_here > 1)
    log_info(counted(dist->world_size(), "rank"), " run on ", counted(sharing.gpus, "GPU"),
             "; rank 0 shares its own with ", counted(sharing.ranks_here - 1, "other"));
  const auto rate = [&](double reached) {
    return machine_rate(request.config, sharing, dist->world_size(), dist->local_size(), reached);
  };
  // The others wait for rank 0 at their first collective.
  const double known = dist->rank() == 0 ? rate(0) : 0;
  // Every rank looks, since machines may differ, and none allocates before all of its machine's have looked.
  planning::require_fit(request.reparse, data->vocab_size, {dist->world_size(), dist->local_size()},
                        planning::this_machine(request.config, sharing));
  check_save_dir(request);
  dist->world().barrier({.label = "memory check", .scalar = true});
  const int signal = TrainRun(dist, request, data, known, rate).run();
  if (dist->rank() == 0) draw(request, *data);
  // A launcher may end all when the first ends with a signal's code.
  dist->world().barrier({.label = "end of training", .scalar = true});
  return signal;
}

int train_local(const TrainRequest& request, const comm::CommOptions& options) {
  check(request);
  const auto data = engine::open_token_data(request.config);
  const int ranks = std::max(request.ranks, 1);
  planning::require_fit(request.reparse, data->vocab_size, {ranks, ranks},
                        planning::this_machine(request.config));
  check_save_dir(request);
  const engine::GpuSharing sharing = engine::share_gpus_locally(request.config, ranks);
  const auto rate = [&](double reached) {
    return machine_rate(request.config, sharing, ranks, ranks, reached);
  };
  const double known = rate(0);  // local ranks wait for nobody: before they start
  std::atomic<int> signal{0};
  launch_ranks(
      ranks, [&](DistributedPtr dist) { signal = TrainRun(dist, request, data, known, rate).run(); },
      options);
  draw(request, *data);
  return signal;
}

/// Reads the configuration and trains to its training.steps, on local ranks or the launcher's, who tell each
/// other what one of them lacks. Returns 0, or the signal that stopped the run, which is saved and reported
/// then as at its end. Throws the first Error of any rank; Error{memory} before anything begins when the run
/// cannot fit.
int train(TrainRequest request) {
  comm::CommOptions options;
  std::exception_ptr unread;  // told to the others, who wait, once they are met
  try {
    request.config = request.reparse({});
    const std::string& folder = request.config.training.save_dir;
    if (request.resume_or_start && folder.empty())
      fail(ErrorKind::config, "--resume-or-start looks into training.save_dir, which is not set: set it");
    // A run that was lost before its first checkpoint there may have local ones: the trainer finds out.
    const bool begun = request.config.training.local_save_interval > 0 && engine::has_begun(folder);
    const bool found = !folder.empty() && (holds_checkpoints(folder) || begun || !request.resume_tag.empty());
    request.resume = request.resume || (request.resume_or_start && found);
    options.timeout_seconds = request.config.parallel.timeout_seconds;
  } catch (const Error&) {
    if (!launched()) throw;
    unread = std::current_exception();
  }
  if (const std::string idle = comm::idle_nodes([](const char* name) { return std::getenv(name); });
      !idle.empty())
    log_warning(idle);
  if (!launched()) return train_local(request, options);
  int signal = 0;
  const auto body = [&](const DistributedPtr& dist) {
    if (unread) std::rethrow_exception(unread);
    signal = train_launched(request, dist);
  };
  try {
    launch_ranks(request.ranks, body, options);
    return signal;
  } catch (const Error&) {
    if (unread) std::rethrow_exception(unread);  // also where the others did not come
    throw;
  }
}

}  // namespace

CommandLine train_line() {
  CommandLine line(
      "train",
      "Trains the model that a configuration describes. SIGINT (Ctrl-C), SIGTERM, SIGHUP and "
      "SIGUSR1 (srun --signal=USR1@60) stop it after a step, saved and reported as at its end, "
      "with exit code 130, 143, 129 and 138.",
      "--config F... [--ranks N] [--set a.b.c=V]... [--steps N] [--metrics F.jsonl] [--metrics-port P] "
      "[--plot F.svg] [--trace F.json] [--resume | --resume-or-start] [--json]");
  line.list("config", "F", "DeepSpeed-style JSON; later files add sections and override keys")
      .value("ranks", "N",
             "local ranks in this process, by default 1; mpirun, srun and torchrun bring their own")
      .list("set", "a.b.c=V", "override one key, as zero_optimization.stage=3")
      .value("steps", "N", "optimizer steps of the whole run; the same as --set training.steps=N")
      .value("metrics", "F.jsonl", "write one JSON object per optimizer step")
      .value("metrics-port", "P",
             "serve them to Prometheus, at http://127.0.0.1:P/metrics of rank 0's machine")
      .value("metrics-address", "ADDR", "the address of that machine to listen on", "127.0.0.1")
      .value("metrics-textfile", "F.prom", "keep them in a file for node_exporter's textfile collector")
      .value("plot", "F.svg", "draw the losses when done; needs --metrics")
      .value("trace", "F.json", "write what each rank did when, for ui.perfetto.dev, and report shares of it")
      .value("fp8-report", "N",
             "train nothing: tell on N micro-batches what FP8 costs each layer, and which to exclude")
      .flag("resume", "go on from the latest checkpoint in training.save_dir")
      .flag("resume-or-start",
            "as --resume where there is a checkpoint, else begin: one command for every start")
      .value("tag", "TAG", "with --resume: from this checkpoint instead of the latest")
      .json()
      .rest_to("config");
  return line;
}

void train_command(const CommandLine& line) {
  if (line.all("config").empty()) throw UsageError("no --config given. See 'sherd train --help'");
  if (line.has("plot") && !line.has("metrics"))
    throw UsageError("--plot draws what --metrics wrote: give both");
  if (line.has("metrics-address") && !line.has("metrics-port"))
    throw UsageError("--metrics-address says where --metrics-port listens: give both");
  if (line.has("metrics-textfile") && !line.text("metrics-textfile").ends_with(".prom"))
    throw UsageError("--metrics-textfile needs a name that ends in .prom: node_exporter reads no others");
  if (line.has("tag") && !line.has("resume") && !line.has("resume-or-start"))
    throw UsageError("--tag names a checkpoint to --resume from: give both");
  if (line.has("resume") && line.has("resume-or-start"))
    throw UsageError(
        "--resume needs a checkpoint, and --resume-or-start begins without one: give one of them");
  for (const char* output : {"metrics", "metrics-textfile", "plot", "trace"})
    for (const std::string& config : line.all("config")) line.require_apart(output, "config", config);
  ConfigFiles files{line.all("config"), line.all("set"), line.has("resume") || line.has("resume-or-start")};
  if (line.has("steps"))
    files.overrides.push_back("training.steps=" + std::to_string(line.integer("steps", 1)));
  TrainRequest request;
  if (line.has("fp8-report")) {
    request.fp8_report = line.integer("fp8-report", 1, 1000);
    for (const char* output : {"metrics", "metrics-port", "metrics-textfile", "plot", "trace", "json"})
      if (line.has(output))
        throw UsageError(cat("--", output, " tells of training, and --fp8-report does not train"));
    files.overrides.insert(files.overrides.end(), {"fp8.enabled=true", "fp8.gather=false"});
  }
  request.reparse = [files](const std::vector<std::string>& more) { return files.parse(more); };
  if (line.has("ranks")) request.ranks = static_cast<int>(line.integer("ranks", 1, 1024));
  request.metrics = line.text("metrics");
  if (line.has("metrics-port"))
    request.metrics_port = static_cast<int>(line.integer("metrics-port", 1, 65535));
  request.metrics_address = line.text("metrics-address");
  request.metrics_textfile = line.text("metrics-textfile");
  request.plot = line.text("plot");
  request.trace = line.text("trace");
  request.resume = line.has("resume");
  request.resume_or_start = line.has("resume-or-start");
  request.resume_tag = line.text("tag");
  request.json = line.has("json");
  int signal = 0;
  files.in_their_words([&] { signal = train(std::move(request)); });
  if (signal != 0) throw Finding{stopped_by(signal)};
}

}  // namespace sherd::cli
