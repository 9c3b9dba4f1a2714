#include "planning/fit.h"

#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <limits>
#include <string_view>

#include "base/error.h"
#include "base/log.h"
#include "base/text/excerpt.h"
#include "comm/dry/dry_world.h"
#include "comm/memory.h"
#include "device/cuda.h"
#include "engine/checkpoint/local/local_folder.h"
#include "engine/pipeline/stage_layout.h"
#include "engine/report/machine.h"
#include "engine/setup/make_device.h"
#include "engine/setup/process_grid.h"
#include "models/gpt.h"

namespace sherd::planning {
namespace {

namespace fs = std::filesystem;
using device::Category;
using device::Tier;

std::uint64_t first_number(const char* file) {
  std::uint64_t value = 0;
  std::ifstream(file) >> value;
  return value;
}

/// Sum of the lines of a control group's memory.stat that count cached pages of files, which the kernel gives
/// back when asked.
std::uint64_t reclaimable(const char* file, std::initializer_list<std::string_view> names) {
  std::ifstream in(file);
  std::uint64_t sum = 0, value = 0;
  for (std::string name; in >> name >> value;)
    if (std::find(names.begin(), names.end(), name) != names.end()) sum += value;
  return sum;
}

/// Bytes that the machine, and the control group's limit where there is one, have left. At least 1: 0 means
/// unknown.
std::uint64_t memory_now() {
  const engine::MemorySizes sizes = engine::memory_sizes();
  if (sizes.limit == 0) return sizes.available + sizes.swap;
  std::uint64_t used = first_number("/sys/fs/cgroup/memory.current");
  std::uint64_t cached = reclaimable("/sys/fs/cgroup/memory.stat", {"active_file", "inactive_file"});
  if (used == 0) {
    used = first_number("/sys/fs/cgroup/memory/memory.usage_in_bytes");
    cached = reclaimable("/sys/fs/cgroup/memory/memory.stat", {"total_active_file", "total_inactive_file"});
  }
  used -= std::min(used, cached);
  return std::max<std::uint64_t>(1, std::min(sizes.available, sizes.limit - std::min(used, sizes.limit)));
}

/// The folder, or the nearest one above it that exists.
fs::path existing(const std::string& folder) {
  std::error_code ignored;
  fs::path at = fs::absolute(folder, ignored);
  while (!fs::exists(at, ignored) && at.has_relative_path()) at = at.parent_path();
  return at;
}

std::uint64_t free_space_of(const std::string& folder) {
  const fs::path at = existing(folder);
  struct statvfs system {};
  if (::statvfs(at.c_str(), &system) != 0) return 0;
  std::uint64_t bytes = static_cast<std::uint64_t>(system.f_bavail) * system.f_frsize;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(at / "sherd-swap", error)) {
    struct stat file {};
    if (::stat(entry.path().c_str(), &file) == 0) bytes += static_cast<std::uint64_t>(file.st_blocks) * 512;
  }
  return std::max<std::uint64_t>(1, bytes);
}

/// Bytes of the local checkpoints that are there already: of this run, or removed when it begins.
std::uint64_t local_checkpoints_there(const config::Training& training) {
  const std::string prefix = engine::local_folder_prefix(training.save_dir);
  std::uint64_t bytes = 0;
  std::error_code error, unknown;
  for (fs::recursive_directory_iterator at(existing(training.local_save_dir), error), end;
       !error && at != end; at.increment(error)) {
    if (at.depth() == 0 && !at->path().filename().string().starts_with(prefix))
      at.disable_recursion_pending();
    else if (at->is_regular_file(unknown))
      bytes += at->file_size(unknown);
  }
  return bytes;
}

bool is_in_memory(const std::string& folder) {
  constexpr auto tmpfs = 0x01021994;
  struct statfs system {};
  return ::statfs(existing(folder).c_str(), &system) == 0 && system.f_type == tmpfs;
}

std::uint64_t device_of(const std::string& folder) {
  struct stat found {};
  return ::stat(existing(folder).c_str(), &found) == 0 ? static_cast<std::uint64_t>(found.st_dev) : 0;
}

const engine::MemoryReport::TierMemory& peak_of(const engine::Estimate& estimate, Tier tier) {
  return estimate.peaks.tiers[static_cast<std::size_t>(tier)];
}

/// Bytes that go to the file systems of offload_param and offload_optimizer.
std::vector<std::pair<std::string, std::uint64_t>> files_of(const config::Config& config,
                                                            const engine::Estimate& estimate) {
  const auto& memory = peak_of(estimate, Tier::nvme);
  const config::Offload &parameters = config.zero.offload_param, &optimizer = config.zero.offload_optimizer;
  const bool both =
      parameters.device == config::OffloadDevice::nvme && optimizer.device == config::OffloadDevice::nvme;
  if (parameters.nvme_path.empty() && optimizer.nvme_path.empty()) return {};
  if (!both || device_of(parameters.nvme_path) == device_of(optimizer.nvme_path))
    return {{parameters.device == config::OffloadDevice::nvme || optimizer.nvme_path.empty()
                 ? parameters.nvme_path
                 : optimizer.nvme_path,
             memory.total_peak}};
  const std::uint64_t mine = memory.peak[static_cast<std::size_t>(Category::parameters)];
  return {{parameters.nvme_path, mine}, {optimizer.nvme_path, memory.total_peak - mine}};
}

/// Throws Error{config} for sizes that each are allowed and together are beyond any machine, whose bytes a
/// number might not hold.
void require_countable(const models::GptConfig& shape, std::int64_t rows) {
  constexpr double most_parameters = 1e14, most_activations = 1e15;
  const auto real = [](std::int64_t number) { return static_cast<double>(number); };
  if (const double parameters = real(shape.num_parameters()); parameters > most_parameters)
    fail(ErrorKind::config, "the model has ", engine::human_count(parameters), " parameters, and at most ",
         engine::human_count(most_parameters),
         " are supported: lower model.num_layers, model.hidden_size, model.ffn_hidden_size or "
         "model.vocab_size");
  const double tokens = real(rows) * real(shape.seq_length);
  const double per_token =
      real(shape.num_layers) * (16 * real(shape.hidden_size) + 4 * real(shape.ffn_hidden_size)) +
      real(shape.padded_vocab());
  if (tokens * per_token > most_activations)
    fail(ErrorKind::config, "a micro-batch of ", rows, " samples of ", shape.seq_length, " tokens makes ",
         engine::human_count(tokens * per_token), " activations, and at most ",
         engine::human_count(most_activations),
         " are supported: lower train_micro_batch_size_per_gpu or model.seq_length");
}

/// NCCL's memory on a stage between two others, which training sends to and receives from on a communicator
/// for each way, and evaluation on a third. With two stages, one neighbour; the last one receives more.
std::uint64_t nccl_of_stages(const config::Parallel& parallel, const World& world, int channels) {
  if (parallel.pipeline == 1) return 0;
  const bool one_neighbour = parallel.pipeline == 2 && parallel.virtual_stages == 1;
  const int sends = one_neighbour ? 1 : 3, receives = one_neighbour ? 2 : 3;
  const std::uint64_t near = comm::nccl_pairs_memory(sends, receives, true, channels);
  if (world.machines() == 1) return near;
  return std::max(near, comm::nccl_pairs_memory(sends, receives, false, channels));
}

/// Throws one error of all sizes that do not fit the world or the model, each of which is checked again by
/// whoever needs it, alone.
void raise_sizes(const config::Config& config, const models::GptConfig& shape, int ranks) {
  Problems problems;
  problems.attempt([&] { (void)comm::Grid(ranks, engine::grid_sizes(config)); });
  if (problems.size() == 0)
    problems.attempt([&] { config::resolve_batch(config, engine::data_ranks(config, ranks)); });
  const config::Parallel& parallel = config.parallel;
  const auto tensor = comm::make_dry_world(0, parallel.tensor);
  const auto context = comm::make_dry_world(0, parallel.context);
  models::check_layout(shape,
                       {.tensor = tensor.get(),
                        .context = context.get(),
                        .sequence_parallel = parallel.sequence_parallel,
                        .context_method = parallel.context_method},
                       problems);
  if (parallel.pipeline > 1 || parallel.virtual_stages > 1)
    problems.attempt([&] {
      models::Gpt whole(shape);
      engine::make_stage_layout(whole, parallel, 0);
    });
  problems.raise();
}

}  // namespace

