#pragma once

#include <functional>

#include "tensor/kernel_list.h"

namespace sherd::tensor {

/// The work of one kernel, as far as a machine's rates price it.
struct KernelWork {
  KernelFamily family = KernelFamily::movement;
  DType dtype = DType::f32;  ///< of the first tensor: what products and attention compute on
  /// Two for each multiply-add of a product, or of attention over the scores that some query sees; else 0.
  double flops = 0;
  /// Read and written, each tensor once; of tables and lists of rows, the rows that take part.
  double bytes = 0;
  /// Products: the result is [rows, columns], sums run over `depth`.
  std::int64_t rows = 0, columns = 0, depth = 0;
  bool fp8 = false;              ///< a product of operands in FP8
  bool weight_gradient = false;  ///< a product that sums over its operands' rows: aᵀ·b
  /// Attention alone: of all heads the scores that some query sees, and all pairs of queries and keys.
  /// `depth` is a head's width.
  double scores = 0, pairs = 0;
  /// Attention alone: of the sequence without a window whose queries see as many keys in the mean. Tiles of a
  /// window have as little between their begin and end as those of a short sequence.
  std::int64_t keys = 0;
  bool backward = false;    ///< attention alone
  bool host_reads = false;  ///< the host waits for what it makes before it queues more

  bool operator==(const KernelWork&) const = default;
};

/// Is told of the work of kernels, in order, from the rank's thread.
using TellKernelWork = std::function<void(const KernelWork&)>;

}  // namespace sherd::tensor
