#include "sharding/placement.h"

#include "base/error.h"
#include "config/config.h"

namespace sherd::sharding {

PlacementTable make_placements(int stage, DType compute, DType grad_accumulation, DType communication) {
  require(stage >= 0 && stage <= 3, "ZeRO stages run from 0 to 3, not ", stage);
  const auto from = [stage](int first) { return stage >= first ? Spread::sharded : Spread::replicated; };
  PlacementTable table;
  table.parameters = {from(3), device::Tier::device, compute};
  table.gradients = {from(2), device::Tier::device, grad_accumulation};
  table.masters = {from(1), device::Tier::device, DType::f32};
  table.moments = {from(1), device::Tier::device, DType::f32};
  table.separate_masters = compute != DType::f32;
  table.communication = communication;
  return table;
}

PlacementTable make_placements(const config::Config& config) {
  return make_placements(config.zero.stage, config.precision.compute, config.precision.gradient_dtype(),
                         config.precision.communication_dtype());
}

}  // namespace sherd::sharding
