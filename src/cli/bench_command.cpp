#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "base/arena.h"
#include "base/error.h"
#include "base/terminal.h"
#include "base/text/excerpt.h"
#include "bench/suite/adam_bench.h"
#include "bench/suite/comm_bench.h"
#include "bench/suite/gemm_bench.h"
#include "bench/suite/machine_bench.h"
#include "bench/suite/nvme_bench.h"
#include "cli/command_line.h"
#include "cli/program.h"
#include "config/config.h"
#include "engine/report/machine.h"
#include "engine/setup/make_device.h"
#include "engine/stop_signals.h"

namespace sherd::cli {
namespace {

constexpr std::int64_t thousand = 1000, kibi = 1024;

/// An int, however large the number on the command line.
int small(std::int64_t value) {
  return static_cast<int>(std::min<std::int64_t>(value, std::numeric_limits<int>::max()));
}

CommandLine bench_line(const std::string& bench, const std::string& summary, const std::string& synopsis,
                       const std::string& rounds) {
  CommandLine line("bench " + bench, summary, synopsis + " [--rounds R] [--json]");
  line.value("rounds", "R", "how often everything is measured in turn", rounds).json();
  return line;
}

int rounds_of(const CommandLine& line) {
  return small(line.integer("rounds", 1));
}

void print(const bench::BenchReport& report, const CommandLine& line) {
  std::fputs((line.has("json") ? bench::as_json(report) : bench::as_table(report)).c_str(), stdout);
}

/// Runs measure() and adds to its report how much others disturbed it.
template <class Measure>
bench::BenchReport watched(Measure&& measure) {
  const engine::ProcessorTimes before = engine::processor_times();
  bench::BenchReport report = measure();
  const double others = engine::share_of_others(before, engine::processor_times());
  report.facts.push_back({"cpu_share_of_others", "", others});
  if (others > 0.05)
    report.notes.push_back(cat("other programs took ", static_cast<int>(std::lround(others * 100)),
                               " % of the processor time meanwhile: measure again without them"));
  return report;
}

/// Shows on a terminal what is measured now.
class Status {
 public:
  explicit Status(std::string bench) : bench_(std::move(bench)) {}
  bench::Tell tell() {
    return [this](const std::string& what) { line_.show(cat("bench ", bench_, ": ", what)); };
  }

