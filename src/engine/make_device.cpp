#include "engine/make_device.h"

#include <algorithm>
#include <vector>

#include "base/log.h"
#include "device/cuda.h"

namespace sherd::engine {
namespace {

/// This rank's place among those of its machine, whose ranks follow each other.
int local_rank(const Distributed& dist) {
  return dist.rank() % dist.local_size();
}

/// This rank's part of the machine's cores where device.bind_cores asks for one; else none.
std::vector<int> own_cores(const config::Config& config, const Distributed& dist, int threads) {
  if (!config.device.bind_cores) return {};
  const std::vector<int> all = available_core_ids();
  auto first = static_cast<std::size_t>(local_rank(dist)) * static_cast<std::size_t>(threads);
  // A launcher that binds has already dealt the cores out.
  if (comm::launched_by_mpi() && all.size() >= static_cast<std::size_t>(threads) &&
      all.size() < static_cast<std::size_t>(dist.local_size() * threads))
    first = 0;
  else if (static_cast<std::size_t>(dist.local_size() * threads) > all.size())
    fail(ErrorKind::config, "device.bind_cores: ", dist.local_size(), " ranks with ", threads,
         " threads each need more than the ", all.size(),
         " cores here; lower device.threads_per_rank or leave bind_cores off");
  return {all.begin() + static_cast<std::ptrdiff_t>(first),
          all.begin() + static_cast<std::ptrdiff_t>(first) + threads};
}

std::shared_ptr<device::Device> make_gpu(const config::Config& config, const Distributed& dist, int threads) {
  const device::CudaStatus status = device::cuda_status();
  const int count = static_cast<int>(status.gpus.size());
  const device::CudaGpu& gpu =
      status.gpus[static_cast<std::size_t>(device::cuda_ordinal_for(local_rank(dist), count))];
  if (dist.rank() == 0)
    log_info("rank 0 runs on GPU ", gpu.ordinal, " ('", gpu.name, "')",
             dist.local_size() > count ? cat(", as one of ", dist.local_size(), " ranks on ", count, " GPUs")
                                       : "");
  return device::make_cuda_device(
      {gpu.ordinal, threads, own_cores(config, dist, threads), config.parallel.timeout_seconds});
}

}  // namespace

int compute_threads(const config::Config& config, int local_ranks) {
  if (config.device.threads_per_rank > 0) return config.device.threads_per_rank;
  return std::max(1, available_cores() / local_ranks);
}

bool takes_gpus(const config::Config& config) {
  if (config.device.type == config::DeviceType::cpu) return false;
  const device::CudaStatus status = device::cuda_status();
  if (!status.usable() && config.device.type == config::DeviceType::cuda)
    fail(ErrorKind::config, "device.type is \"cuda\", but there is no CUDA device: ", status.why_not,
         "; use \"auto\" or \"cpu\"");
  return status.usable();
}

std::shared_ptr<device::Device> make_device(const config::Config& config, const Distributed& dist) {
  const int threads = compute_threads(config, dist.local_size());
  if (takes_gpus(config)) return make_gpu(config, dist, threads);
  return device::make_cpu_device(threads, own_cores(config, dist, threads));
}

}  // namespace sherd::engine
