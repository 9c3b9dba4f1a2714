#include "bench/suite/machine_bench.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "base/text/excerpt.h"
#include "bench/suite/comm_bench.h"
#include "bench/suite/nvme_bench.h"
#include "bench/suite/training_times.h"
#include "device/cuda.h"
#include "engine/report/gemm_probe.h"
#include "engine/report/machine.h"
#include "engine/setup/make_device.h"
#include "models/gpt.h"

namespace sherd::bench {
namespace {

using config::DeviceRates;
using config::Machine;

constexpr TrainedModel models[] = {
    {"gpt2", 64, 1, 2, 128, 4, 1024},  // for emulated GPUs
    {"gpt2", 256, 4, 4, 256, 2, 2048},     {"llama", 512, 2, 8, 512, 1, 4096},
    {"gpt2", 768, 2, 12, 512, 2, 8192},    {"llama", 1024, 1, 16, 1024, 1, 8192},
    {"gpt2", 1536, 4, 16, 1024, 8, 32768}, {"llama", 2048, 2, 16, 2048, 4, 32768},
    {"llama", 4096, 2, 32, 4096, 1, 32768}};

/// Models up to that width but for those that are much narrower, whose kernels on GPUs take no longer than
/// their calls.
bool is_measured(const TrainedModel& model, std::int64_t width, bool on_gpu) {
  const std::int64_t least = on_gpu ? width / 4 : width < 256 ? 0 : 256;
  return model.hidden <= width && model.hidden >= least;
}

/// Bytes that a model trains in, of fp32 or less: states, what passes save, logits. Rather too many.
double bytes_of(const TrainedModel& m) {
  const auto real = [](std::int64_t number) { return static_cast<double>(number); };
  const double parameters =
      16 * real(m.layers) * real(m.hidden * m.hidden) + 2 * real(m.vocabulary * m.hidden);
  const double tokens = real(m.rows * m.seq);
  return 20 * parameters + 4 * tokens * (60 * real(m.layers) * real(m.hidden) + 3 * real(m.vocabulary)) + 3e8;
}

/// With GPUs, the processor is measured with narrow models: for the optimizer's rate.
MachineBenchOptions beside_gpus(MachineBenchOptions options) {
  options.width = std::min<std::int64_t>(options.width, 512);
  return options;
}

/// On so many ranks of this process.
void on_ranks(int ranks, const std::function<void(const std::shared_ptr<comm::Communicator>&)>& body) {
  comm::CommOptions options;
  options.timeout_seconds = 300;
  comm::run_local(ranks, options, [&](comm::Communicator& comm) {
    body(std::shared_ptr<comm::Communicator>(&comm, [](comm::Communicator*) {}));
  });
}

/// The link between ranks of this machine: of a large exchange its bandwidth, of a barrier its latency.
config::Link measure_link(int ranks, const Tell& tell) {
  config::Link link{.name = "shared memory", .ranks = ranks};
  on_ranks(ranks, [&](const auto& world) {
    CommBenchOptions options;
    options.bytes = std::size_t{16} << 20, options.rounds = 9;
    const Rounds rounds = measure_collectives(*world, options, world->rank() == 0 ? tell : Tell());
    const double latency = measure_barrier(*world) * 1e-6;
    if (world->rank() > 0) return;
    const double sent = static_cast<double>(options.bytes) * (ranks - 1) / ranks;
    link.bandwidth = rounded(sent / rounds.median_seconds("all_gather"));
    link.sum_bandwidth = rounded(2 * sent / rounds.median_seconds("all_reduce"));
    link.latency = rounded(latency);
  });
  return link;
}

/// Models up to that width, in both types; on GPUs those that take at most `memory` bytes.
DeviceRates measure_ranks(int ranks, config::DeviceType device, RatesFromTimes rates,
                          const MachineBenchOptions& options, const std::function<bool()>& stopped,
                          const Tell& tell, double memory = 0) {
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const TrainedModel& model : models) {
      const bool on_gpu = device == config::DeviceType::cuda;
      if (!is_measured(model, options.width, on_gpu)) continue;
      if (on_gpu && bytes_of(model) > memory) {
        if (tell) tell(cat(model.type, " of width ", model.hidden, " is left out: the GPU is too small"));
        continue;
      }
      if (stopped()) fail(ErrorKind::interrupted, "stopped");
      if (tell)
        tell(cat(on_gpu ? "GPU" : counted(ranks, "rank"), ", ", name_of(dtype), ", ", model.type,
                 " of width ", model.hidden));
      const config::Config config = config_of(model, dtype, device);
      const std::int64_t parameters = models::gpt_config(config, model.vocabulary).num_parameters();
      on_ranks(ranks, [&](const auto& world) {
        const TrainingTimes times = train(model, config, world, options.steps);
        if (world->rank() == 0) rates.add(times, config, parameters);
      });
    }
  return rates.rates();
}

/// The processor's rates.
DeviceRates measure_cores(int ranks, const MachineBenchOptions& options, const std::function<bool()>& stopped,
                          const Tell& tell) {
  return measure_ranks(ranks, config::DeviceType::cpu, RatesFromTimes(ranks, [](DType) { return 0.0; }),
                       options, stopped, tell);
}

/// The rate of copies between a GPU and page-locked memory, in bytes per second.
double measure_copies(device::Device& device, bool to_device) {
  constexpr std::size_t bytes = std::size_t{64} << 20;
  const device::Storage here = device.allocate(bytes, device::Category::workspace),
                        there = device.allocate(bytes, device::Category::workspace, device::Tier::host);
  const device::Storage &to = to_device ? here : there, &from = to_device ? there : here;
  return rounded(static_cast<double>(bytes) /
                 median_seconds(device, 5, [&] { device.copy(to.data(), from.data(), bytes); }));
}

/// The link between all GPUs, each rank's own: collectives of 64 MiB, and of a few bytes for the latency.
config::Link measure_gpu_link(comm::Communicator& comm, const std::shared_ptr<device::Device>& device) {
  comm.bind(device);
  const auto seconds_of = [&](std::int64_t count, bool sums) {
    const tensor::Tensor full = tensor::Tensor::zeros(*device, {count}, DType::f32),
                         shard = tensor::Tensor::zeros(*device, {count / comm.size()}, DType::f32);
    const auto call = [&] {
      (sums ? comm.all_reduce(full, comm::ReduceOp::sum) : comm.all_gather({{shard, full}})).wait();
    };
    return median_seconds(*device, 9, call, [&] { comm.barrier(); });
  };
  const std::int64_t count = (std::int64_t{16} << 20) / comm.size() * comm.size();
  const double sent = 4.0 * static_cast<double>(count) * (comm.size() - 1) / comm.size();
  config::Link link{.name = "between GPUs", .ranks = comm.size()};
  link.bandwidth = rounded(sent / seconds_of(count, false));
  link.sum_bandwidth = rounded(2 * sent / seconds_of(count, true));
  // A call's latency is a link's for each doubling of ranks, and once more (engine/estimate/price.h).
  link.latency = rounded(seconds_of(comm.size(), false) / (std::log2(comm.size()) + 1));
  return link;
}

void measure_gpus(const std::vector<device::CudaGpu>& gpus, const MachineBenchOptions& options,
                  const std::function<bool()>& stopped, const Tell& tell, Machine& machine) {
  const device::CudaGpu& gpu = gpus.front();
  machine.name = cat(gpus.size() > 1 ? cat(gpus.size(), " x ") : "", gpu.name);
  machine.devices = static_cast<std::int64_t>(gpus.size()), machine.memory = gpu.memory;
  RatesFromTimes rates(0, [&](DType dtype) { return device::peak_flops(gpu, dtype); });
  machine.rates = {measure_ranks(1, config::DeviceType::cuda, std::move(rates), options, stopped, tell,
                                 0.9 * static_cast<double>(gpu.memory))};
  const config::Config config = config_of(models[0], DType::f32, config::DeviceType::cuda);
  const auto device_of = [&](const std::shared_ptr<comm::Communicator>& world) {
    return engine::make_device(config, Distributed(world, world->rank(), world->size()));
  };
  if (tell) tell("copies between GPU and host");
  on_ranks(1, [&](const auto& world) {
    const auto device = device_of(world);
    machine.host.to_device = measure_copies(*device, true);
    machine.host.from_device = measure_copies(*device, false);
  });
  if (gpus.size() > 1) {
    if (tell) tell("collectives between GPUs");
    on_ranks(static_cast<int>(gpus.size()), [&](const auto& world) {
      config::Link link = measure_gpu_link(*world, device_of(world));
      if (world->rank() == 0) machine.links = {std::move(link)};
    });
  }
  machine.host.update = measure_cores(1, beside_gpus(options), stopped, tell).update;
}

/// The number of a row of a report.
double value_of(const BenchReport& report, const std::string& name, const std::string& key) {
  for (const auto& row : report.rows) {
    bool found = false;
    for (const ReportField& field : row)
      if (const auto* text = std::get_if<std::string>(&field.value)) found |= *text == name;
    if (!found) continue;
    for (const ReportField& field : row)
      if (const auto* number = std::get_if<double>(&field.value); number && field.key == key) return *number;
  }
  fail(ErrorKind::usage, "the report has no ", key, " of ", name);
}

config::Drive measure_drive(const std::filesystem::path& folder, const std::function<bool()>& stopped,
                            const Tell& tell) {
  NvmeBenchOptions options;
  options.folder = folder;
  const BenchReport report = measure_nvme(options, stopped, tell);
  config::Drive drive;
  drive.size = std::filesystem::space(folder).available;
  drive.read = rounded(value_of(report, "read", "gb_per_s") * 1e9);
  drive.write = rounded(value_of(report, "write", "gb_per_s") * 1e9);
  return drive;
}

}  // namespace

