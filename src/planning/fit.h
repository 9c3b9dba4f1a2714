#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "config/config.h"
#include "config/machine.h"
#include "engine/estimate/estimate.h"
#include "engine/setup/make_device.h"

namespace sherd::planning {

/// The world that a run is planned for.
struct World {
  int ranks = 1;
  int local_ranks = 1;  ///< on each machine
  int machines() const { return (ranks + local_ranks - 1) / local_ranks; }
};

/// A machine of the run, in bytes.
struct MachineCapacity {
  std::uint64_t memory = 0;  ///< that could be taken now; 0: unknown
  /// The bytes that files in a folder could take; 0: unknown.
  std::function<std::uint64_t(const std::string& folder)> free_space;
  bool on_gpus = false;  ///< GPUs hold the device tier; else it is the machine's memory
  /// GPUs here, and the memory of the smallest; 0: unknown, as where a run for others is planned.
  int gpus = 0;
  std::uint64_t gpu_memory = 0;
  /// Ranks on this rank's GPU, whose memory gpu_memory then is; 0: as `gpus` and the ranks of a machine make
  /// it.
  int ranks_per_gpu = 0;
  /// Ranks of `world` on one of these GPUs; 0: unknown.
  std::uint64_t sharing(const World& world) const;
  /// Whether it is known what the device tier has: not for GPUs that are elsewhere, unless the configuration
  /// says.
  bool knows_devices(const config::Config& config) const {
    return !on_gpus || gpus > 0 || config.device.device_memory_limit > 0;
  }
};
/// This machine, now, as a run of `config` would use it. Scratch files that earlier runs left count as free.
MachineCapacity this_machine(const config::Config& config);
/// The same for one of the ranks of a launcher, which may show each of them a GPU of its own.
MachineCapacity this_machine(const config::Config& config, const engine::GpuSharing& sharing);

/// Something that has less than a run needs.
struct Shortfall {
  /// "the device tier of each rank", "the memory of this machine", "the file system of /scratch".
  std::string what;
  std::string source;  ///< names the source of the limit: "device.device_memory_limit"
  std::uint64_t needed = 0, available = 0;
  /// "the device tier of each rank needs 3.1 GiB and device.device_memory_limit allows 2.0 GiB: 1.1 GiB too
  /// little"
  std::string text() const;
};

/// Bytes that CUDA and cuDNN take of a GPU for themselves, for each rank on it: most of it contexts, more
/// than is usual.
inline constexpr std::uint64_t untracked_of_cuda = std::uint64_t{1} << 30;

/// Bytes that NCCL takes of a GPU for itself (comm/memory.h): 0 on CPUs, for one rank, and where ranks share
/// GPUs, which they do without NCCL. The communicators of all ranks, and those of the pairs of pipeline
/// stages.
std::uint64_t untracked_for_nccl(const config::Parallel& parallel, const World& world,
                                 const MachineCapacity& machine);

/// An allowance for what a rank's process holds beside what is tracked: the data of program and
/// libraries, code that oneDNN makes, threads' stacks, the tokenizer, the ends of shared windows. The runs of
/// bench/resident_memory.py hold 2 to 11 MiB of it, most of it under mpirun. As if each rank were a process
/// of its own, which under `--ranks` it is not.
inline constexpr std::uint64_t process_itself = std::uint64_t{12} << 20;

/// Bytes of the processor's memory that one rank takes: all that its estimate tells of, what it exchanges
/// with others through (comm/memory.h), and the process itself.
std::uint64_t resident_bytes(const engine::Estimate& estimate);

/// The needs of a rank of each stage of a pipeline, in the order of stages, which hold as many ranks each;
/// without a pipeline one estimate, of all ranks.
using StageEstimates = std::vector<engine::Estimate>;
/// The bytes of a rank of each stage, as `bytes_of` gives them of its estimate.
template <class Bytes>
std::vector<std::uint64_t> by_stage(const StageEstimates& stages, const Bytes& bytes_of) {
  std::vector<std::uint64_t> out;
  for (const engine::Estimate& stage : stages) out.push_back(bytes_of(stage));
  return out;
}

/// `bytes` of a rank of each stage: what all ranks of the machine that has most of it take together. Of more
/// than a number holds the largest.
std::uint64_t most_on_a_machine(const std::vector<std::uint64_t>& bytes, const World& world);

/// Where a machine's folder of local checkpoints has too little room for them; a run goes on without.
std::optional<Shortfall> local_shortfall(const config::Config& config, const StageEstimates& stages,
                                         const World& world, const MachineCapacity& machine);

/// Where the most loaded rank, or the machine or GPU that it shares with others, has too little. On CPUs the
/// device and the host tier are both the machine's memory; what is untracked counts.
std::vector<Shortfall> shortfalls(const config::Config& config, const StageEstimates& stages,
                                  const World& world, const MachineCapacity& machine);

/// Bytes beyond which shortfalls() tells that a rank holds too much of the device; 0: unknown.
std::uint64_t device_room(const config::Config& config, const World& world, const MachineCapacity& machine);

/// A batch of a meta device as training has it, of `rows` sequences.
tensor::Batch dry_batch(const config::Config& config, std::int64_t rows, device::Device& device);

/// The estimate of one rank of the GPT that `config` describes. Throws what building it throws.
engine::Estimate estimate_rank(const config::Config& config, std::int64_t vocabulary, const World& world,
                               int rank, const engine::EstimateScope& scope = {});
/// Estimates the rank of each stage that has the place of `rank` in its own; without one, of the stage's
/// first rank, or its last replica's where that takes more of the device (they have other numbers of buckets
/// under way: sharding/gradients/turns.h).
/// `outer_alone`: only the first two stages and the last are looked at; those between are taken for the
/// second, than which they rarely hold more.
StageEstimates estimate_stages(const config::Config& config, std::int64_t vocabulary, const World& world,
                               std::optional<int> rank = {}, engine::EstimateScope scope = {},
                               bool outer_alone = false);

/// Keys to change, "a.b.c" and their values, and what that does, in words.
struct Remedy {
  std::vector<std::pair<std::string, std::string>> keys;
  std::vector<std::string> reasons;
  /// How much longer a step then takes, as a share of it; nothing where the rates do not tell.
  std::optional<double> slow_down{};
  /// "--set a.b.c=V --set …"
  std::string line() const;
  std::vector<std::string> overrides() const;
};

/// A configuration file by its keys, so that a few more can be tried.
using Reparse = std::function<config::Config(const std::vector<std::string>& overrides)>;

/// The machine by whose rates runs are priced where nobody names one: of A100s, or of a server's processors
/// (configs/machines).
config::Machine usual_machine(bool gpus);

/// A change of keys by which the run fits: the single one with the shortest steps (engine/estimate/
/// step_time.h), by the rates of `rates`, or of a usual machine; else as many as it takes, in the order of
/// their reach, without those that it takes not; without keys when none of those known do. None changes what
/// is computed but for the order of sums when the micro-batch shrinks. Each try is a dry run.
Remedy cheapest_remedy(const Reparse& reparse, std::int64_t vocabulary, const World& world,
                       const MachineCapacity& machine, const config::Machine* rates = nullptr);

/// Throws Error{memory} saying what the run lacks and the cheapest remedy, in one line, unless it fits.
void require_fit(const Reparse& reparse, std::int64_t vocabulary, const World& world,
                 const MachineCapacity& machine);

}  // namespace sherd::planning
