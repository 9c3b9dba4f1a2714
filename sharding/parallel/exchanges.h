#pragma once

#include <functional>
#include <vector>

#include "comm/communicator.h"
#include "tensor/kernels.h"

namespace sherd::parallel {

using comm::Communicator;
using tensor::Tensor;

/// A collective under way, with the tensors that it reads and writes, and its result. Not synchronised.
class Exchange {
 public:
  Exchange() = default;
  /// `unpack`, called once `work` is done, puts what has come where it belongs in the result.
  Exchange(comm::Work work, std::vector<Tensor> buffers, Tensor result, std::function<void()> unpack = {})
      : work_(std::move(work)),
        buffers_(std::move(buffers)),
        result_(std::move(result)),
        unpack_(std::move(unpack)) {}
  Exchange(Exchange&&) = default;
  Exchange& operator=(Exchange&&) = delete;
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;
  /// Waits: nothing may write to buffers that are gone. Drops the error that wait() would have thrown.
  ~Exchange();
  /// The result, once it is there. Throws Error{comm} as comm::Work does.
  Tensor wait();

 private:
  comm::Work work_;
  std::vector<Tensor> buffers_;
  Tensor result_;
  std::function<void()> unpack_;
};

// Collectives along a dimension `dim` of contiguous tensors (negative ones count from the end), without a
// tape; with options.async they run beside what the rank does next. All throw Error{usage} naming the tensor,
// the dimension and the ranks where an extent does not divide.

/// Every rank's `x`, one after the other along `dim`.
Exchange begin_all_gather(tensor::Kernels& kernels, Communicator& group, const Tensor& x, int dim,
                          const comm::CallOptions& options);
/// This rank's part, along `dim`, of the sum of all ranks' `x`. Sums run in rank order in fp32 (fp64) and
/// round once.
Exchange begin_reduce_scatter(tensor::Kernels& kernels, Communicator& group, const Tensor& x, int dim,
                              const comm::CallOptions& options);
/// The sum of all ranks' `x`, in place.
Exchange begin_all_reduce(Communicator& group, const Tensor& x, const comm::CallOptions& options);
/// Part r of `x` along `split_dim` goes to rank r; what comes lies one after the other along `gather_dim`.
Tensor all_to_all(tensor::Kernels& kernels, Communicator& group, const Tensor& x, int split_dim,
                  int gather_dim, const comm::CallOptions& options);
/// A copy of this rank's part of `x` along `dim`; `label` names it in errors.
Tensor own_part(tensor::Kernels& kernels, const Communicator& group, const Tensor& x, int dim,
                const std::string& label);

/// There is nobody to exchange with.
inline bool alone(const Communicator* group) {
  return !group || group->size() == 1;
}

}  // namespace sherd::parallel
