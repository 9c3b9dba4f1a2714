#include "engine/estimate/estimate.h"

#include <algorithm>

#include "comm/memory.h"
#include "device/device.h"
#include "engine/checkpoint/background_save.h"
#include "engine/checkpoint/local/peer_copies.h"
#include "engine/pipeline/train_schedule.h"
#include "engine/setup/make_device.h"
#include "engine/setup/process_grid.h"
#include "nn/layered_model.h"

namespace sherd::engine {
namespace {

/// Two micro-batches tell everything about a step of more: one that accumulates, and the last.
constexpr std::int64_t most_micro_batches = 2;

/// The traffic of one micro-batch.
struct Moved {
  std::vector<comm::ProcessGroups::AxisTraffic> traffic;
  IoBytes io;

  std::uint64_t payload() const {
    std::uint64_t sum = 0;
    for (const auto& [axis, bytes] : traffic) sum += bytes.payload();
    return sum;
  }
  void add(const Moved& other, std::uint64_t times) {
    if (traffic.empty())
      for (const auto& [axis, bytes] : other.traffic) traffic.push_back({axis, {}});
    for (std::size_t i = 0; i < traffic.size(); ++i) traffic[i].traffic.add(other.traffic[i].traffic, times);
    io.read += times * other.io.read;
    io.written += times * other.io.written;
  }
};

/// A dry run whose steps tell what they move.
class MeasuredDryRun : public DryRun {
 public:
  using DryRun::DryRun;

  std::uint64_t exchange(int local_ranks) { return engine().groups().host_memory(local_ranks); }
  MemoryReport tracked() { return MemoryReport::of(engine().device()); }

  /// One optimizer step; returns what all its micro-batches together move.
  Moved step() {
    return engine().schedule() == config::Schedule::accumulate ? step_by_micro_batches() : whole_step();
  }

 private:
  /// As train_batch() runs it; what a step leaves of its update for the next one counts there.
  Moved whole_step() {
    const IoBytes before = engine().io_bytes();
    engine().groups().reset_traffic();
    DryRun::step();
    return {engine().groups().traffic(), engine().io_bytes() - before};
  }