MachineCapacity this_machine(const config::Config& config) {
  MachineCapacity machine{memory_now(), free_space_of, engine::meant_for_gpus(config)};
  if (!machine.on_gpus) return machine;
  for (const device::CudaGpu& gpu : device::cuda_status().gpus) {
    machine.gpu_memory = machine.gpus == 0 ? gpu.memory : std::min(machine.gpu_memory, gpu.memory);
    ++machine.gpus;
  }
  return machine;
}

MachineCapacity this_machine(const config::Config& config, const engine::GpuSharing& sharing) {
  MachineCapacity machine = this_machine(config);
  if (sharing.ranks_here > 0) machine.gpu_memory = sharing.memory, machine.ranks_per_gpu = sharing.ranks_here;
  return machine;
}

std::uint64_t MachineCapacity::sharing(const World& world) const {
  if (ranks_per_gpu > 0) return static_cast<std::uint64_t>(ranks_per_gpu);
  return gpus > 0 ? static_cast<std::uint64_t>((world.local_ranks + gpus - 1) / gpus) : 0;
}

std::uint64_t untracked_for_nccl(const config::Parallel& parallel, const World& world,
                                 const MachineCapacity& machine) {
  if (!machine.on_gpus || machine.sharing(world) > 1) return 0;
  const int channels = comm::nccl_channels();
  return comm::nccl_memory(world.ranks, world.local_ranks, channels) +
         nccl_of_stages(parallel, world, channels);
}

