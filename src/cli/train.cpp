#include "cli/train.h"

#include <algorithm>

#include "base/arena.h"
#include "base/log.h"
#include "cli/plot.h"
#include "cli/trainer.h"
#include "engine/gemm_probe.h"

namespace sherd::cli {
namespace {

/// What this machine's ranks reach together, times the machines. Local ranks wait for nobody: it is known before they start.
/// Under a launcher, rank 0 measures (0.3 s, then cached) while the others wait at their first collective.
double machine_rate(const config::Config& config, int ranks, int local_ranks) {
  const int threads = engine::compute_threads(config, local_ranks);
  const int total = std::min(available_cores(), threads * local_ranks);
  const int machines = (ranks + local_ranks - 1) / local_ranks;
  return engine::gemm_rate(total, config.precision.compute).flops_per_second * machines;
}

void check(const TrainRequest& request) {
  const config::Training& training = request.config.training;
  if (training.steps < 1)
    fail(ErrorKind::config, "how long to train is not given: set training.steps or --steps N");
  if (request.resume && training.save_dir.empty())
    fail(ErrorKind::config, "--resume reads training.save_dir, which is not set");
}

/// Under a launcher every rank looks, since machines may differ, and none allocates before all of its machine's have looked.
void check_fit(const TrainRequest& request, const engine::TokenData& data, const World& world) {
  require_fit(request.reparse, data.vocab_size, world, this_machine());
}

}  // namespace

void train(const TrainRequest& request) {
  check(request);
  const auto data = engine::open_token_data(request.config);
  comm::CommOptions options;
  options.timeout_seconds = request.config.parallel.timeout_seconds;
  bool speaks = true;
  const bool launched = comm::launched_by_mpi();
  if (!launched) check_fit(request, *data, {request.ranks, request.ranks});
  const double local_rate = launched ? 0 : machine_rate(request.config, request.ranks, request.ranks);
  launch_ranks(request.ranks, [&](DistributedPtr dist) {
    const double rate = !launched ? local_rate
                        : dist->rank() == 0 ? machine_rate(request.config, dist->world_size(), dist->local_size()) : 0;
    if (dist->world().rank() != 0 && comm::launched_by_mpi()) speaks = false;
    if (launched) {
      check_fit(request, *data, {dist->world_size(), dist->local_size()});
      dist->world().barrier({.label = "memory check", .scalar = true});
    }
    Trainer(dist, request, data, rate).run();
  }, options);
  if (request.plot.empty() || !speaks) return;
  PlotOptions plot;
  if (data->info) plot.unigram_entropy = data->info->unigram_entropy;
  plot_metrics(request.metrics, request.plot, plot);
  log_info("drew the losses: ", request.plot);
}

}  // namespace sherd::cli
