#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <mutex>

#include "device/check_list.h"
#include "device/cuda/cuda_device.h"
#include "device/cuda/driver.h"

namespace sherd::device {
namespace {

using cuda::check_call;
using cuda::OnGpu;

/// Tell copies and zeros from other calls (LibraryCall::what).
constexpr char operations[2] = {};
constexpr const void *copies = operations, *zeros = operations + 1;

cudaMemoryType kind_of_memory(const void* data) {
  cudaPointerAttributes attributes{};
  check_call(cudaPointerGetAttributes(&attributes, data), "cudaPointerGetAttributes");
  return attributes.type;
}
/// Whether CUDA knows this memory: its own, or registered with it.
bool known_to_cuda(const void* data) {
  return kind_of_memory(data) != cudaMemoryTypeUnregistered;
}

/// Whether a failure to register memory says something of that memory, and not of the GPU.
bool refuses_to_lock(cudaError_t status) {
  switch (status) {
    case cudaErrorMemoryAllocation:
    case cudaErrorOperatingSystem:
    case cudaErrorNotSupported:
    case cudaErrorNotPermitted:
    case cudaErrorInvalidValue:
    case cudaErrorHostMemoryAlreadyRegistered:
    case cudaErrorUnknown:
      return true;
    default:
      return false;
  }
}

class Gpu final : public CudaDevice {
 public:
  Gpu(const CudaDeviceOptions& options, CudaGpu gpu)
      : gpu_(std::move(gpu)),
        timeout_seconds_(options.timeout_seconds),
        arena_(options.threads, options.cores),
        ledger_(std::make_shared<Ledger>()) {
    make_current();
    std::unique_ptr<StreamQueue> queue = cuda::make_queue(gpu_.ordinal, false);
    if (options.graphs) {
      auto maker = cuda::make_graph_maker(gpu_.ordinal, queue->native());
      auto graphs = std::make_unique<GraphQueue>(std::move(queue), std::move(maker));
      graphs_ = graphs.get();
      queue = std::move(graphs);
    }
    compute_ = Stream(std::move(queue));
    device_blocks_ = std::make_shared<BlockCache>(cuda::make_device_memory(gpu_.ordinal, compute_),
                                                  graphs_ ? Reuse::lowest : Reuse::latest);
    host_blocks_ = std::make_shared<BlockCache>(
        cuda::make_pinned_memory(gpu_.ordinal), [compute = compute_]() mutable { return compute.record(); },
        timeout_seconds_);
  }

  ~Gpu() override {
    // Work under way may still use what is freed from here on; a failure has been reported, or nobody asked.
    try {
      compute_.record().wait(Gpu::deadline(), "its last work");
    } catch (...) {
    }
  }

  const CudaGpu& gpu() const override { return gpu_; }
  Stream& compute_stream() override { return compute_; }
  Stream make_stream(bool urgent) override { return Stream(cuda::make_queue(gpu_.ordinal, urgent)); }
  void make_current() override { check_call(cudaSetDevice(gpu_.ordinal), "cudaSetDevice"); }

  DeviceMemory memory() override {
    const OnGpu on(gpu_.ordinal);
    std::size_t free = 0, total = 0;
    check_call(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    return {free, total};
  }

  Storage allocate(std::size_t bytes, Category category, Tier tier) override {
    require(tier != Tier::nvme, "a device allocates memory of the device and host tiers, not files");
    ledger_->charge(tier, category, bytes);
    const std::shared_ptr<BlockCache>& cache = tier == Tier::device ? device_blocks_ : host_blocks_;
    std::byte* data = nullptr;
    try {
      data = cache->take(bytes);
    } catch (...) {
      ledger_->credit(tier, category, bytes);
      throw;
    }
    if (!data) {
      ledger_->credit(tier, category, bytes);  // or it were among what the rank holds
      fail_allocation(bytes, category, tier);
    }
    return Storage({data, bytes}, [ledger = ledger_, cache, category, tier](MemoryBlock block) {
      cache->give(block.data, block.bytes);
      ledger->credit(tier, category, block.bytes);
    });
  }

  void copy(void* to, const void* from, std::size_t bytes) override { copy_on(compute_, to, from, bytes); }

  void copy_on(Stream& stream, void* to, const void* from, std::size_t bytes) override {
    if (bytes == 0) return;
    const OnGpu on(gpu_.ordinal);
    const auto run = [=](void* native) {
      check_call(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, static_cast<cudaStream_t>(native)),
                 "cudaMemcpyAsync");
    };
    // From or to pageable memory CUDA itself returns only when that memory is done with: no copy to defer.
    if (graphs_ && stream.same_as(compute_) && known_to_cuda(to) && known_to_cuda(from))
      graphs_->call({copies, bytes_of(to, from, bytes), run});
    else
      run(stream.native());
  }

