#include "engine/setup/make_device.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <utility>

#include "base/log.h"
#include "base/random.h"
#include "base/text/excerpt.h"
#include "comm/gather.h"
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
    fail(ErrorKind::io, "device.bind_cores: ", counted(dist.local_size(), "rank"), " with ",
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
  // Under a launcher each rank may be shown a GPU of its own: share_gpus_of_world() tells how they are
  // shared.
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
    fail(ErrorKind::io, "device.type is \"cuda\", but there is no CUDA device: ", status.why_not,
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

namespace {

std::string machine_name() {
  char name[256] = {};
  return ::gethostname(name, sizeof name - 1) == 0 ? name : "";
}

/// None for a run on processors.
std::vector<device::CudaGpu> gpus_for(const config::Config& config) {
  return takes_gpus(config) ? device::cuda_status().gpus : std::vector<device::CudaGpu>();
}

}  // namespace

GpuSeat gpu_seat(const config::Config& config, const std::vector<device::CudaGpu>& gpus, int local_rank,
                 std::string_view machine) {
  if (gpus.empty()) return {};
  const auto place =
      static_cast<std::size_t>(device::cuda_ordinal_for(local_rank, static_cast<int>(gpus.size())));
  const device::CudaGpu& gpu = gpus[place];
  GpuSeat seat{gpu.uuid, gpu.memory,
               config.device.peak_tflops > 0
                   ? 1e12 * config.device.peak_tflops
                   : device::peak_flops(gpu, config.precision.compute, config.device.tf32)};
  if (seat.on_gpu()) return seat;
  const std::uint64_t name = stable_hash(machine), number = static_cast<std::uint64_t>(gpu.ordinal) + 1;
  std::memcpy(seat.gpu.data(), &name, sizeof name);
  std::memcpy(seat.gpu.data() + sizeof name, &number, sizeof number);
  return seat;
}

GpuSharing share_gpus(std::span<const GpuSeat> seats, int rank) {
  const GpuSeat& mine = seats[static_cast<std::size_t>(rank)];
  std::map<std::array<std::uint8_t, 16>, int> ranks_on;
  GpuSharing out{.memory = mine.memory};
  bool known = true;
  for (const GpuSeat& seat : seats) {
    if (!seat.on_gpu() || ranks_on[seat.gpu]++ > 0) continue;
    ++out.gpus;
    out.peak += seat.peak;
    known = known && seat.peak > 0;
  }
  if (!known) out.peak = 0;
  if (mine.on_gpu()) out.ranks_here = ranks_on[mine.gpu];
  return out;
}

GpuSharing share_gpus_locally(const config::Config& config, int ranks) {
  const std::vector<device::CudaGpu> gpus = gpus_for(config);
  std::vector<GpuSeat> seats;
  for (int rank = 0; rank < ranks; ++rank) seats.push_back(gpu_seat(config, gpus, rank, machine_name()));
  return share_gpus(seats, 0);
}

GpuSharing share_gpus_of_world(const config::Config& config, const Distributed& dist) {
  const GpuSeat mine = gpu_seat(config, gpus_for(config), dist.local_rank(), machine_name());
  return share_gpus(comm::gather_records(dist.world(), mine, "GPUs"), dist.rank());
}

}  // namespace sherd::engine
