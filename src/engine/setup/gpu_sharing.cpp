#include "engine/setup/gpu_sharing.h"

#include <unistd.h>

#include <cstring>
#include <map>
#include <string>

#include "base/random.h"
#include "comm/gather.h"
#include "device/cuda.h"
#include "engine/setup/make_device.h"

namespace sherd::engine {
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