std::uint64_t resident_bytes(const engine::Estimate& estimate) {
  return estimate.peaks.held + estimate.exchange + process_itself;
}

std::string Shortfall::text() const {
  return cat(what, " needs ", engine::human_bytes(needed), " and ", source, " ",
             engine::human_bytes(available), ": ", engine::human_bytes(needed - available), " too little");
}

std::uint64_t most_on_a_machine(const std::vector<std::uint64_t>& bytes, const World& world) {
  constexpr std::uint64_t most = std::numeric_limits<std::uint64_t>::max();
  const int stage_ranks = world.ranks / static_cast<int>(bytes.size());
  const auto stage_of = [&](int rank) { return static_cast<std::size_t>(rank / stage_ranks); };
  std::uint64_t largest = 0;
  for (int machine = 0; machine < world.machines(); ++machine) {
    const int begin = machine * world.local_ranks;
    const int end = std::min(world.ranks, begin + world.local_ranks);
    std::uint64_t sum = 0;
    for (int rank = begin; rank < end;) {
      const int next = std::min(end, (rank / stage_ranks + 1) * stage_ranks);
      std::uint64_t part = 0;
      if (__builtin_mul_overflow(bytes[stage_of(rank)], static_cast<std::uint64_t>(next - rank), &part) ||
          __builtin_add_overflow(sum, part, &sum))
        return most;
      rank = next;
    }
    largest = std::max(largest, sum);
    if (bytes.size() == 1) break;  // machines are alike
  }
  return largest;
}

namespace {

/// Bytes that the ranks of a machine will add to its folder of local checkpoints.
std::uint64_t local_checkpoints_to_come(const config::Config& config, const StageEstimates& stages,
                                        const World& world) {
  const std::uint64_t all =
      most_on_a_machine(by_stage(stages, [](const auto& stage) { return stage.local_checkpoints; }), world);
  return all == 0 ? 0 : all - std::min(all, local_checkpoints_there(config.training));
}

}  // namespace

