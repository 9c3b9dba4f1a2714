#include <cuda_runtime_api.h>

#include <mutex>
#include <vector>

#include "device/cuda/driver.h"

namespace sherd::device::cuda {
namespace {

/// Events are taken and left many times per step: making one costs more than recording it.
class EventPool {
 public:
  explicit EventPool(int ordinal) : ordinal_(ordinal) {}
  ~EventPool() {
    quietly_on(ordinal_, [this] {
      for (const cudaEvent_t event : free_) cudaEventDestroy(event);
    });
  }
  int ordinal() const { return ordinal_; }
  cudaEvent_t take() {
    {
      std::lock_guard lock(mutex_);
      if (!free_.empty()) {
        const cudaEvent_t event = free_.back();
        free_.pop_back();
        return event;
      }
    }
    const OnGpu on(ordinal_);
    cudaEvent_t event = nullptr;
    check_call(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    return event;
  }
  void leave(cudaEvent_t event) {
    std::lock_guard lock(mutex_);
    free_.push_back(event);
  }

 private:
  const int ordinal_;
  std::mutex mutex_;
  std::vector<cudaEvent_t> free_;  // guarded by mutex_
};

class CudaEvent final : public StreamEvent {
 public:
  explicit CudaEvent(std::shared_ptr<EventPool> pool) : pool_(std::move(pool)), event_(pool_->take()) {}
  // One that is left while pending may be recorded anew: those who wait on the device refer to the record
  // that they saw.
  ~CudaEvent() override { pool_->leave(event_); }
  bool reached() const override {
    const OnGpu on(pool_->ordinal());  // or a thread that never chose one makes a context on the first
    const cudaError_t status = cudaEventQuery(event_);
    if (status == cudaErrorNotReady) {
      cudaGetLastError();
      return false;
    }
    check_call(status, "cudaEventQuery");
    return true;
  }
  cudaEvent_t native() const { return event_; }

 private:
  std::shared_ptr<EventPool> pool_;
  cudaEvent_t event_;
};

class CudaQueue final : public StreamQueue {
 public:
  CudaQueue(int ordinal, bool urgent) : ordinal_(ordinal), events_(std::make_shared<EventPool>(ordinal)) {
    const OnGpu on(ordinal_);
    int least = 0, greatest = 0;
    check_call(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
    check_call(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, urgent ? greatest : least),
               "cudaStreamCreateWithPriority");
  }
  ~CudaQueue() override {
    quietly_on(ordinal_, [this] { cudaStreamDestroy(stream_); });
  }

  std::shared_ptr<const StreamEvent> record() override {
    const OnGpu on(ordinal_);
    auto event = std::make_shared<CudaEvent>(events_);
    check_call(cudaEventRecord(event->native(), stream_), "cudaEventRecord");
    return event;
  }
  void follow(const StreamEvent& event) override {
    const OnGpu on(ordinal_);
    check_call(
        cudaStreamWaitEvent(stream_, dynamic_cast<const CudaEvent&>(event).native(), cudaEventWaitDefault),
        "cudaStreamWaitEvent");
  }
  void* native() override { return stream_; }
  void launch(const KernelLaunch& kernel) override {
    const OnGpu on(ordinal_);
    allow_shared(kernel.entry, kernel.shared_bytes);
    check_call(cudaLaunchKernel(kernel.entry, dim3_of(kernel.grid), dim3_of(kernel.block),
                                const_cast<void**>(kernel.arguments.data()), kernel.shared_bytes, stream_),
               "cudaLaunchKernel");
  }
  void call(const LibraryCall& call) override {
    const OnGpu on(ordinal_);
    call.run(stream_);
  }

 private:
  const int ordinal_;
  std::shared_ptr<EventPool> events_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace

void allow_shared(const void* entry, std::size_t bytes) {
  constexpr std::size_t without_asking = 48 << 10;
  if (bytes <= without_asking) return;
  cudaFuncAttributes has{};
  check_call(cudaFuncGetAttributes(&has, entry), "cudaFuncGetAttributes");
  if (has.maxDynamicSharedSizeBytes >= static_cast<int>(bytes)) return;
  check_call(
      cudaFuncSetAttribute(entry, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
      "cudaFuncSetAttribute");
}

std::unique_ptr<StreamQueue> make_queue(int ordinal, bool urgent) {
  return std::make_unique<CudaQueue>(ordinal, urgent);
}

}  // namespace sherd::device::cuda
