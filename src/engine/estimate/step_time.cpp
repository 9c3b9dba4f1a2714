#include "engine/estimate/step_time.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "base/error.h"
#include "comm/grid.h"
#include "engine/pipeline/train_schedule.h"
#include "engine/setup/process_grid.h"
#include "sharding/placement.h"
#include "sharding/schedule/schedules.h"
#include "sharding/schedule/simulate.h"

namespace sherd::engine {
namespace {

using comm::Collective;
using device::Tier;
using sharding::Chunk;
using sharding::Instruction;
using sharding::InstructionTime;
using sharding::Spread;
using Op = Instruction::Op;

/// The seconds that a part of one kind takes on a rank.
struct PartTime {
  PassSeconds forward, backward, input, weights;  ///< the last two: backward in its halves
  PassSeconds reference;                          ///< before the step
  double gather = 0;                              ///< its parameters, where they come for each use
  double reduce = 0;                              ///< its gradients, over the ranks that share states
  double replicas = 0;                            ///< likewise, over those that hold the same states
  double publish = 0;                             ///< its parameters, once they are updated
  double update = 0;                              ///< on the device or the host
  double output = 0;                              ///< to the next stage
};

/// The times that a step is made of: pure arithmetic on a configuration and a machine.
class Step {
 public:
  Step(const config::Config& config, const ModelWork& model, const config::Machine& machine, int ranks)
      : config_(config),
        model_(model),
        machine_(machine),
        grid_(ranks, grid_sizes(config)),
        placement_(sharding::make_placements(config)),
        local_ranks_(static_cast<int>(std::min<std::int64_t>(ranks, machine.devices))),
        rates_(machine.rates_of(local_ranks_)),
        stages_(config.parallel.pipeline),
        schedule_(schedule_of(config, !ties(model), grid_.size(comm::Axis::shard))),
        chunks_(sharding::cut(model.weights, static_cast<std::size_t>(cut_into()))) {
    for (const PartWork& part : model.kinds) times_.push_back(time_of(part));
  }

  StepTime time() {
    // A steady state is reached long before: what micro-batches after it take, the last of them tell. Which
    // micro-batches keep their activations comes again after as many as are in flight on a stage.
    const std::int64_t all = config_.batch.gradient_accumulation_steps,
                       unit = stages_ * group() * (model_.keeping.empty() ? 1 : 12);
    const bool all_in_flight = schedule_ == config::Schedule::gpipe || schedule_ == config::Schedule::layered;
    const std::int64_t recomputed =
        all_in_flight ? std::min(all, config_.training.recompute_micro_batches) : 0;
    const std::int64_t most = std::max<std::int64_t>({32, 4 * unit, recomputed + 2 * unit}) / unit * unit;
    const bool steady = all > most + unit;
    Simulated step = simulated(steady ? most : all);
    if (steady)
      step.go_on(simulated(most - unit, step.busiest),
                 static_cast<double>(all - most) / static_cast<double>(unit));
    step.time.bubble = step.idle / step.computing;
    // Differences of large sums may be a little below nothing.
    for (double StepTime::*field :
         {&StepTime::bubble, &StepTime::idle, &StepTime::reduce, &StepTime::exchange})
      step.time.*field = std::max(0.0, step.time.*field);
    step.time.peak = products_of(config_.precision.compute, rates_).peak * grid_.ranks();
    return step.time;
  }

 private:
  static bool ties(const ModelWork& model) {
    return std::any_of(model.kinds.begin(), model.kinds.end(),
                       [](const PartWork& part) { return part.tied; });
  }
  int cut_into() const {
    if (schedule_ == config::Schedule::layered) return static_cast<int>(model_.parts.size());
    return stages_ * config_.parallel.virtual_stages;
  }
  std::int64_t group() const {
    return config_.parallel.micro_batch_group > 0 && schedule_ == config::Schedule::interleaved
               ? config_.parallel.micro_batch_group
               : 1;
  }

  int size(comm::Axis axis) const { return grid_.size(axis); }
  /// A call over an axis's ranks with `bytes` in all.
  double call(Collective kind, comm::Axis axis, double bytes) const {
    const int ranks = size(axis);
    if (ranks == 1 || bytes == 0) return 0;
    const double sent = bytes * (ranks - 1) / ranks * (kind == Collective::all_reduce ? 2 : 1);
    return seconds_of({.kind = kind,
                       .bytes = static_cast<std::uint64_t>(kind == Collective::send ? bytes : sent),
                       .ranks = ranks,
                       .stride = grid_.stride(axis)},
                      machine_);
  }