 private:
  std::string bench_;
  StatusLine line_{STDERR_FILENO};
};

/// Prints what measure(tell) reports.
template <class Measure>
void run_bench(const CommandLine& line, const char* bench, const Measure& measure) {
  print(watched([&] {
          Status status(bench);
          return measure(status.tell());
        }),
        line);
}

CommandLine adam_line() {
  CommandLine line =
      bench_line("adam", "Measures the fused AdamW step against the machine's memory bandwidth.",
                 "[--parameters N] [--threads T]", "9");
  line.value("parameters", "N", "parameters per step; 28 bytes of memory each. Far more than the caches hold",
             "50M")
      .value("threads", "T", "compute threads", std::to_string(available_cores()));
  return line;
}

void bench_adam(const CommandLine& line) {
  const std::int64_t asked = line.amount("parameters", 64, thousand), parameters = asked / 64 * 64;
  const int threads = small(line.integer("threads", 1)), rounds = rounds_of(line);
  bench::require_memory(static_cast<double>(parameters) * bench::AdamBench::memory_per_parameter,
                        "Choose fewer --parameters");
  run_bench(line, "adam",
            [&](const bench::Tell& tell) { return bench::measure_adam(parameters, threads, rounds, tell); });
}

std::vector<offload::StoreOptions::Backend> backends_of(const CommandLine& line) {
  using Backend = offload::StoreOptions::Backend;
  std::vector<Backend> backends;
  std::istringstream names(line.required("backend") + ',');
  for (std::string name; std::getline(names, name, ',');)
    if (name == "auto")
      backends.push_back(Backend::automatic);
    else if (name == "io_uring")
      backends.push_back(Backend::io_uring);
    else if (name == "threads")
      backends.push_back(Backend::threads);
    else
      throw UsageError(cat("--backend takes auto, io_uring and threads, not '", excerpt(name),
                           "'. See 'sherd bench nvme --help'"));
  return backends;
}

CommandLine nvme_line() {
  CommandLine line = bench_line(
      "nvme", "Measures the offload store against the disk it lies on.",
      "--path DIR [--bytes N] [--block-size B,...] [--queue-depth D,...] [--backend X,...] [--threads T,...]",
      "5");
  line.value("path", "DIR", "a folder on the disk; what is written there goes again")
      .value("bytes", "N", "size of the file, and bytes of each timed run", "512M")
      .value("block-size", "B,...", "bytes of one request (aio.block_size); several are compared", "1M")
      .value("queue-depth", "D,...", "requests under way (aio.queue_depth); several are compared", "8")
      .value("backend", "X,...", "auto, io_uring or threads (aio.backend); several are compared", "auto")
      .value("threads", "T,...", "of the backend threads (aio.thread_count); several are compared", "1");
  return line;
}

void bench_nvme(const CommandLine& line) {
  bench::NvmeBenchOptions options;
  options.folder = line.required("path");
  options.bytes = static_cast<std::uint64_t>(line.amount("bytes", 8192, kibi));
  options.rounds = rounds_of(line);
  options.block_sizes = line.amounts("block-size", 4096, kibi);
  options.queue_depths = line.amounts("queue-depth", 1, thousand);
  options.thread_counts = line.amounts("threads", 1, thousand);
  options.backends = backends_of(line);
  for (const std::int64_t block : options.block_sizes)
    if (options.bytes / 2 < static_cast<std::uint64_t>(block))
      throw UsageError(
          cat("--bytes must be at least twice the --block-size ", block, ". See 'sherd bench nvme --help'"));
  const engine::StopSignals stop_signals;  // so that its file goes before the program ends
  const auto stopped = [] { return engine::StopSignals::received() != 0; };
  run_bench(line, "nvme",
            [&](const bench::Tell& tell) { return bench::measure_nvme(options, stopped, tell); });
}

/// One rank's part. The report, on rank 0 only.
std::optional<bench::BenchReport> measure_rank(comm::Communicator& comm,
                                               const bench::CommBenchOptions& options,
                                               const std::string& backend) {
  std::optional<Status> status;
  if (comm.rank() == 0) status.emplace("comm");
  const bench::Rounds times =
      bench::measure_collectives(comm, options, status ? status->tell() : bench::Tell());
  const double barrier = bench::measure_barrier(comm);
  if (comm.rank() != 0) return std::nullopt;
  return bench::comm_report(times, options, backend, comm.size(), barrier);
}

CommandLine comm_line() {
  CommandLine line =
      bench_line("comm", "Measures collectives against memcpy.", "[--ranks N] [--mib M] [--threads T]", "15");
  line.value("ranks", "N",
             "local ranks in this process; under mpirun, srun or torchrun the launcher's are taken", "2")
      .value("mib", "M", "size of the whole fp32 tensor", "64")
      .value("threads", "T", "with which each rank copies and sums", "1");
  return line;
}

void bench_comm(const CommandLine& line) {
  comm::CommOptions comm_options;
  comm_options.timeout_seconds = 300;
  comm_options.threads = small(line.integer("threads", 1));
  const int ranks = small(line.integer("ranks", 2));
  const std::int64_t mib = line.integer("mib", 1);
  if (mib > (std::int64_t{1} << 30)) throw UsageError(cat("--mib ", mib, " is more than any memory"));
  bench::CommBenchOptions options;
  options.bytes = static_cast<std::size_t>(mib) << 20, options.rounds = rounds_of(line);
  std::optional<bench::BenchReport> report;
  const char* advice = "Choose less with --mib, or fewer --ranks";
  if (const comm::Launcher by = comm::launcher(); by != comm::Launcher::none) {
    options.staged = true;
    const auto world = comm::join_launched_world(comm_options).world;
    require(world->size() > 1, "one rank has nobody to exchange with: let the launcher start more");
    bench::require_memory(bench::comm_bench_memory(options, world->size()), advice);
    report = measure_rank(*world, options, by == comm::Launcher::mpi ? "mpi" : "tcp");
  } else {
    bench::require_memory(bench::comm_bench_memory(options, ranks) * ranks, advice);
    report = watched([&] {
      std::optional<bench::BenchReport> mine;
      comm::run_local(ranks, comm_options, [&](comm::Communicator& comm) {
        if (auto part = measure_rank(comm, options, "local")) mine = std::move(part);  // rank 0's
      });
      return *mine;
    });
  }
  if (report) print(*report, line);
}

CommandLine gemm_line() {
  CommandLine line = bench_line(
      "gemm", "Measures a transformer's matrix products and attention against the processor's peak.",
      "[--threads T] [--tokens N] [--hidden H] [--vocab V] [--only TEXT]", "5");
  line.value("threads", "T", "compute threads", std::to_string(available_cores()))
      .value("tokens", "N", "tokens of a micro-batch: rows of every product", "2048")
      .value("hidden", "H", "width of the model", "768")
      .value("vocab", "V", "size of the vocabulary", "50257")
      .value("only", "TEXT", "cases whose name holds this, as 'bf16 qkv', 'head' or 'attention'");
  return line;
}

void bench_gemm(const CommandLine& line) {
  bench::GemmBenchOptions options;
  options.threads = small(line.integer("threads", 1)), options.rounds = rounds_of(line);
  options.tokens = line.amount("tokens", 1, thousand), options.hidden = line.amount("hidden", 1, thousand);
  options.vocabulary = line.amount("vocab", 1, thousand), options.only = line.text("only");
  bench::require_memory(bench::gemm_bench_memory(options),
                        "Choose fewer --tokens, or a smaller --hidden or --vocab");
  run_bench(line, "gemm", [&](const bench::Tell& tell) { return bench::measure_gemm(options, tell); });
}

CommandLine machine_line() {
  CommandLine line(
      "bench machine",
      "Measures the rates by which `sherd plan` predicts steps on this machine, and writes them as a "
      "machine's file.",
      "--output FILE [--path DIR] [--device D] [--threads T] [--width W] [--rounds R] [--json]");
  line.value("output", "FILE", "where the rates go")
      .value("path", "DIR",
             "a folder on a drive that is to be measured too; what is written there goes again")
      .value("device", "auto|cpu|cuda", "auto: GPUs where there are some", "auto")
      .value("threads", "T", "cores that the ranks share", std::to_string(available_cores()))
      .value(
          "width", "W",
          "of the widest model that is measured, at least 64; narrow ones take less time (1024; GPUs: 4096)")
      .value("rounds", "R", "steps of each model that are measured", "3")
      .json();
  return line;
}

void bench_machine(const CommandLine& line) {
  const std::string path = line.required("output");
  bench::MachineBenchOptions options;
  options.cores = small(line.integer("threads", 1)), options.steps = rounds_of(line);
  options.gpus =
      engine::takes_gpus(config::parse_text("{}", "--device", {cat("device.type=", line.text("device"))}));
  options.width = line.has("width") ? line.integer("width", 64) : options.gpus ? 4096 : 1024;
  options.folder = line.text("path");
  const auto require_written = [&](std::ofstream& out) {
    if (!out.flush())
      fail(ErrorKind::io, "cannot write ", excerpt(path, 300), "; check the path and its permissions");
  };
  std::ofstream before(path, std::ios::app);  // known before the minute of measuring, and nothing is lost yet
  require_written(before);
  bench::require_memory(bench::machine_bench_memory(options), "Choose fewer --threads or a smaller --width");
  const engine::StopSignals stop_signals;
  Status status("machine");
  const config::Machine machine = bench::measure_machine(
      options, [] { return engine::StopSignals::received() != 0; }, status.tell());
  std::ofstream out(path);
  out << config::dump(machine);
  require_written(out);
  if (line.has("json")) print_text(config::dump(machine) + "\n");
}

constexpr Command benches[] = {
    {"adam", "the optimizer step, against the memory's bandwidth", adam_line, bench_adam},
    {"nvme", "the offload store, against the disk", nvme_line, bench_nvme},
    {"comm", "collectives between ranks, against memcpy", comm_line, bench_comm},
    {"gemm", "matrix products and attention, against the processor's peak", gemm_line, bench_gemm},
    {"machine", "the rates of this machine, for `sherd plan`", machine_line, bench_machine},
};

}  // namespace

CommandLine bench_group() {
  return {"bench",
          "Measures a part of this machine and of Sherd, each against its limit in the same rounds. Let "
          "nothing else run meanwhile.",
          "NAME ..."};
}

std::span<const Command> bench_commands() {
  return benches;
}

}  // namespace sherd::cli
