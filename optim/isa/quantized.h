#pragma once

#include "optim/isa/update_plan.h"
#include "optim/quantized.h"

namespace sherd::optim {

/// The map of an 8-bit code, as loops take it.
const DynamicMap& map_of(Code code);

/// update_with() of a span with 8-bit moments.
bool update_codes(CpuIsa isa, const SpanUpdate& span, const UpdatePlan& plan, Arena& arena);

}  // namespace sherd::optim