  PartTime time_of(const PartWork& part) const {
    PartTime out;
    out.forward = price(part.forward, machine_, rates_);
    out.backward = price(part.backward, machine_, rates_);
    out.weights = price(part.backward, machine_, rates_, Counted::weight_gradients);
    out.input = price(part.backward, machine_, rates_, Counted::others);
    out.reference = price(part.reference, machine_, rates_);
    add_states(out, part.trained, part.frozen, part.in_fp8, comm::Axis::shard, comm::Axis::replica);
    add_states(out, part.experts, 0, part.experts_in_fp8, comm::Axis::expert_shard,
               comm::Axis::expert_replica);
    out.output = call(Collective::send, comm::Axis::pipeline, static_cast<double>(part.output));
    return out;
  }

  void add_states(PartTime& out, std::int64_t trained, std::int64_t frozen, std::int64_t in_fp8,
                  comm::Axis shard, comm::Axis replica) const {
    if (trained + frozen == 0) return;
    const double shards = size(shard);
    const double parameters =
        static_cast<double>(trained + frozen) * static_cast<double>(size_of(config_.precision.compute));
    const double gradients =
        static_cast<double>(trained) * static_cast<double>(size_of(placement_.communication));
    if (placement_.parameters.spread == Spread::sharded)
      out.gather += call(Collective::all_gather, shard,
                         parameters - (config_.fp8.gathers() ? static_cast<double>(in_fp8) : 0)) +
                    fetched(parameters / shards, placement_.parameters.tier);
    else if (placement_.masters.spread == Spread::sharded)
      out.publish += call(Collective::all_gather, shard, parameters);
    const bool all = placement_.masters.spread == Spread::replicated;
    out.reduce += call(all ? Collective::all_reduce : Collective::reduce_scatter, shard, gradients);
    out.replicas += call(Collective::all_reduce, replica, gradients / (all ? 1 : shards));
    out.update += update_of(static_cast<double>(trained) / (all ? 1 : shards));
  }

  /// Between device and host: over a link, or where both are one memory, read and written there.
  double copied(double bytes, double link) const {
    return machine_.accelerator() ? bytes / link : 2 * bytes / rates_.bandwidth;
  }

  /// From the tier where they live to the device.
  double fetched(double bytes, Tier tier) const {
    double seconds = tier == Tier::device ? 0 : copied(bytes, machine_.host.to_device);
    if (tier == Tier::nvme) seconds = std::max(seconds, bytes * local_ranks_ / machine_.drive.read);
    return seconds;
  }

  double update_of(double elements) const {
    const double bytes = elements * update_bytes(config_);
    if (placement_.masters.tier == Tier::device)
      return bytes / (rates_.update > 0 ? rates_.update : rates_.bandwidth);
    double seconds = bytes * local_ranks_ / machine_.host.update;
    const double gradients =
        copied(elements * static_cast<double>(size_of(placement_.communication)), machine_.host.from_device);
    // Over a link they come while others are updated.
    seconds = machine_.accelerator() ? std::max(seconds, gradients) : seconds + gradients;
    if (placement_.masters.tier == Tier::nvme) {
      const double states = bytes / 2 * local_ranks_;  // one drive reads and writes
      seconds = std::max(seconds, states / machine_.drive.read + states / machine_.drive.write);
    }
    return seconds;
  }

  /// The lists of all stages.
  struct Lists {
    std::int64_t micro_batches = 0;
    std::vector<std::vector<Instruction>> of_stages{};
    /// By stage, micro-batches that recompute nothing, where the others do.
    std::vector<std::set<std::int64_t>> kept{};

    bool keep(int stage, std::int64_t micro_batch) const {
      return kept[static_cast<std::size_t>(stage)].contains(micro_batch);
    }
  };

  Lists lists_of(std::int64_t micro_batches) const {
    Lists out{micro_batches};
    sharding::ScheduleShape shape;
    shape.stages = stages_, shape.micro_batches = micro_batches;
    shape.chunks = static_cast<int>(chunks_.size()) / stages_;
    shape.group = config_.parallel.micro_batch_group;
    for (shape.stage = 0; shape.stage < stages_; ++shape.stage)
      out.of_stages.push_back(sharding::make_schedule(schedule_, shape));
    out.kept.resize(out.of_stages.size());
    if (model_.keeping.empty()) return out;
    const std::int64_t most =
        sharding::most_in_flight(out.of_stages.front()) - config_.training.recompute_micro_batches;
    for (std::size_t stage = 0; stage < out.of_stages.size(); ++stage) {
      sharding::keep_activations(out.of_stages[stage], most);
      for (const Instruction& i : out.of_stages[stage])
        if (i.keeps_activations) out.kept[stage].insert(i.micro_batch);
    }
    return out;
  }

