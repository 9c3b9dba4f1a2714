#include "sharding/placement.h"

#include "base/error.h"
#include "config/config.h"

namespace sherd::sharding {

using device::Tier;

PlacementTable make_placements(int stage, DType compute, DType grad_accumulation, DType communication,
                               bool split_masters) {
  require(stage >= 0 && stage <= 3, "ZeRO stages run from 0 to 3, not ", stage);
  const auto from = [stage](int first) { return stage >= first ? Spread::sharded : Spread::replicated; };
  PlacementTable table;
  table.master_form = compute == DType::f32                     ? MasterForm::in_parameters
                      : compute == DType::bf16 && split_masters ? MasterForm::split
                                                                : MasterForm::separate;
  table.parameters = {from(3), Tier::device, compute};
  table.gradients = {from(2), Tier::device, grad_accumulation};
  table.masters = {from(1), Tier::device, table.master_form == MasterForm::split ? DType::u16 : DType::f32};
  table.moments = {from(1), Tier::device, DType::f32};
  table.communication = communication;
  return table;
}

namespace {
Tier tier_of(config::OffloadDevice device) {
  switch (device) {
    case config::OffloadDevice::cpu:
      return Tier::host;
    case config::OffloadDevice::nvme:
      return Tier::nvme;
    case config::OffloadDevice::none:
      break;
  }
  return Tier::device;
}
}  // namespace

PlacementTable make_placements(const config::Config& config) {
  PlacementTable table =
      make_placements(config.zero.stage, config.precision.compute, config.precision.gradient_dtype(),
                      config.precision.communication_dtype(), config.training.split_masters);
  table.parameters.tier = tier_of(config.zero.offload_param.device);
  table.masters.tier = table.moments.tier = tier_of(config.zero.offload_optimizer.device);
  table.moments.dtype = config.training.moments_dtype;
  // An optimizer off the device takes its gradients there too. Replicated ones are needed where backward runs
  // until they are reduced; none go to NVMe, since every micro-batch adds to them.
  if (table.masters.tier != Tier::device && table.gradients.spread == Spread::sharded)
    table.gradients.tier = Tier::host;
  return table;
}

}  // namespace sherd::sharding