  void zero(void* data, std::size_t bytes) override {
    if (bytes == 0) return;
    const OnGpu on(gpu_.ordinal);
    const cudaMemoryType kind = kind_of_memory(data);
    const auto run = [=](void* native) {
      check_call(cudaMemsetAsync(data, 0, bytes, static_cast<cudaStream_t>(native)), "cudaMemsetAsync");
    };
    if (kind == cudaMemoryTypeHost) {
      run(compute_.native());  // a graph's fills are for memory of the device
    } else if (kind != cudaMemoryTypeUnregistered) {
      compute_.queue().call({zeros, bytes_of(data, bytes), run});
    } else {
      wait();
      std::memset(data, 0, bytes);
    }
  }

  std::shared_ptr<void> pin(void* data, std::size_t bytes) override {
    const OnGpu on(gpu_.ordinal);
    if (const cudaError_t status = cudaHostRegister(data, bytes, cudaHostRegisterPortable);
        status != cudaSuccess) {
      if (!refuses_to_lock(status)) cuda::fail_call(status, "cudaHostRegister");
      cudaGetLastError();
      return nullptr;
    }
    return {data,
            [ordinal = gpu_.ordinal, compute = compute_, seconds = timeout_seconds_](void* pinned) mutable {
              try {  // copies may be under way, or deferred
                compute.record().wait(Deadline::after_seconds(seconds), "its work with pinned memory");
              } catch (...) {
                // The device has failed; whoever uses it next is told.
              }
              cuda::quietly_on(ordinal, [&] { cudaHostUnregister(pinned); });
            }};
  }

  void synchronize() override {
    wait();
    Gpu::check();
  }

  void check() override { checks_.call(); }

  std::shared_ptr<void> after_synchronize(std::function<void()> check) override {
    return checks_.add(std::move(check));
  }

  bool in_gpu_memory(const void* data) const override {
    const OnGpu on(gpu_.ordinal);
    const cudaMemoryType kind = kind_of_memory(data);
    return kind == cudaMemoryTypeDevice || kind == cudaMemoryTypeManaged;
  }

  void end_sequence() override { compute_.queue().end_sequence(); }
  GraphCounts graph_counts() const override { return graphs_ ? graphs_->counts() : GraphCounts{}; }

  Deadline deadline() const override { return Deadline::after_seconds(timeout_seconds_); }
  Arena& arena() override { return arena_; }
  Ledger& ledger() override { return *ledger_; }
  std::uint64_t unused_bytes() const override { return host_blocks_->kept_bytes(); }

 private:
  void wait() { compute_.record().wait(deadline(), "the work that it was given"); }

  [[noreturn]] void fail_allocation(std::size_t bytes, Category category, Tier tier) {
    if (tier == Tier::host)
      fail(ErrorKind::memory, "the system has no ", bytes, " bytes of page-locked memory left for ",
           name_of(category), " in the host tier; this rank holds there: ", ledger_->holders(tier),
           ". Free memory of other programs, raise the limit of locked memory (ulimit -l), or offload less");
    const DeviceMemory left = memory();
    fail(ErrorKind::memory, "out of memory on GPU ", gpu_.ordinal, " ('", gpu_.name, "'): ", bytes,
         " more bytes for ", name_of(category), ", of which ", left.free, " are free out of ", left.total,
         "; this rank holds: ", ledger_->holders(tier),
         ". Shard further (zero_optimization.stage), shrink the micro-batch, turn on training.recompute, "
         "offload, or end "
         "other programs on this GPU");
  }

  const CudaGpu gpu_;
  const double timeout_seconds_;
  Arena arena_;
  std::shared_ptr<Ledger> ledger_;
  Stream compute_;
  GraphQueue* graphs_ = nullptr;  ///< compute_'s, where it runs graphs
  std::shared_ptr<BlockCache> device_blocks_, host_blocks_;
  CheckList checks_;
};

}  // namespace

std::shared_ptr<Accelerator> make_cuda_device(const CudaDeviceOptions& options) {
  const CudaStatus status = cuda_status();
  if (!status.usable()) fail(ErrorKind::io, "there is no CUDA device: ", status.why_not);
  const auto gpu = std::find_if(status.gpus.begin(), status.gpus.end(),
                                [&](const CudaGpu& each) { return each.ordinal == options.ordinal; });
  if (gpu == status.gpus.end())
    fail(ErrorKind::io, "there is no GPU ", options.ordinal, " that this build can use; it can use ",
         status.gpus.size(), " of those that the driver shows (`sherd info` lists them)");
  return std::make_shared<Gpu>(options, *gpu);
}

}  // namespace sherd::device