  const Chunk& chunk_of(int stage, const Instruction& i) const {
    return chunks_[static_cast<std::size_t>(i.chunk * stages_ + stage)];
  }
  const PartTime& part(std::size_t i, bool keeps = false) const {
    return times_[(keeps && !model_.keeping.empty() ? model_.keeping : model_.parts)[i]];
  }

  /// Parts one after the other, each behind its parameters, which come while the part before runs.
  template <class Seconds>
  double through(const Chunk& chunk, Op op, bool keeps, const Seconds& seconds) const {
    const bool forward = op == Op::forward;
    // Weight gradients need no parameters.
    const bool comes = placement_.parameters.spread == Spread::sharded &&
                       schedule_ != config::Schedule::layered && op != Op::weight_gradients;
    const bool ahead = config_.zero.prefetch_bucket_size > 0;
    const auto at = [&](std::size_t n) -> const PartTime& {
      return part(forward ? chunk.begin + n : chunk.end - 1 - n, keeps);
    };
    double now = 0, begun = 0, fetched = 0;
    const std::size_t count = chunk.end - chunk.begin;
    for (std::size_t n = 0; n < count; ++n) {
      if (comes) fetched = std::max(fetched, ahead ? begun : now) + at(n).gather;
      begun = std::max(now, fetched);
      now = begun + seconds(at(n));
      // The next part's parameters come meanwhile.
      if (comes && ahead && n + 1 < count) now += (1 - rates_.overlap) * at(n + 1).gather;
    }
    return now;
  }

  bool reduces(const Instruction& i, std::int64_t micro_batches) const {
    return placement_.reduce_every_micro_batch() || i.micro_batch + 1 == micro_batches;
  }

  InstructionTime backward(const Chunk& chunk, const Instruction& i, const Lists& lists, bool keeps,
                           const PassSeconds PartTime::*pass, bool completes) const {
    InstructionTime out{
        through(chunk, i.op, keeps, [&](const PartTime& each) { return (each.*pass).seconds; })};
    if (!completes || !reduces(i, lists.micro_batches)) return out;
    const bool last = i.micro_batch + 1 == lists.micro_batches;
    const double reduction = reduction_of(chunk, last);
    out.seconds += (1 - hidden_reductions()) * reduction;
    out.beside = hidden_reductions() * reduction;
    out.handed_over_at = (part(chunk.end - 1, keeps).*pass).seconds;
    out.behind = hidden_reductions() * reduction_of({chunk.begin, chunk.begin + 1}, last);
    return out;
  }
  double reduction_of(const Chunk& chunk, bool last) const {
    return sum(chunk, &PartTime::reduce) + (last ? sum(chunk, &PartTime::replicas) : 0);
  }
  /// The share of reductions that runs beside backward.
  double hidden_reductions() const {
    return config_.zero.overlap_comm || placement_.parameters.spread == Spread::sharded ? rates_.overlap : 0;
  }
  double reduced_in_backward(int stage, std::int64_t micro_batches) const {
    double out = 0;
    for_own(stage, [&](const Chunk& chunk) {
      out += reduction_of(chunk, true);
      if (placement_.reduce_every_micro_batch())
        out += static_cast<double>(micro_batches - 1) * reduction_of(chunk, false);
    });
    return (1 - hidden_reductions()) * out;
  }

  InstructionTime time_of(int stage, const Instruction& i, const Lists& lists) const {
    const Chunk& chunk = chunk_of(stage, i);
    const bool keeps = lists.keep(stage, i.micro_batch);
    switch (i.op) {
      case Op::forward:
        return {through(chunk, i.op, keeps, [](const PartTime& each) { return each.forward.seconds; })};
      case Op::backward:
        return backward(chunk, i, lists, keeps, &PartTime::backward, true);
      case Op::backward_input:
        return backward(chunk, i, lists, keeps, &PartTime::input, false);
      case Op::weight_gradients:
        return backward(chunk, i, lists, keeps, &PartTime::weights, true);
      case Op::gather:
        return {sum(chunk, &PartTime::gather)};
      case Op::send_activation:
        return {part(chunk.end - 1).output};
      case Op::send_gradient:
        return {chunk.begin > 0 ? part(chunk.begin - 1).output : 0};
      case Op::update:
        return {update(stage)};
      default:
        return {};
    }
  }

