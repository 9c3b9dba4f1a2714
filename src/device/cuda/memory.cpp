#include <cuda_runtime_api.h>

#include <limits>

#include "device/cuda/driver.h"

namespace sherd::device::cuda {
namespace {

/// Large blocks are few and come again in the same sizes: there a class of 1/8 would cost gigabytes.
constexpr std::size_t large_block = std::size_t{16} << 20;
constexpr std::size_t large_grain = std::size_t{2} << 20;

std::size_t rounded(std::size_t bytes) {
  if (bytes < large_block) return size_class(bytes);
  return (bytes + large_grain - 1) / large_grain * large_grain;
}

int gpu_count() {
  int count = 0;
  check_call(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  return count;
}

/// Null for "no memory left", which the cache answers; any other failure throws.
std::byte* given(void* data, cudaError_t status, const char* call) {
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    return nullptr;
  }
  check_call(status, call);
  return static_cast<std::byte*>(data);
}

class PooledMemory final : public BlockSource {
 public:
  PooledMemory(int ordinal, Stream compute) : ordinal_(ordinal), compute_(std::move(compute)) {
    const OnGpu on(ordinal_);
    int pools = 0;
    check_call(cudaDeviceGetAttribute(&pools, cudaDevAttrMemoryPoolsSupported, ordinal_),
               "cudaDeviceGetAttribute");
    if (!pools) return;  // some virtual GPUs: plain cudaMalloc
    cudaMemPoolProps properties{};
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location = {cudaMemLocationTypeDevice, ordinal_};
    check_call(cudaMemPoolCreate(&pool_, &properties), "cudaMemPoolCreate");
    std::uint64_t keep = std::numeric_limits<std::uint64_t>::max();  // settle() returns it where it is missed
    check_call(cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrReleaseThreshold, &keep),
               "cudaMemPoolSetAttribute");
    // Ranks of one process that have a card each: NCCL reads and writes the others' memory in place.
    for (int peer = 0; peer < gpu_count(); ++peer) {
      int can = 0;
      if (peer != ordinal_)
        check_call(cudaDeviceCanAccessPeer(&can, peer, ordinal_), "cudaDeviceCanAccessPeer");
      if (!can) continue;
      const cudaMemAccessDesc access{{cudaMemLocationTypeDevice, peer}, cudaMemAccessFlagsProtReadWrite};
      if (cudaMemPoolSetAccess(pool_, &access, 1) != cudaSuccess) cudaGetLastError();  // a card of others
    }
  }
  ~PooledMemory() override {
    if (pool_) quietly_on(ordinal_, [this] { cudaMemPoolDestroy(pool_); });
  }

  std::size_t size_for(std::size_t bytes) const override { return rounded(bytes); }

  std::byte* obtain(std::size_t size) override {
    const OnGpu on(ordinal_);
    void* data = nullptr;
    const cudaError_t status =
        pool_ ? cudaMallocFromPoolAsync(&data, size, pool_, native()) : cudaMalloc(&data, size);
    return given(data, status, pool_ ? "cudaMallocFromPoolAsync" : "cudaMalloc");
  }

  void give_back(std::byte* data, std::size_t) noexcept override {
    quietly_on(ordinal_, [&] {
      const cudaStream_t stream = native();  // behind what was deferred, which may use the block
      pool_ ? cudaFreeAsync(data, stream) : cudaFree(data);
    });
  }

  void settle() override {
    if (!pool_) return;
    const OnGpu on(ordinal_);
    check_call(cudaStreamSynchronize(native()), "cudaStreamSynchronize");
    check_call(cudaMemPoolTrimTo(pool_, 0), "cudaMemPoolTrimTo");
  }

 private:
  cudaStream_t native() const { return static_cast<cudaStream_t>(compute_.native()); }

  const int ordinal_;
  Stream compute_;
  cudaMemPool_t pool_ = nullptr;
};

class PinnedMemory final : public BlockSource {
 public:
  explicit PinnedMemory(int ordinal) : ordinal_(ordinal) {}
  std::size_t size_for(std::size_t bytes) const override { return rounded(bytes); }
  std::byte* obtain(std::size_t size) override {
    const OnGpu on(ordinal_);
    void* data = nullptr;
    const cudaError_t status = cudaHostAlloc(&data, size, cudaHostAllocPortable);
    return given(data, status, "cudaHostAlloc");
  }
  void give_back(std::byte* data, std::size_t) noexcept override {
    quietly_on(ordinal_, [&] { cudaFreeHost(data); });
  }

 private:
  const int ordinal_;
};

}  // namespace

std::unique_ptr<BlockSource> make_device_memory(int ordinal, Stream compute) {
  return std::make_unique<PooledMemory>(ordinal, std::move(compute));
}

std::unique_ptr<BlockSource> make_pinned_memory(int ordinal) {
  return std::make_unique<PinnedMemory>(ordinal);
}

}  // namespace sherd::device::cuda