std::optional<Shortfall> local_shortfall(const config::Config& config, const StageEstimates& stages,
                                         const World& world, const MachineCapacity& machine) {
  const std::string& folder = config.training.local_save_dir;
  const std::uint64_t needed = local_checkpoints_to_come(config, stages, world);
  const std::uint64_t there = needed > 0 && machine.free_space ? machine.free_space(folder) : 0;
  if (there == 0 || needed <= there) return {};
  return Shortfall{cat("a local checkpoint and the one before it in ", folder), "the file system has", needed,
                   there};
}

std::vector<Shortfall> shortfalls(const config::Config& config, const StageEstimates& stages,
                                  const World& world, const MachineCapacity& machine) {
  std::vector<Shortfall> out;
  const auto check = [&](std::string what, std::string source, std::uint64_t needed,
                         std::uint64_t available) {
    if (available > 0 && needed > available)
      out.push_back({std::move(what), std::move(source), needed, available});
  };
  const auto of_rank = [&](Tier tier) {
    const auto bytes = by_stage(stages, [&](const auto& stage) { return peak_of(stage, tier).total_peak; });
    return *std::max_element(bytes.begin(), bytes.end());
  };
  const std::string each = stages.size() > 1 ? "of the fullest rank" : "of each rank";
  check("the device tier " + each, "device.device_memory_limit allows", of_rank(Tier::device),
        config.device.device_memory_limit);
  check("the host tier " + each, "device.host_memory_limit allows", of_rank(Tier::host),
        config.device.host_memory_limit);
  const std::uint64_t sharing = machine.sharing(world);
  check(sharing > 1 ? cat("the memory of a GPU, shared by ", sharing, " ranks,") : "the memory of a GPU",
        "there is",
        sharing *
            (of_rank(Tier::device) + untracked_of_cuda + untracked_for_nccl(config.parallel, world, machine)),
        machine.gpu_memory);
  const std::uint64_t local =
      is_in_memory(config.training.local_save_dir) ? local_checkpoints_to_come(config, stages, world) : 0;
  check(world.local_ranks > 1 ? cat("the memory of this machine, shared by ", world.local_ranks, " ranks,")
                              : "the memory of this machine",
        "there is", most_on_a_machine(by_stage(stages, resident_bytes), world) + local, machine.memory);
  const auto files = files_of(config, stages[0]);
  for (std::size_t i = 0; i < files.size(); ++i) {
    const auto bytes = by_stage(stages, [&](const auto& stage) { return files_of(config, stage)[i].second; });
    const std::string& folder = files[i].first;
    check(cat("the nvme tier in ", folder), "the file system has", most_on_a_machine(bytes, world),
          machine.free_space(folder));
  }
  return out;
}

std::uint64_t device_room(const config::Config& config, const World& world, const MachineCapacity& machine) {
  constexpr std::uint64_t any = std::numeric_limits<std::uint64_t>::max();
  const std::uint64_t limit = config.device.device_memory_limit, sharing = machine.sharing(world);
  std::uint64_t room = limit > 0 ? limit : any;
  if (sharing > 0 && machine.gpu_memory > 0) {
    const std::uint64_t each = machine.gpu_memory / sharing,
                        untracked = untracked_of_cuda + untracked_for_nccl(config.parallel, world, machine);
    room = std::min(room, std::max(each, untracked + 1) - untracked);
  }
  return room == any ? 0 : room;
}

tensor::Batch dry_batch(const config::Config& config, std::int64_t rows, device::Device& device) {
  const std::int64_t tokens = rows * config.model->seq_length;
  const auto ids = [&] {
    return tensor::Tensor::empty(device, {rows, config.model->seq_length}, DType::i32);
  };
  tensor::Batch out{{"tokens", ids()}, {"labels", ids()}};
  if (config.objective() == config::Objective::seq2seq)
    out["source_lengths"] =
        tensor::Tensor::on_host(device, {rows}, DType::i32, device::Category::activations);
  if (config.keeps_texts_apart()) out["positions"] = ids();
  if (config.learns_preferences())
    out["sides"] = tensor::Tensor::on_host(device, {2 * rows}, DType::i32, device::Category::activations);
  if (config.model->pairs_texts()) out["sentence_labels"] = ids(), out["token_types"] = ids();
  if (config.objective() != config::Objective::mlm) return out;
  // As many as hardly any batch has more of.
  const double share = config.training.mlm_probability, n = static_cast<double>(tokens);
  const double most = n * share + 3 * std::sqrt(n * share * (1 - share));
  out["targets"] =
      tensor::Tensor::on_host(device, {std::min(tokens, static_cast<std::int64_t>(std::ceil(most)))},
                              DType::i32, device::Category::activations);
  return out;
}

