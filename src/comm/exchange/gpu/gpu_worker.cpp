#include "comm/exchange/gpu/gpu_worker.h"

#include "base/log.h"

namespace sherd::comm {
namespace {

class GpuWorker final : public Worker {
 public:
  GpuWorker(std::shared_ptr<device::Accelerator> gpu, GpuReduce reduce, EventBoard& events, int rank)
      : gpu_(std::move(gpu)),
        stream_(gpu_->make_stream(true)),
        reduce_(std::move(reduce)),
        events_(events),
        rank_(static_cast<std::size_t>(rank)) {}

  bool immediate() const override { return false; }

  void begin(const Call& call, std::size_t) override {
    gpu_->make_current();  // the group's own thread may run the call
    stream_.wait(call.ready);
  }
  void publish() override { events_.left[rank_][++published_ % 2] = stream_.record(); }
  void follow() override {
    for (const auto& left : events_.left) stream_.wait(left[published_ % 2]);
  }
  void end(Call& call) override { call.done = stream_.record(); }
  void drain() noexcept override {
    try {
      stream_.record().wait(gpu_->deadline(), "a failed collective");
    } catch (const std::exception& error) {
      log_warning("after a failed collective: ", error.what());
    }
  }

  void copy(std::byte* to, const std::byte* from, std::size_t bytes) override {
    if (to != from) gpu_->copy_on(stream_, to, from, bytes);
  }
  void reduce(const ReduceSpec& how, std::span<const std::byte* const> sources,
              std::span<std::byte* const> outs, std::int64_t count) override {
    if (count > 0) reduce_(*gpu_, stream_, how, sources, outs, count);
  }

 private:
  std::shared_ptr<device::Accelerator> gpu_;
  device::Stream stream_;
  GpuReduce reduce_;
  EventBoard& events_;
  std::size_t rank_;
  std::uint64_t published_ = 0;  ///< the same on all ranks: every round of a call has its barriers
};

}  // namespace

std::unique_ptr<Worker> make_gpu_worker(std::shared_ptr<device::Accelerator> gpu, GpuReduce reduce,
                                        EventBoard& events, int rank) {
  return std::make_unique<GpuWorker>(std::move(gpu), std::move(reduce), events, rank);
}

}  // namespace sherd::comm
