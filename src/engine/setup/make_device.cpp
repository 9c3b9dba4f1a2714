#include "engine/setup/make_device.h"

#include <algorithm>
#include <utility>

#include "base/excerpt.h"
#include "base/log.h"
#include "tensor/kernels.h"

namespace sherd::engine {
namespace {

/// This rank's part of the machine's cores where device.bind_cores asks for one; else none.
std::vector<int> own_cores(const config::Config& config, const Distributed& dist, int threads) {
  if (!config.device.bind_cores) return {};
  const std::vector<int> all = available_core_ids();
  auto first = static_cast<std::size_t>(dist.local_rank()) * static_cast<std::size_t>(threads);
  // A launcher that binds has already dealt the cores out.
  if (comm::launcher() != comm::Launcher::none && all.size() >= static_cast<std::size_t>(threads) &&
      all.size() < static_cast<std::size_t>(dist.local_size() * threads))
    first = 0;
  else if (static_cast<std::size_t>(dist.local_size() * threads) > all.size())
    fail(ErrorKind::config, "device.bind_cores: ", counted(dist.local_size(), "rank"), " with ",
         counted(threads, "thread"), " each need more than the ",
         counted(static_cast<std::int64_t>(all.size()), "core"),
         " here; lower device.threads_per_rank or leave bind_cores off");
  return {all.begin() + static_cast<std::ptrdiff_t>(first),
          all.begin() + static_cast<std::ptrdiff_t>(first) + threads};
}

std::shared_ptr<device::Device> make_gpu(const config::Config& config, const Distributed& dist, int threads) {
  const device::CudaStatus status = device::cuda_status();
  const int count = static_cast<int>(status.gpus.size());
  const device::CudaGpu& gpu =
      status.gpus[static_cast<std::size_t>(device::cuda_ordinal_for(dist.local_rank(), count))];
  // Under a launcher each rank may be shown a GPU of its own: how they are shared is told by who asked all
  // (gpu_sharing.h).
  const bool shared = dist.local_size() > count && comm::launcher() == comm::Launcher::none;
  if (dist.rank() == 0)
    log_info("rank 0 runs on GPU ", gpu.ordinal, " ('", gpu.name, "')",
             shared ? cat(", as one of ", dist.local_size(), " ranks on ", counted(count, "GPU")) : "");
  return device::make_cuda_device({gpu.ordinal, threads, own_cores(config, dist, threads),
                                   config.parallel.timeout_seconds, config.device.cuda_graphs});
}

/// The notes that the parser makes where device.type is "cpu", for "auto" that found no GPU.
void say_what_is_idle(const config::Device& keys) {
  for (const auto& [name, given] :
       {std::pair{"tf32", keys.tf32}, std::pair{"fused_gelu", keys.fused_gelu},
        std::pair{"deterministic_attention", !keys.deterministic_attention},
        std::pair{"cuda_graphs", keys.cuda_graphs}, std::pair{"peak_tflops", keys.peak_tflops > 0}})
    if (given) log_info("device.", name, ": no effect: there is no GPU here, and this is a matter of GPUs");
}

}  // namespace

int compute_threads(const config::Config& config, int local_ranks) {
  if (config.device.threads_per_rank > 0) return config.device.threads_per_rank;
  return std::max(1, available_cores() / local_ranks);
}

bool meant_for_gpus(const config::Config& config) {
  if (config.device.type == config::DeviceType::automatic) return device::cuda_status().usable();
  return config.device.type == config::DeviceType::cuda;
}

bool takes_gpus(const config::Config& config) {
  if (config.device.type == config::DeviceType::cpu) return false;
  const device::CudaStatus status = device::cuda_status();
  if (!status.usable() && config.device.type == config::DeviceType::cuda)
    fail(ErrorKind::config, "device.type is \"cuda\", but there is no CUDA device: ", status.why_not,
         "; use \"auto\" or \"cpu\"");
  return status.usable();
}

std::string unexpected_lack(const device::CudaStatus& status) {
  return status.driver_version.empty() ? "" : status.why_not;
}

std::shared_ptr<device::Device> make_device(const config::Config& config, const Distributed& dist) {
  const int threads = compute_threads(config, dist.local_size());
  if (takes_gpus(config)) return make_gpu(config, dist, threads);
  if (config.device.type == config::DeviceType::automatic && dist.rank() == 0) {
    if (const std::string why = unexpected_lack(device::cuda_status()); !why.empty())
      log_info("ranks run on processors: ", why);
    say_what_is_idle(config.device);
  }
  return device::make_cpu_device(threads, own_cores(config, dist, threads));
}

std::unique_ptr<tensor::Kernels> make_kernels(const config::Config& config, device::Device& device) {
  const config::Device& keys = config.device;
  return tensor::make_kernels(device, {.tf32 = keys.tf32,
                                       .fused_gelu = keys.fused_gelu,
                                       .deterministic_attention = keys.deterministic_attention});
}

}  // namespace sherd::engine
