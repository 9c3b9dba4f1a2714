#pragma once

#include <cstring>
#include <functional>
#include <memory>
#include <ostream>
#include <string>

#include "support/gpu/lazy_cuda.h"
#include "tests/comm/conformance.h"

/// Collectives on tensors of GPUs, on devices that do everything as late as marks allow
/// (support/gpu/lazy_cuda.h): a mark that is missing between two ranks, or between a rank's compute stream
/// and its collectives, shows as wrong numbers. For every way that tensors of GPUs travel.
namespace sherd::comm::streams {

/// One rank with its tensors on a lazy GPU.
class Rank {
 public:
  explicit Rank(Communicator& world) : comm(world), gpu(std::make_shared<sherd::testing::LazyCudaDevice>()) {
    comm.bind(gpu);
  }

  Tensor on_gpu(std::int64_t n, DType dtype) { return Tensor::empty(*gpu, {n}, dtype); }
  Tensor pinned(std::int64_t n, DType dtype) {
    return Tensor::empty(*gpu, {n}, dtype, device::Category::communication, device::Tier::host);
  }
  /// A kernel on the compute stream that writes this rank's test data.
  template <class T>
  void produce(const Tensor& x, int salt = 0) {
    gpu->submit(gpu->compute_stream(), [x, salt, r = comm.rank()] { conformance::fill<T>(x, r, salt); });
  }
  /// The tensor as a later kernel of the compute stream sees it.
  Tensor seen(const Tensor& x) {
    const Tensor out = pinned(x.numel(), x.dtype());
    gpu->copy(out.raw(), x.raw(), x.bytes());
    gpu->synchronize();
    return out;
  }
  /// Does as the tensor's next user on the compute stream.
  void overwrite(const Tensor& x) {
    gpu->submit(gpu->compute_stream(), [x] { std::memset(x.raw(), 0x77, x.bytes()); });
  }

  Communicator& comm;
  std::shared_ptr<sherd::testing::LazyCudaDevice> gpu;
};

/// How ranks are made, and whether they make their calls asynchronously.
struct StreamCase {
  std::string name;
  bool async;
  std::function<void(int ranks, const std::function<void(Communicator&)>&)> run;
};
inline void PrintTo(const StreamCase& way, std::ostream* out) {
  *out << way.name;
}

class GpuTensors : public ::testing::TestWithParam<StreamCase> {
 protected:
  void on_ranks(int ranks, const std::function<void(Rank&)>& body) const {
    GetParam().run(ranks, [&](Communicator& comm) {
      set_flush_denormals();
      Rank rank(comm);
      body(rank);
      comm.barrier();
    });
  }
  CallOptions options(const char* label) const {
    CallOptions out;
    out.label = label, out.async = GetParam().async;
    return out;
  }
};

}  // namespace sherd::comm::streams
