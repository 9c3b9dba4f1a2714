#pragma once

#include "optim/update_rule.h"
#include "tensor/exact_sum.h"
#include "tensor/kernels.h"

namespace sherd::optim {

/// Sums of squares over a logical parameter, or over a part of one: of the fp32 weight, and of what its rule
/// measures (LAMB's update without rate and trust, LARS's gradient). Exact sums of blocks of 64 elements, as
/// Kernels::sum_of_squares() makes them: how a parameter is cut at multiples of 64 does not show.
struct NormSums {
  tensor::ExactSum weight, measured;
  float ratio = 0;  ///< 1-bit LAMB's, see refresh_variance(); else 0
};

/// Adds what Phase::parameter_norms asks of a span to `sums`: what update() of the same arguments is going to
/// do is done to a copy, and the span stays as it is. Where the memory is, as update() of device_update.h; a
/// GPU is waited for. Throws Error{usage} as update() does.
void measure(const SpanUpdate& span, const Hyper& hyper, std::int64_t step, tensor::Kernels& kernels,
             NormSums& sums);

/// The same on the processor.
void measure(const SpanUpdate& span, const Hyper& hyper, std::int64_t step, Arena& arena, NormSums& sums,
             CpuIsa isa = cpu_isa());

/// Takes the memory that measure() does on a GPU for a span of `elements` with `states` moments, and gives it
/// back: for a device that only tracks it.
void charge_measure(device::Device& device, std::int64_t elements, DType moment_dtype, std::size_t states);

}  // namespace sherd::optim