  Moved step_by_micro_batches() {
    const std::int64_t micro_batches = engine().gradient_accumulation_steps();
    const std::int64_t run = std::min(micro_batches, most_micro_batches);
    Moved sum;
    std::size_t loss_bytes = 0;
    before_step();
    for (std::int64_t i = 0; i < run; ++i) {
      engine().set_gradient_accumulation_boundary(i + 1 == run);
      const IoBytes before = engine().io_bytes();
      engine().groups().reset_traffic();
      const autograd::Var loss = engine().forward(batch());
      loss_bytes = loss.value().bytes();
      engine().backward(loss);
      engine().step();
      sum.add({engine().groups().traffic(), engine().io_bytes() - before},
              i + 1 < run ? static_cast<std::uint64_t>(micro_batches - 1) : 1);
    }
    // The boundary gathers a loss of every micro-batch, and what it weighs.
    const int ranks = engine().data_ranks().size();
    for (auto& [axis, bytes] : sum.traffic)
      if (&engine().groups().group(axis) == &engine().data_ranks())
        bytes.scalars +=
            static_cast<std::uint64_t>((micro_batches - run) * (ranks - 1)) * (loss_bytes + sizeof(double));
    return sum;
  }
};

/// The forms of what parts give, where one stage has them all.
std::vector<ValueForm> forms_of_parts(config::Config config, const ModelSource& model, const MakeBatch& batch,
                                      const DryRank& rank) {
  const int stage_ranks = rank.ranks / config.parallel.pipeline;
  config.batch = config::resolve_batch(config, data_ranks(config, rank.ranks));
  config.parallel.pipeline = config.parallel.virtual_stages = 1;
  config.parallel.schedule = config::Schedule::accumulate;
  DryRun whole(config, model, batch,
               {.ranks = stage_ranks, .local_ranks = std::min(rank.local_ranks, stage_ranks)});
  return whole.forms_of_parts();
}

/// With as many micro-batches, at most, as it takes until the stages of a pipeline do the same again and
/// again: of interleaved stages two groups are under way, of others fewer than there are stages (zero bubble
/// puts off as many weight gradients).
config::Config filled_pipeline(config::Config config, int ranks) {
  const config::Parallel& parallel = config.parallel;
  if (parallel.pipeline == 1 || parallel.schedule == config::Schedule::gpipe) return config;
  const bool interleaved = parallel.virtual_stages > 1;
  const std::int64_t group =
      interleaved && parallel.micro_batch_group > 0 ? parallel.micro_batch_group : parallel.pipeline;
  config.batch = config::resolve_batch(config, data_ranks(config, ranks));
  std::int64_t& micro_batches = config.batch.gradient_accumulation_steps;
  const std::int64_t all = micro_batches;
  micro_batches = std::min(all, (interleaved ? 3 : 2) * group + all % group);
  config.batch.train_batch_size = config.batch.train_batch_size / all * micro_batches;
  return config;
}

/// Whether `sherd train` writes checkpoints while steps go on; the last one it waits for anyway.
bool saves_beside_steps(const config::Training& training) {
  return training.save_async && !training.save_dir.empty() &&
         (training.save_interval > 0 || training.local_save_interval > 0 || training.keep_best);
}

/// Adds memory of the host tier that saving keeps from the first time on. False where the limit forbids it:
/// saving does without.
bool add_for_saving(const config::Config& config, std::uint64_t bytes, Estimate& out) {
  MemoryReport::TierMemory& host = out.peaks.tiers[static_cast<std::size_t>(device::Tier::host)];
  const std::uint64_t limit = config.device.host_memory_limit;
  if (limit > 0 && host.total_peak + bytes > limit) return false;
  host.peak[static_cast<std::size_t>(device::Category::checkpoint)] += bytes;
  host.total_peak += bytes;
  out.peaks.held += bytes;
  return true;
}

void add_snapshot(const config::Config& config, Engine& engine, Estimate& out) {
  if (!saves_beside_steps(config.training)) return;
  out.snapshot = Snapshots(engine.sharded(), engine.device()).bytes();
  out.snapshot_fits = add_for_saving(config, out.snapshot, out);
}

void add_local_checkpoints(const config::Config& config, Engine& engine, const DryRank& rank, Estimate& out) {
  if (config.training.local_save_interval == 0 || config.training.save_dir.empty()) return;
  std::uint64_t once = 0, twice = 0;  // frozen files are links to the first
  for (const FilePart part : {FilePart::frozen, FilePart::trained}) {
    if (part == FilePart::frozen && !config.training.adapter.save_base) continue;
    for_each_tensor(engine.sharded(), part,
                    [&](const FileTensor& tensor, const SavedState&, const sharding::Piece&) {
                      (part == FilePart::frozen ? once : twice) +=
                          static_cast<std::uint64_t>(tensor.count) * size_of(tensor.dtype);
                    });
  }
  const bool copied = rank.local_ranks < rank.ranks;
  out.local_checkpoints = (copied ? 2 : 1) * (once + 2 * twice);
  if (!copied) return;
  out.exchange += comm::host_memory(rank.ranks, rank.local_ranks);
  const std::uint64_t buffers = 2 * file_chunk;  // a chunk that is sent, and one that comes
  if (add_for_saving(config, buffers, out)) out.copy_buffers = buffers;
}

}  // namespace

Estimate estimate(const config::Config& whole, const ModelSource& model, const MakeBatch& batch,
                  const DryRank& rank, const EstimateScope& scope) {
  const config::Config config = scope.memory_alone ? filled_pipeline(whole, rank.ranks) : whole;
  MeasuredDryRun run(config, model, batch, rank);
  run.engine().device().ledger().set_limit(device::Tier::device, scope.device_room);
  Estimate out;
  out.rank = rank.rank;
  out.values = scope.values;
  if (config.parallel.pipeline > 1) {
    if (out.values.empty()) out.values = forms_of_parts(config, model, batch, rank);
    run.assume_values(out.values);
  }
  out.states = run.tracked();
  out.exchange = run.exchange(rank.local_ranks);
  // The first pass of each kind records the order of use, the next ones follow its plan and hold more. What
  // evaluation adds to the pool of exchange buffers stays there for the steps that come after.
  run.step();
  if (scope.evaluates) {
    run.evaluate();
    run.evaluate();
  }
  Moved moved = run.step();
  if (run.engine().schedule() == config::Schedule::layered)
    moved = run.step();  // with what that one has left
  if (const auto freeze_step = run.engine().optimizer()->freeze_step(run.engine().sharded())) {
    out.warm_up = {*freeze_step, moved.payload(), moved.io};
    run.engine().optimizer()->set_steps(*freeze_step);
    run.step();
    moved = run.step();
  }
  out.traffic_by_axis = moved.traffic;
  for (const auto& [axis, bytes] : moved.traffic) out.traffic.add(bytes);
  out.io = moved.io;
  out.peaks = run.tracked();
  add_snapshot(config, run.engine(), out);
  add_local_checkpoints(config, run.engine(), rank, out);
  Engine& engine = run.engine();
  const TrainSchedule schedule{engine.schedule(), engine.stages()};
  out.schedule = describe_schedule(schedule, engine.config(), engine.module(),
                                   engine.groups().group(comm::Axis::shard).size());
  if (schedule.layout.stages > 1)
    out.bubble = ideal_bubble(schedule, engine.config(), dynamic_cast<nn::LayeredModel&>(engine.module()));
  return out;
}

}  // namespace sherd::engine
