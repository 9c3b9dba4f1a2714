#pragma once

#include <span>

#include "device/device.h"
#include "device/stream.h"
#include "optim/update_rule.h"

// update() and the conversions of masters where the memory is: on the processor's threads for memory that it
// reads, by kernels of a GPU for the GPU's own. All memory of one span lies on one side. Kernels are queued
// on the device's compute stream; what the processor is to read must have arrived (Device::synchronize()).
// The same bits on either side, NaNs apart.

namespace sherd::optim {

/// Whether everything that a series of updates wrote is finite, asked once at its end, so that a GPU need not
/// be waited for after each. Where one is given something, books 4 bytes of the host tier as workspace.
class FiniteCheck {
 public:
  explicit FiniteCheck(device::Device& device) : device_(device) {}
  /// Waits for the series where it was given to a GPU, not for later work, and begins anew. False when an
  /// updated weight, its 16-bit form or a moment became NaN or infinite (update_rule.h).
  bool finite();
  /// The processor has found something that is not finite.
  void fail() { failed_ = true; }

 private:
  friend void update(std::span<const SpanUpdate>, const Hyper&, std::int64_t, device::Device&, FiniteCheck&);
  unsigned* word();

  device::Device& device_;
  bool failed_ = false;     ///< on the processor
  device::Storage memory_;  ///< a word that a GPU writes; empty before it was given anything
  device::Event done_;      ///< behind all that was given to a GPU
};

/// Runs update() of update_rule.h for each of the spans; `check` tells later whether all results are finite.
/// Spans on a GPU share kernels: one for every 32 that differ in nothing but memory, decay and rounding.
void update(std::span<const SpanUpdate> spans, const Hyper& hyper, std::int64_t step, device::Device& device,
            FiniteCheck& check);

/// The same as split_master() of split_master.h.
void split_master(const float* master, void* high, std::uint16_t* low, std::int64_t n,
                  device::Device& device);
/// Rounds fp32 masters to `dtype`: bf16 to nearest with ties away from zero, fp16 to nearest even, fp32 as
/// is.
void round_masters(const float* master, void* to, DType dtype, std::int64_t n, device::Device& device);

}  // namespace sherd::optim
