#pragma once

#include <array>
#include <vector>

#include "config/machine.h"
#include "engine/estimate/part_work.h"

// Prices of work by a machine's rates. Pure functions; seconds throughout.
//
//   a product      its FLOPs by the rate of products that are like it (config::ProductRates), or its bytes
//   attention      its FLOPs by its share of a product's rate, and the scores that pass through memory
//   other kernels  their bytes by their family's bandwidth
//   a call         its bytes over each link that its ranks lie on, the slowest counts, and a latency for each
//                  doubling of ranks

namespace sherd::engine {

/// The rates of products in that type; of one that the file lacks those of another of 16 bits, or of more.
const config::ProductRates& products_of(DType dtype, const config::DeviceRates& rates);

double seconds_of(const tensor::KernelWork& work, const config::DeviceRates& rates);

/// The seconds of a communication call while all ranks of the machine make theirs. Volumes are a ring's
/// (Patarasuk and Yuan 2009): over a link that joins m blocks of r ranks of the group, (m − 1)/m of the whole
/// for r ranks together.
double seconds_of(const comm::CommWork& work, const config::Machine& machine);

/// A pass in seconds.
struct PassSeconds {
  double seconds = 0;  ///< until the pass ends
  /// Kernels alone, by family; their sum is what the pass takes without other ranks.
  std::array<double, tensor::kernel_families.size()> kernels{};
  double calls = 0;    ///< of all calls
  double exposed = 0;  ///< the part of them during which no kernel runs
  double flops = 0;    ///< of all kernels

  double computing() const;
};

/// The kernels of a pass that count: zero bubble runs weight gradients apart from the rest of backward.
enum class Counted : std::uint8_t { all, weight_gradients, others };

/// Kernels run one after the other; an asynchronous call runs beside those that follow it, behind the calls
/// before it; the pass ends with the last of either. Calls belong to `others`. The host queues works while
/// those before them run, and from where it reads what one made it has nothing queued.
PassSeconds price(const std::vector<Work>& pass, const config::Machine& machine,
                  const config::DeviceRates& rates, Counted which = Counted::all);

}  // namespace sherd::engine