engine::Estimate estimate_rank(const config::Config& config, std::int64_t vocabulary, const World& world,
                               int rank, const engine::EstimateScope& scope) {
  const models::GptConfig shape = models::gpt_config(config, vocabulary);
  const std::int64_t rows =
      config::resolve_batch(config, engine::data_ranks(config, world.ranks)).micro_batch_size;
  require_countable(shape, rows);
  const auto batch = [&, rows](device::Device& device) { return dry_batch(config, rows, device); };
  const auto model = [&](const parallel::Layout& layout) {
    return std::make_shared<models::Gpt>(shape, layout);
  };
  return engine::estimate(config, model, batch,
                          {.ranks = world.ranks, .local_ranks = world.local_ranks, .rank = rank}, scope);
}

StageEstimates estimate_stages(const config::Config& config, std::int64_t vocabulary, const World& world,
                               std::optional<int> rank, engine::EstimateScope scope, bool outer_alone) {
  try {
    const comm::Grid grid(world.ranks, engine::grid_sizes(config));
    const auto device_peak = [](const engine::Estimate& of) { return of.peaks.tiers[0].total_peak; };
    const std::vector<int> ranks = grid.members(comm::Axis::pipeline, rank.value_or(0));
    StageEstimates out;
    for (const int other : ranks) {
      if (outer_alone && out.size() > 1 && other != ranks.back()) {
        out.push_back(out.back());
        continue;
      }
      out.push_back(estimate_rank(config, vocabulary, world, other, scope));
      scope.values = out.back().values;
      if (rank || grid.size(comm::Axis::replica) <= 2) continue;
      engine::Estimate last = estimate_rank(
          config, vocabulary, world,
          other + (grid.size(comm::Axis::replica) - 1) * grid.stride(comm::Axis::replica), scope);
      if (device_peak(last) > device_peak(out.back())) out.back() = std::move(last);
    }
    return out;
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::config)
      raise_sizes(config, models::gpt_config(config, vocabulary), world.ranks);
    throw;
  }
}

void require_fit(const Reparse& reparse, std::int64_t vocabulary, const World& world,
                 const MachineCapacity& machine) {
  const config::Config config = reparse({});
  const StageEstimates stages = estimate_stages(config, vocabulary, world);
  if (const auto local = local_shortfall(config, stages, world, machine))
    log_warning(local->text(),
                ": where it is full, none is made, and the run goes on (training.local_save_interval)");
  const std::vector<Shortfall> missing = shortfalls(config, stages, world, machine);
  if (missing.empty()) return;
  std::string text = joined_text(missing, "; ", &Shortfall::text);
  const auto of_host = [](const Shortfall& shortfall) {
    return shortfall.what.starts_with("the memory of this machine");
  };
  if (std::any_of(missing.begin(), missing.end(), of_host) && engine::memory_may_grow())
    text += "; where this machine's memory grows as it is used, SHERD_MACHINE_MEMORY=128GB tells its size";
  const Remedy remedy = cheapest_remedy(reparse, vocabulary, world, machine);
  const bool uses_nvme = config.zero.offload_optimizer.device == config::OffloadDevice::nvme ||
                         config.zero.offload_param.device == config::OffloadDevice::nvme;
  fail(ErrorKind::memory, "this run does not fit: ", text, ". ",
       remedy.keys.empty() ? cat("No key that `sherd estimate` knows makes it fit: use ",
                                 uses_nvme ? "an nvme_path on a drive with more room, " : "",
                                 "more ranks on other machines, a smaller model or shorter sequences")
                           : cat("Cheapest change that fits: ", remedy.line()),
       " (`sherd estimate` shows the numbers)");
}

}  // namespace sherd::planning
