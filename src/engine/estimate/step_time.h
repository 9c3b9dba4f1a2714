#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "engine/estimate/price.h"
#include "sharding/instruction.h"

namespace sherd::engine {

/// The work of all parts of a model: each kind of part once, and which kind each part is.
struct ModelWork {
  std::vector<PartWork> kinds;
  std::vector<std::size_t> parts;
  /// By part: its share of the work, by which a pipeline is cut (part_weights()).
  std::vector<std::int64_t> weights;
  /// Which kind each part is for micro-batches that recompute nothing, where only some recompute
  /// (`training.recompute_micro_batches`); else empty.
  std::vector<std::size_t> keeping;

  const PartWork& part(std::size_t i) const { return kinds[parts[i]]; }
};

/// Where the time of a step goes, on the rank that computes longest. All but `seconds` and `flops` are of one
/// rank.
struct StepTime {
  double seconds = 0;  ///< from one step to the next
  std::array<double, tensor::kernel_families.size()> kernels{};
  double exchange = 0;  ///< layers' exchanges, during which no kernel runs
  double gather = 0;    ///< waiting for parameters
  double reduce = 0;    ///< waiting for sums of gradients
  double update = 0;    ///< the optimizer, and what it waits for
  double idle = 0;      ///< the pipeline's bubble, and transfers between stages
  double bubble = 0;    ///< `idle` over computing time, of all stages together
  double flops = 0;     ///< of products and attention of all ranks, without what is computed again
  double peak = 0;      ///< FLOP/s of all ranks by the data sheet

  double mfu() const { return peak > 0 ? flops / seconds / peak : 0; }
};

/// Throws Error{config} naming what the machine's file lacks for a configuration: rates of the tiers in which
/// its states live, a link that joins all ranks; and a family of kernels that there is none of.
void require_rates(const config::Config& config, const config::Machine& machine, int ranks);

/// The time of one optimizer step of `ranks` ranks. Nothing runs: the instruction lists of all stages are
/// simulated (sharding/schedule/simulate.h) with the prices of their parts' work, of what placements gather
/// and reduce, and of the update. `config` has its batch sizes resolved, and `model` was recorded with its
/// tensor, context and expert ranks, micro-batch and recompute. Throws what require_rates() throws, and
/// Error{config} for sizes that the ranks cannot hold.
StepTime step_time(const config::Config& config, const ModelWork& model, const config::Machine& machine,
                   int ranks);

/// The seconds of one micro-batch's passes through all parts of a model, but those before a step. A stage
/// that has a share of the parts computes for that share of them: no step of m micro-batches over p stages is
/// shorter than m/p of it. 0 where some micro-batches recompute and others do not.
double pass_seconds(const ModelWork& model, const config::Machine& machine, int ranks);

/// Bytes of memory that an update of Adam reads and writes per parameter: 28 in fp32.
double update_bytes(const config::Config& config);

/// Bytes of a rank of the fullest stage.
struct RoughMemory {
  double device = 0, host = 0;
};
/// States and what passes save, to leave out what cannot fit before estimate() says exactly: buffers of
/// exchanges, workspaces and much else are not in it, so a run holds more. Pure, as step_time() is.
RoughMemory rough_memory(const config::Config& config, const ModelWork& model, int ranks);

}  // namespace sherd::engine
