#pragma once

#include "base/dtype.h"
#include "device/ledger.h"

namespace sherd::config {
struct Config;
}

namespace sherd::sharding {

/// Whether each rank of the data-parallel group holds all of a state, or its shard.
enum class Spread : std::uint8_t { replicated, sharded };

/// Where one kind of model state lives on a rank, and as what.
struct Placement {
  Spread spread = Spread::replicated;
  device::Tier tier = device::Tier::device;
  DType dtype = DType::f32;
};

/// What every kind of model state does. A ZeRO stage is one such table and nothing else: no code but
/// make_placements() looks at the stage number (Rajbhandari et al. 2020, table 1, as rows).
struct PlacementTable {
  Placement parameters;  ///< what forward and backward compute with
  Placement gradients;   ///< what accumulates over micro-batches, in grad_accum_dtype
  Placement masters;     ///< fp32 weights the optimizer updates; in the parameters themselves where those are fp32
  Placement moments;     ///< the optimizer's own tensors, fp32
  bool separate_masters = false;       ///< masters are held beside the parameters
  DType communication = DType::f32;    ///< reduced gradients are rounded to this once (communication_data_type)

  /// Gradients kept as shards have to be reduced after each micro-batch; replicated ones only at the boundary.
  bool reduce_every_micro_batch() const { return gradients.spread == Spread::sharded; }
  /// An updated shard has to be gathered into the replicated parameters.
  bool gather_after_update() const {
    return parameters.spread == Spread::replicated && masters.spread == Spread::sharded;
  }
};

/// The table for a validated configuration.
PlacementTable make_placements(const config::Config& config);

/// The table of a ZeRO stage (0–3) with everything on the device tier.
PlacementTable make_placements(int stage, DType compute, DType grad_accumulation, DType communication);

}  // namespace sherd::sharding
