#include "cli/planning/estimate_report.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/text/excerpt.h"
#include "engine/setup/process_grid.h"

namespace sherd::cli {
namespace {

using device::Category;
using device::Tier;
using engine::human_bytes;
using OrderedJson = nlohmann::ordered_json;

const engine::MemoryReport::TierMemory& memory_of(const engine::MemoryReport& report, int tier) {
  return report.tiers[static_cast<std::size_t>(tier)];
}

std::string local_row(const EstimateReport& r) {
  return cat("local checkpoints in ", r.config.training.local_save_dir);
}

std::uint64_t local_bytes(const engine::Estimate& estimate) {
  return estimate.local_checkpoints;
}

std::string heading(const EstimateReport& r) {
  const comm::Grid grid(r.world.ranks, engine::grid_sizes(r.config));
  const int data = grid.size(comm::Axis::data);
  const config::Batch batch = config::resolve_batch(r.config, data);
  return cat(
      config::name_of(r.config.model->type), " with ", engine::human_count(static_cast<double>(r.parameters)),
      " parameters in ", name_of(r.config.precision.compute), ", ZeRO stage ", r.config.zero.stage, ", ",
      counted(r.world.ranks, "rank"), " on ", counted(r.world.machines(), "machine"),
      data == r.world.ranks && grid.size(comm::Axis::expert) == 1 ? "" : cat(", ", engine::describe(grid)),
      r.machine.on_gpus ? " with GPUs" : "", ", micro-batches of ", batch.micro_batch_size, " x ",
      counted(r.config.model->seq_length, "token"), "\n\n");
}

std::string rank_table(const EstimateReport& r) {
  std::vector<std::vector<std::string>> rows{
      {r.world.ranks == 1
           ? "memory"
           : cat("rank ", r.rank, " of ", r.world.ranks, r.stages.size() > 1 ? cat(", stage ", r.stage) : ""),
       "before steps", "peak"}};
  for (int t = 0; t < device::tier_count; ++t) {
    const auto &states = memory_of(r.estimate().states, t), &peaks = memory_of(r.estimate().peaks, t);
    if (peaks.total_peak == 0) continue;
    const std::string tier(device::name_of(static_cast<Tier>(t)));
    for (std::size_t c = 0; c < peaks.peak.size(); ++c)
      if (peaks.peak[c] > 0)
        rows.push_back({cat(tier, " ", device::name_of(static_cast<Category>(c))),
                        human_bytes(states.current[c]), human_bytes(peaks.peak[c])});
    rows.push_back({tier + " total", human_bytes(states.total_current), human_bytes(peaks.total_peak)});
    if (!r.machine.on_gpus || static_cast<Tier>(t) != Tier::device) continue;
    rows.push_back({"beside it, CUDA", "", human_bytes(planning::untracked_of_cuda)});
    if (const std::uint64_t nccl = planning::untracked_for_nccl(r.config.parallel, r.world, r.machine))
      rows.push_back({"beside it, NCCL", "", human_bytes(nccl)});
  }
  rows.push_back({"memory held", "", human_bytes(r.estimate().peaks.held)});
  if (r.estimate().exchange > 0)
    rows.push_back({"exchange with other ranks", "", human_bytes(r.estimate().exchange)});
  rows.push_back({"process itself", "", human_bytes(planning::process_itself)});
  if (const std::uint64_t local = local_bytes(r.estimate()); local > 0)
    rows.push_back({local_row(r), "", human_bytes(local)});
  return engine::format_table(rows);
}

/// The bytes that all ranks need; the largest number where it is more than one holds.
std::uint64_t of_all(const std::vector<std::uint64_t>& bytes, const planning::World& world) {
  return planning::most_on_a_machine(bytes, {world.ranks, world.ranks});
}

/// Sums over the ranks of a machine, whose memory and tier nvme they share (of the one that has most), and
/// over all.
std::string world_table(const EstimateReport& r) {
  if (r.world.ranks == 1) return "";
  std::vector<std::vector<std::string>> rows{{"peak"}};
  for (std::size_t stage = 0; stage < r.stages.size(); ++stage)
    rows[0].push_back(r.stages.size() == 1 ? "each rank" : cat("rank of stage ", stage));
  rows[0].push_back(cat("machine (", r.world.local_ranks, ")"));
  if (r.world.machines() > 1) rows[0].push_back(cat("all (", r.world.ranks, ")"));
  const auto add = [&](std::string_view what, const auto& bytes_of) {
    const std::vector<std::uint64_t> bytes = planning::by_stage(r.stages, bytes_of);
    if (std::all_of(bytes.begin(), bytes.end(), [](std::uint64_t b) { return b == 0; })) return;
    std::vector<std::string> row{std::string(what)};
    for (const std::uint64_t each : bytes) row.push_back(human_bytes(each));
    row.push_back(human_bytes(planning::most_on_a_machine(bytes, r.world)));
    if (r.world.machines() > 1) row.push_back(human_bytes(of_all(bytes, r.world)));
    rows.push_back(std::move(row));
  };
  for (int t = 0; t < device::tier_count; ++t)
    add(device::name_of(static_cast<Tier>(t)),
        [&](const engine::Estimate& stage) { return memory_of(stage.peaks, t).total_peak; });
  add("resident memory", planning::resident_bytes);
  add(local_row(r), local_bytes);
  return cat("\n", engine::format_table(rows));
}

std::string longer_by(const planning::Remedy& remedy) {
  if (!remedy.slow_down) return "how much longer a step takes is not known";
  if (*remedy.slow_down < 5e-4) return "a step takes no longer";
  return cat("a step takes ", engine::printed("%.2g", 100 * *remedy.slow_down), " % longer");
}

std::string verdict(const EstimateReport& r) {
  std::string out = "\n";
  const auto limit = [&](const char* key, std::uint64_t bytes) {
    if (bytes > 0) out += cat(key, ": ", human_bytes(bytes), " per rank\n");
  };
  limit("device.device_memory_limit", r.config.device.device_memory_limit);
  limit("device.host_memory_limit", r.config.device.host_memory_limit);
  if (r.machine.memory > 0)
    out += cat("this machine: ", human_bytes(r.machine.memory), " of memory available\n");
  const bool unknown_gpu = !r.machine.knows_devices(r.config);
  if (r.machine.gpus > 0)
    out += cat(counted(r.machine.gpus, "GPU"), " of ", human_bytes(r.machine.gpu_memory), " here\n");
  if (unknown_gpu)
    out += cat("no GPU here: each must hold the device tier, ",
               human_bytes(memory_of(r.estimate().peaks, 0).total_peak), ", and some ",
               human_bytes(planning::untracked_of_cuda +
                           planning::untracked_for_nccl(r.config.parallel, r.world, r.machine)),
               " beside it; device.device_memory_limit says what one has\n");
  if (!r.not_priced.empty()) out += cat("the time of a step is not known: ", r.not_priced, "\n");
  if (r.step_seconds > 0)
    out += cat("a step takes about ", engine::printed("%.3g", r.step_seconds), " s by the rates of ",
               r.rates.name, "\n");
  if (r.missing.empty())
    return out + (unknown_gpu ? "Whether it fits is not known, as no GPU is seen here. The memory of this "
                                "machine is enough.\n"
                              : "It fits.\n");
  for (const planning::Shortfall& shortfall : r.missing)
    out += cat("It does not fit: ", shortfall.text(), ".\n");
  if (r.remedy.keys.empty())
    return out +
           "No key that is known here makes it fit: use more ranks, a smaller model or shorter sequences.\n";
  out += cat("Cheapest change that fits: ", r.remedy.line(), "\n");
  for (const std::string& reason : r.remedy.reasons) out += cat("  ", reason, "\n");
  out += cat("  ", longer_by(r.remedy), ", by the rates of ", r.rates.name, "\n");
  return out;
}

OrderedJson by_category(const std::array<std::uint64_t, device::category_count>& bytes, std::uint64_t total) {
  OrderedJson out;
  for (std::size_t c = 0; c < bytes.size(); ++c)
    out[std::string(device::name_of(static_cast<Category>(c)))] = bytes[c];
  out["total"] = total;
  return out;
}

}  // namespace

std::string text_of(const EstimateReport& r) {
  std::string moved;
  const comm::Traffic& sent = r.estimate().traffic;
  if (sent.payload() > 0) {
    std::string apart;
    if (r.estimate().traffic_by_axis.size() > 1)
      for (const auto& [axis, bytes] : r.estimate().traffic_by_axis)
        if (bytes.payload() > 0)
          apart += cat(apart.empty() ? ", " : " and ", human_bytes(bytes.payload()),
                       apart.empty() ? " of it in the " : " in the ", comm::name_of(axis), " group");
    moved += cat("\n", r.stages.size() > 1 ? "this" : "each", " rank sends ", human_bytes(sent.payload()),
                 " to others per step", apart, "\n");
  }
  if (r.estimate().io.read + r.estimate().io.written > 0)
    moved += cat("\neach rank reads ", human_bytes(r.estimate().io.read), " from NVMe and writes ",
                 human_bytes(r.estimate().io.written), " per step\n");
  if (const auto& before = r.estimate().warm_up) {
    moved += cat("\nup to freeze_step ", before->steps, " it sends ", human_bytes(before->sent));
    if (before->io.read + before->io.written > 0)
      moved += cat(", reads ", human_bytes(before->io.read), " and writes ", human_bytes(before->io.written));
    moved += " per step\n";
  }
  if (r.estimate().snapshot > 0)
    moved +=
        r.estimate().snapshot_fits
            ? cat("\ncheckpoints are written while training goes on, from a copy in host memory of ",
                  human_bytes(r.estimate().snapshot), " (training.save_async)\n")
            : cat("\ncheckpoints are written while training waits: the copy for doing so beside it, ",
                  human_bytes(r.estimate().snapshot), ", does not fit within device.host_memory_limit\n");
  if (r.estimate().copy_buffers > 0)
    moved += cat("\ncopies of local checkpoints travel through ", human_bytes(r.estimate().copy_buffers),
                 " of host memory\n");
  if (r.estimate().local_checkpoints > 0)
    moved += cat("\nlocal checkpoints count twice, as the older go when the newer are whole",
                 r.world.machines() > 1 ? ", with the copies that a rank keeps for another machine" : "",
                 "; in a folder in memory they come on top of resident memory\n");
  if (const auto local = planning::local_shortfall(r.config, r.stages, r.world, r.machine))
    moved += cat("too little room: ", local->text(), "\n");
  if (!r.estimate().schedule.empty()) moved += cat("\n", r.estimate().schedule, "\n");
  return heading(r) + rank_table(r) + world_table(r) + moved + verdict(r);
}

std::string json_of(const EstimateReport& r) {
  OrderedJson out;
  out["parameters"] = r.parameters;
  out["ranks"] = r.world.ranks;
  out["ranks_per_machine"] = r.world.local_ranks;
  out["rank"] = r.rank;
  out["layout"] = {{"tensor", r.config.parallel.tensor},
                   {"context", r.config.parallel.context},
                   {"data", engine::data_ranks(r.config, r.world.ranks)},
                   {"pipeline", r.config.parallel.pipeline}};
  out["device"] = r.machine.on_gpus ? "cuda" : "cpu";
  for (int t = 0; t < device::tier_count; ++t) {
    const auto &states = memory_of(r.estimate().states, t), &peaks = memory_of(r.estimate().peaks, t);
    OrderedJson& tier = out["tiers"][std::string(device::name_of(static_cast<Tier>(t)))];
    tier["before_steps"] = by_category(states.current, states.total_current);
    tier["peak"] = by_category(peaks.peak, peaks.total_peak);
    tier["peak_of_machine"] = planning::most_on_a_machine(
        planning::by_stage(
            r.stages, [&](const engine::Estimate& stage) { return memory_of(stage.peaks, t).total_peak; }),
        r.world);
  }
  const std::uint64_t resident = planning::resident_bytes(r.estimate());
  out["resident"] = {{"held", r.estimate().peaks.held},
                     {"exchange", r.estimate().exchange},
                     {"process_itself", planning::process_itself},
                     {"total", resident},
                     {"of_machine", planning::most_on_a_machine(
                                        planning::by_stage(r.stages, planning::resident_bytes), r.world)}};
  if (r.machine.on_gpus)
    out["beside_the_books"] = {{"cuda", planning::untracked_of_cuda},
                               {"nccl", planning::untracked_for_nccl(r.config.parallel, r.world, r.machine)}};
  const comm::Traffic& sent = r.estimate().traffic;
  out["per_step"] = {{"all_reduce_bytes", sent.all_reduce},         {"all_gather_bytes", sent.all_gather},
                     {"reduce_scatter_bytes", sent.reduce_scatter}, {"all_to_all_bytes", sent.all_to_all},
                     {"broadcast_bytes", sent.broadcast},           {"p2p_bytes", sent.p2p},
                     {"read_bytes", r.estimate().io.read},          {"write_bytes", r.estimate().io.written}};
  for (const auto& [axis, bytes] : r.estimate().traffic_by_axis)
    out["per_step"]["axes"][std::string(comm::name_of(axis))] = bytes.payload();
  if (const auto& before = r.estimate().warm_up)
    out["per_step_up_to_freeze_step"] = {{"steps", before->steps},
                                         {"sent_bytes", before->sent},
                                         {"read_bytes", before->io.read},
                                         {"write_bytes", before->io.written}};
  if (r.estimate().snapshot > 0)
    out["snapshot"] = {{"bytes", r.estimate().snapshot}, {"fits", r.estimate().snapshot_fits}};
  if (r.estimate().local_checkpoints > 0)
    out["local_checkpoints"] = {
        {"bytes", r.estimate().local_checkpoints},
        {"of_machine", planning::most_on_a_machine(planning::by_stage(r.stages, local_bytes), r.world)},
        {"folder", r.config.training.local_save_dir},
        {"buffers", r.estimate().copy_buffers}};
  out["stages"] = OrderedJson::array();
  for (const engine::Estimate& stage : r.stages) {
    OrderedJson peaks;
    for (int t = 0; t < device::tier_count; ++t)
      peaks[std::string(device::name_of(static_cast<Tier>(t)))] = memory_of(stage.peaks, t).total_peak;
    out["stages"].push_back({{"peak", peaks}, {"resident", planning::resident_bytes(stage)}});
  }
  if (r.stages.size() > 1) out["bubble"] = r.estimate().bubble;
  out["fits"] = r.missing.empty();
  out["missing"] = OrderedJson::array();
  for (const planning::Shortfall& shortfall : r.missing)
    out["missing"].push_back(
        {{"what", shortfall.what}, {"needed", shortfall.needed}, {"available", shortfall.available}});
  out["change"] = OrderedJson::array();
  for (const std::string& override : r.remedy.overrides()) out["change"].push_back(override);
  if (r.remedy.slow_down) out["slow_down"] = *r.remedy.slow_down, out["rates"] = r.rates.name;
  if (r.step_seconds > 0) out["step_s"] = r.step_seconds;
  if (!r.not_priced.empty()) out["not_priced"] = r.not_priced;
  return out.dump(2) + "\n";
}

}  // namespace sherd::cli