  double sum(const Chunk& chunk, double PartTime::*field) const {
    double out = 0;
    for (std::size_t n = chunk.begin; n < chunk.end; ++n) out += part(n).*field;
    return out;
  }
  /// The optimizer, then what it has published.
  double update(int stage) const {
    double out = 0;
    for_own(stage, [&](const Chunk& chunk) {
      out += sum(chunk, &PartTime::update) + sum(chunk, &PartTime::publish);
    });
    return out;
  }
  template <class Visit>
  void for_own(int stage, const Visit& visit) const {
    for (std::size_t c = static_cast<std::size_t>(stage); c < chunks_.size();
         c += static_cast<std::size_t>(stages_))
      visit(chunks_[c]);
  }

  /// A simulated step; `computing` and `idle`: the time that all stages compute, and wait for each other.
  struct Simulated {
    StepTime time;  ///< of the stage that computes longest
    int busiest = 0;
    double computing = 0, idle = 0;

    /// As if `times` as much came as this one has more than `shorter`.
    void go_on(const Simulated& shorter, double times) {
      const auto extend = [times](double& value, double less) { value += (value - less) * times; };
      for (std::size_t i = 0; i < time.kernels.size(); ++i) extend(time.kernels[i], shorter.time.kernels[i]);
      for (double StepTime::*field : {&StepTime::seconds, &StepTime::exchange, &StepTime::gather,
                                      &StepTime::reduce, &StepTime::idle, &StepTime::flops})
        extend(time.*field, shorter.time.*field);
      extend(computing, shorter.computing), extend(idle, shorter.idle);
    }
  };

  /// `busiest`: the stage to tell of; -1: the one that computes longest.
  Simulated simulated(std::int64_t micro_batches, int busiest = -1) const {
    const Lists lists = lists_of(micro_batches);
    sharding::SimulatedStep step = sharding::simulate(
        lists.of_stages, [&](int stage, const Instruction& i) { return time_of(stage, i, lists); });
    add_reference(step, micro_batches);
    Simulated out;
    for (int stage = 0; stage < stages_; ++stage) {
      const auto s = static_cast<std::size_t>(stage);
      out.computing += step.computing[s];
      out.idle += step.seconds - step.computing[s] - step.waiting[s] - update(stage);
      if (busiest < 0 && work_of(stage, lists) > work_of(out.busiest, lists)) out.busiest = stage;
    }
    if (busiest >= 0) out.busiest = busiest;
    out.time = time_on(out.busiest, step, lists);
    // Each product of forward has two in backward, attention likewise, and what is computed again does not
    // count. A head that goes by parts of the rows has all three in one pass, and nothing is computed again.
    const PartTime& head = times_[model_.parts.back()];
    double flops = head.forward.flops + head.backward.flops;
    for (std::size_t i = 0; i + 1 < model_.parts.size(); ++i) flops += 3 * part(i).forward.flops;
    out.time.flops = flops * static_cast<double>(micro_batches) * grid_.ranks() / stages_;
    return out;
  }

  /// The passes before a step: all micro-batches, one behind the other through the stages.
  void add_reference(sharding::SimulatedStep& step, std::int64_t micro_batches) const {
    if (std::all_of(times_.begin(), times_.end(),
                    [](const PartTime& part) { return part.reference.seconds == 0; }))
      return;
    double through_all = 0, longest = 0;
    for (int stage = 0; stage < stages_; ++stage) {
      double seconds = 0;
      for_own(stage, [&](const Chunk& chunk) {
        seconds +=
            through(chunk, Op::forward, false, [](const PartTime& each) { return each.reference.seconds; });
      });
      step.computing[static_cast<std::size_t>(stage)] += static_cast<double>(micro_batches) * seconds;
      through_all += seconds, longest = std::max(longest, seconds);
    }
    step.seconds += through_all + static_cast<double>(micro_batches - 1) * longest;
  }

  /// Visits the passes of a stage: a pass of a part, and how often it runs in a step.
  template <class Visit>
  void for_passes(int stage, const Lists& lists, const Visit& visit) const {
    const auto kept = static_cast<double>(lists.kept[static_cast<std::size_t>(stage)].size());
    const auto all = static_cast<double>(lists.micro_batches);
    for_own(stage, [&](const Chunk& chunk) {
      for (std::size_t n = chunk.begin; n < chunk.end; ++n)
        for (const bool keeps : {false, true}) {
          const PartTime& time = part(n, keeps);
          for (const PassSeconds* pass : {&time.forward, &time.backward, &time.reference})
            visit(*pass, keeps ? kept : all - kept);
        }
    });
  }

