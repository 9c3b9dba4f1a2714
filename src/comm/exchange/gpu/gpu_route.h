#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "comm/exchange/backend.h"
#include "comm/exchange/gpu/gpu_worker.h"

namespace sherd::comm {

/// How tensors in GPU memory travel between the ranks of a group whose host memory travels by a Backend. This
/// one takes them through page-locked memory of the host, which works between any ranks; others override what
/// they do better.
class GpuRoute {
 public:
  /// `host` must outlive it.
  GpuRoute(Backend& host, std::shared_ptr<device::Accelerator> gpu);
  virtual ~GpuRoute() = default;
  virtual std::string_view name() const { return "page-locked host memory"; }
  /// True when run() queues work on the caller's thread, so that its calls come in the order in which they
  /// are made.
  virtual bool immediate() const { return false; }
  /// Whether run() of an immediate route only queues this call, and meets nobody on the host for it.
  virtual bool queues(const Call&) const { return immediate(); }

  /// Runs a checked collective of which some tensor is the GPU's, after Call::ready; sets Call::done.
  virtual void run(Call& call);
  /// The functions of Backend, for transfers of such tensors. start() sets Call::travelling or
  /// Call::greeting.
  virtual void start(Call& transfer);
  virtual bool advance(Call& transfer);
  virtual void cancel(Call& transfer) noexcept { host_->cancel(transfer); }

  /// Collective: the route of the group that a split made; `part` is null where this rank is in none.
  virtual std::unique_ptr<GpuRoute> split(int color, int key, Backend* part);

 protected:
  Backend& host() { return *host_; }
  const std::shared_ptr<device::Accelerator>& gpu() const { return gpu_; }
  device::Stream& stream() { return stream_; }

 private:
  Call to_host(Call& call);
  void from_host(Call& call, const Call& staged);
  Tensor staging(Call& call, std::int64_t elements, DType dtype);
  void copy(const Tensor& to, const Tensor& from);

  Backend* host_;
  std::shared_ptr<device::Accelerator> gpu_;
  device::Stream stream_;
};

/// The facts about its GPU that a rank tells the others.
struct GpuCard {
  bool present = false;
  bool nccl = false;       ///< its build has NCCL, which knows the GPU
  std::uint64_t card = 0;  ///< the same for ranks that share one
  int rank = 0;            ///< the rank that has it, by its number in the world
};
enum class GpuTraffic : std::uint8_t { none, shared_card, nccl, staged };
struct GpuPlan {
  GpuTraffic traffic = GpuTraffic::none;
  std::string why;  ///< where it is staged: what stands against something faster
};
/// How the ranks with these cards exchange tensors: a pure function. `one_process`: they are threads of one.
/// Throws Error{io} where some have a GPU and others have none.
GpuPlan plan_gpu_traffic(const std::vector<GpuCard>& by_rank, bool one_process);

/// Collective: the route of a group, chosen by plan_gpu_traffic(). Null where `gpu` is null on all ranks.
std::unique_ptr<GpuRoute> make_gpu_route(Backend& host, const std::shared_ptr<device::Accelerator>& gpu);

}  // namespace sherd::comm
