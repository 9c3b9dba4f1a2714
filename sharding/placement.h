#pragma once

#include "base/dtype.h"
#include "device/ledger.h"

namespace sherd::config {
struct Config;
}

namespace sherd::sharding {

/// Whether each rank of the data-parallel group holds all of a state, or its shard.
enum class Spread : std::uint8_t { replicated, sharded };

/// Where one kind of model state lies on a rank, and with which dtype.
struct Placement {
  Spread spread = Spread::replicated;
  device::Tier tier = device::Tier::device;
  DType dtype = DType::f32;
};

/// How the fp32 weights that the optimizer updates are kept.
enum class MasterForm : std::uint8_t {
  in_parameters,  ///< the compute parameters are fp32
  separate,       ///< fp32, beside 16-bit parameters
  split  ///< the bf16 parameter is the high half, beside it lie the 16 low bits (optim/split_master.h)
};

/// The placement of every kind of model state. A ZeRO stage is one such table and nothing else: no code but
/// make_placements() looks at the stage number (Rajbhandari et al. 2020, table 1, as rows). The same holds
/// for offload (Ren et al. 2021, ZeRO-Offload; Rajbhandari et al. 2021, ZeRO-Infinity): it is the column of
/// tiers.
struct PlacementTable {
  /// Forward and backward compute with them; they are gathered to the device wherever they live.
  Placement parameters;
  Placement gradients;  ///< they accumulate over micro-batches, in grad_accum_dtype
  Placement masters;    ///< the optimizer's weights, by master_form
  Placement moments;    ///< the optimizer's own tensors, fp32 or bf16
  MasterForm master_form = MasterForm::in_parameters;
  DType communication = DType::f32;  ///< reduced gradients are rounded to this once (communication_data_type)

  /// Gradients kept as shards have to be reduced after each micro-batch; replicated ones only at the
  /// boundary.
  bool reduce_every_micro_batch() const { return gradients.spread == Spread::sharded; }
};

/// The table for a validated configuration.
PlacementTable make_placements(const config::Config& config);

/// The table of a ZeRO stage (0–3) with everything on the device tier.
PlacementTable make_placements(int stage, DType compute, DType grad_accumulation, DType communication,
                               bool split_masters = true);

}  // namespace sherd::sharding