double machine_bench_memory(const MachineBenchOptions& options) {
  const MachineBenchOptions here = options.gpus ? beside_gpus(options) : options;
  double most = 0;
  for (const TrainedModel& model : models)
    if (is_measured(model, here.width, false)) most = std::max(most, bytes_of(model));
  return most * (options.gpus ? 1 : options.cores);
}

Machine measure_machine(const MachineBenchOptions& options, const std::function<bool()>& stopped,
                        const Tell& tell) {
  Machine machine;
  machine.source = "measured by sherd bench machine";
  const engine::MemorySizes memory = engine::memory_sizes();
  machine.host.memory = memory.limit > 0 ? std::min(memory.limit, memory.total) : memory.total;
  if (options.gpus) {
    measure_gpus(device::cuda_status().gpus, options, stopped, tell, machine);
  } else {
    machine.name = cat(counted(options.cores, "core"), " of ", engine::cpu_model());
    machine.devices = options.cores;
    for (const int ranks : options.cores > 1 ? std::vector{1, options.cores} : std::vector{1})
      machine.rates.push_back(measure_cores(ranks, options, stopped, tell));
    machine.host.update = machine.rates.front().update;
    if (options.cores > 1) machine.links = {measure_link(options.cores, tell)};
  }
  if (!options.folder.empty()) machine.drive = measure_drive(options.folder, stopped, tell);
  return machine;
}

}  // namespace sherd::bench