  /// Seconds of a step's passes on a stage.
  double work_of(int stage, const Lists& lists) const {
    double out = 0;
    for_passes(stage, lists, [&](const PassSeconds& pass, double times) { out += times * pass.seconds; });
    return out;
  }

  StepTime time_on(int stage, const sharding::SimulatedStep& step, const Lists& lists) const {
    StepTime out;
    out.seconds = step.seconds;
    for_passes(stage, lists, [&](const PassSeconds& pass, double times) {
      for (std::size_t f = 0; f < out.kernels.size(); ++f) out.kernels[f] += times * pass.kernels[f];
      out.exchange += times * pass.exposed;
    });
    const auto s = static_cast<std::size_t>(stage);
    const double reduced = reduced_in_backward(stage, lists.micro_batches);
    out.gather = std::max(0.0, step.computing[s] - work_of(stage, lists) - reduced);
    out.reduce = step.waiting[s] + reduced;
    out.update = update(stage);
    out.idle = step.seconds - step.computing[s] - step.waiting[s] - out.update;
    return out;
  }

  const config::Config& config_;
  const ModelWork& model_;
  const config::Machine& machine_;
  comm::Grid grid_;
  sharding::PlacementTable placement_;
  int local_ranks_;
  const config::DeviceRates& rates_;
  int stages_;
  config::Schedule schedule_;
  std::vector<Chunk> chunks_;
  std::vector<PartTime> times_;  ///< by kind of part
};

}  // namespace

double pass_seconds(const ModelWork& model, const config::Machine& machine, int ranks) {
  if (!model.keeping.empty()) return 0;
  const config::DeviceRates& rates = machine.rates_of(std::min<std::int64_t>(ranks, machine.devices));
  std::vector<double> of_kinds;
  for (const PartWork& part : model.kinds)
    of_kinds.push_back(price(part.forward, machine, rates).seconds +
                       price(part.backward, machine, rates).seconds);
  return std::accumulate(model.parts.begin(), model.parts.end(), 0.0,
                         [&](double sum, std::size_t kind) { return sum + of_kinds[kind]; });
}

double update_bytes(const config::Config& config) {
  const sharding::PlacementTable table = sharding::make_placements(config);
  const auto bytes = [](DType dtype) { return static_cast<double>(size_of(dtype)); };
  const double master =
      table.master_form == sharding::MasterForm::in_parameters ? 0 : bytes(table.masters.dtype);
  return bytes(table.gradients.dtype) +
         2 * (2 * bytes(table.moments.dtype) + master + bytes(table.parameters.dtype));
}

void require_rates(const config::Config& config, const config::Machine& machine, int ranks) {
  const sharding::PlacementTable table = sharding::make_placements(config);
  const auto require_rate = [&](double rate, const char* key, const char* why) {
    if (rate == 0)
      fail(ErrorKind::config, "the machine's file has no ", key, ", and ", why, ": add it to '", machine.name,
           "' (sherd bench machine --path DIR measures one with its drive)");
  };
  const bool optimizer_off = table.masters.tier != Tier::device,
             parameters_off = table.parameters.tier != Tier::device;
  if (optimizer_off) require_rate(machine.host.update, "host.update", "optimizer states live off the device");
  if (machine.accelerator() && (optimizer_off || parameters_off)) {
    require_rate(machine.host.to_device, "host.to_device", "states live off the device");
    require_rate(machine.host.from_device, "host.from_device", "states live off the device");
  }
  if (table.masters.tier == Tier::nvme || table.parameters.tier == Tier::nvme) {
    require_rate(machine.drive.read, "drive.read", "states live on NVMe");
    require_rate(machine.drive.write, "drive.write", "states live on NVMe");
  }
  if (ranks > 1 &&
      (machine.links.empty() || (machine.links.back().ranks > 0 && machine.links.back().ranks < ranks)))
    fail(ErrorKind::config, "no link of '", machine.name, "' joins ", ranks,
         " ranks: add one to the machine's file, as the network between machines");
  const auto& known = tensor::kernel_families;
  for (const config::DeviceRates& rates : machine.rates)
    for (const config::FamilyRate& rate : rates.families) {
      if (std::find(known.begin(), known.end(), rate.family) != known.end()) continue;
      std::string names;
      for (const std::string_view name : known) names += cat(names.empty() ? "" : ", ", name);
      fail(ErrorKind::config, "the machine's file has a family of kernels '", rate.family, "'; known are ",
           names);
    }
}

StepTime step_time(const config::Config& config, const ModelWork& model, const config::Machine& machine,
                   int ranks) {
  require_rates(config, machine, ranks);
  return Step(config, model, machine, ranks).time();
}

}  // namespace sherd::engine
