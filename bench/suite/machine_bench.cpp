#include "bench/suite/machine_bench.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <map>
#include <tuple>

#include "base/error.h"
#include "base/excerpt.h"
#include "bench/suite/comm_bench.h"
#include "bench/suite/nvme_bench.h"
#include "engine/engine.h"
#include "engine/estimate/step_time.h"
#include "engine/report/gemm_probe.h"
#include "engine/report/machine.h"
#include "engine/report/report.h"
#include "engine/setup/make_device.h"
#include "engine/setup/process_grid.h"
#include "models/gpt.h"
#include "tensor/meta/recording_kernels.h"

namespace sherd::bench {
namespace {

using config::DeviceRates;
using config::Machine;
using tensor::KernelFamily;
using tensor::KernelWork;
using tensor::meta::RecordingKernels;
using Op = sharding::Instruction::Op;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// One kernel of a training, with the time that it took.
struct TimedWork {
  KernelWork work;
  double seconds = 0;
};

/// Passes every kernel on, and tells how long it took.
class TimingKernels final : public tensor::ForwardingKernels<TimingKernels> {
 public:
  TimingKernels(std::unique_ptr<tensor::Kernels> inner, std::function<void(double)> tell)
      : inner_(std::move(inner)), tell_(std::move(tell)) {}
  tensor::Device& device() override { return inner_->device(); }
  bool folds_gradients() const override { return inner_->folds_gradients(); }
  template <class Kernel, class... Args>
  void forward(KernelFamily, Kernel kernel, Args&... args) {
    const double begin = now();
    (inner_.get()->*kernel)(args...);
    tell_(now() - begin);
  }

 private:
  std::unique_ptr<tensor::Kernels> inner_;
  std::function<void(double)> tell_;
};

/// What one rank sees of training: kernels of passes, and what passes and updates take around them.
class TrainingTimes final : public engine::InstructionObserver {
 public:
  void begin(const sharding::Instruction& instruction) override {
    // The last micro-batch's backward exchanges gradients.
    passes_ =
        (instruction.op == Op::forward || instruction.op == Op::backward) && instruction.micro_batch == 0;
    begun_ = now();
  }
  void end(const sharding::Instruction& instruction, double) override {
    if (passes_) passes_seconds += now() - begun_;
    if (instruction.op == Op::update) update_seconds += now() - begun_, ++updates;
    passes_ = open_ = false;
  }
  void tell(const KernelWork& work) {
    open_ = passes_;
    if (open_) kernels.push_back({work});
  }
  void tell(double seconds) {
    if (open_) kernels.back().seconds = seconds;
    open_ = false;
  }

  std::vector<TimedWork> kernels;
  double passes_seconds = 0, update_seconds = 0;
  int updates = 0;

 private:
  bool passes_ = false, open_ = false;
  double begun_ = 0;
};

struct TrainedModel {
  const char* type;
  std::int64_t hidden, layers, heads, seq, rows, vocabulary;
};
constexpr TrainedModel models[] = {{"gpt2", 256, 4, 4, 256, 2, 2048},
                                   {"llama", 512, 2, 8, 512, 1, 4096},
                                   {"gpt2", 768, 2, 12, 512, 2, 8192},
                                   {"llama", 1024, 1, 16, 1024, 1, 8192}};

config::Config config_of(const TrainedModel& m, DType dtype) {
  return config::parse_text(
      cat(R"({"model": {"type": ")", m.type, R"(", "hidden_size": )", m.hidden, R"(, "num_layers": )",
          m.layers, R"(, "num_heads": )", m.heads, R"(, "seq_length": )", m.seq, R"(, "vocab_size": )",
          m.vocabulary, R"(}, "train_micro_batch_size_per_gpu": )", m.rows,
          R"(, "gradient_accumulation_steps": 2,)",
          dtype == DType::bf16 ? R"("bf16": {"enabled": true},)" : "",
          R"("steps_per_print": 0, "device": {"type": "cpu"}})"),
      "the benchmark");
}

/// Trains one model on this rank, beside the others of `dist`.
TrainingTimes train(const TrainedModel& m, DType dtype, const DistributedPtr& dist, int steps) {
  config::Config config = config_of(m, dtype);
  config.notes.clear();
  std::shared_ptr<device::Device> device = engine::make_device(config, *dist);
  TrainingTimes times;
  auto timing = std::make_unique<TimingKernels>(engine::make_kernels(config, *device),
                                                [&](double seconds) { times.tell(seconds); });
  auto kernels = std::make_unique<RecordingKernels>(std::move(timing),
                                                    [&](const KernelWork& work) { times.tell(work); });
  const auto groups = make_groups(dist, config);
  const models::GptConfig shape = models::gpt_config(config, m.vocabulary);
  Engine engine(dist, std::make_shared<models::Gpt>(shape, layout_of(*groups, config)), config, device,
                std::move(kernels), groups);
  std::vector<std::int32_t> ids(static_cast<std::size_t>(m.rows * m.seq));
  for (std::size_t i = 0; i < ids.size(); ++i)
    ids[i] = static_cast<std::int32_t>(philox({9, 1}, i)[0] % static_cast<std::uint64_t>(m.vocabulary));
  const auto tokens = tensor::Tensor::of<std::int32_t>(*device, {m.rows, m.seq}, ids);
  const tensor::Batch batch{{"tokens", tokens}, {"labels", tokens}};
  engine.train_batch([&] { return batch; });
  engine.set_observer(&times);
  for (int i = 0; i < steps; ++i) engine.train_batch([&] { return batch; });
  engine.set_observer(nullptr);
  return times;
}

/// Four digits: a measurement has no more.
double rounded(double value) {
  return std::stod(engine::printed("%.4g", value));
}

/// Sums of amounts and seconds, of which a rate is made.
struct Measured {
  double amount = 0, seconds = 0;
  double rate() const { return rounded(amount / seconds); }
};

/// Rates from the times of kernels.
class RatesFromTimes {
 public:
  explicit RatesFromTimes(int ranks) { rates_.ranks = ranks; }

  void add(const TrainingTimes& times, const config::Config& config, std::int64_t parameters) {
    double inside = 0;
    for (const TimedWork& each : times.kernels) {
      inside += each.seconds;
      add(each);
    }
    around_.amount += static_cast<double>(times.kernels.size());
    around_.seconds += std::max(0.0, times.passes_seconds - inside);
    update_.amount += times.updates * static_cast<double>(parameters) * engine::update_bytes(config);
    update_.seconds += times.update_seconds;
  }

  DeviceRates rates() {
    for (auto& [dtype, shapes] : products_) {
      config::ProductRates products{.dtype = dtype};
      for (const auto& [extents, time] : shapes) {
        const auto& [rows, columns, depth] = extents;
        products.measured.push_back({rows, columns, depth, time.rate()});
        products.peak = std::max(products.peak, time.rate());
      }
      products.attention.forward = share(attention_[{dtype, false}], products.peak);
      products.attention.backward = share(attention_[{dtype, true}], products.peak);
      rates_.products.push_back(std::move(products));
    }
    Measured all;
    for (const auto& [of, time] : families_) {
      const auto& [family, dtype] = of;
      rates_.families.push_back(
          {std::string(tensor::kernel_families[static_cast<std::size_t>(family)]), dtype, time.rate()});
      all.amount += time.amount, all.seconds += time.seconds;
    }
    rates_.bandwidth = all.rate();
    rates_.latency = rounded(around_.seconds / around_.amount);
    rates_.update = update_.rate();
    rates_.overlap = 0;  // a rank's calls take the cores that its kernels run on
    return std::move(rates_);
  }

 private:
  static double share(const Measured& time, double peak) {
    return time.seconds > 0 ? std::min(1.0, rounded(time.rate() / peak)) : 0.5;
  }
  void add(const TimedWork& each) {
    const KernelWork& work = each.work;
    const auto add_to = [&](Measured& sum, double amount) {
      sum.amount += amount, sum.seconds += each.seconds;
    };
    if (work.family == KernelFamily::gemm)
      add_to(products_[work.dtype][{work.rows, work.columns, work.depth}], work.flops);
    else if (work.family == KernelFamily::attention && work.flops > 0)
      add_to(attention_[{work.dtype, work.backward}], work.flops);
    else if (work.bytes >= least_bytes)
      add_to(families_[{work.family, work.dtype}], work.bytes);
  }

  /// What smaller kernels take is latency, and says nothing of a bandwidth.
  static constexpr double least_bytes = 1 << 17;

  DeviceRates rates_;
  std::map<DType, std::map<std::tuple<std::int64_t, std::int64_t, std::int64_t>, Measured>> products_;
  std::map<std::pair<DType, bool>, Measured> attention_;
  std::map<std::pair<KernelFamily, DType>, Measured> families_;
  Measured around_, update_;
};

/// The link between ranks of this machine: of a large exchange its bandwidth, of a barrier its latency.
config::Link measure_link(comm::Communicator& comm, const Tell& tell) {
  CommBenchOptions options;
  options.bytes = std::size_t{16} << 20, options.rounds = 9;
  const Rounds rounds = measure_collectives(comm, options, tell);
  const double sent = static_cast<double>(options.bytes) * (comm.size() - 1) / comm.size();
  config::Link link{.name = "shared memory", .ranks = comm.size()};
  link.bandwidth = rounded(sent / rounds.median_seconds("all_gather"));
  link.sum_bandwidth = rounded(2 * sent / rounds.median_seconds("all_reduce"));
  link.latency = rounded(measure_barrier(comm) * 1e-6);
  return link;
}

DeviceRates measure_ranks(int ranks, const MachineBenchOptions& options, const std::function<bool()>& stopped,
                          const Tell& tell, Machine& machine) {
  RatesFromTimes rates(ranks);
  comm::CommOptions comm_options;
  comm_options.timeout_seconds = 300;
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const TrainedModel& model : models) {
      if (model.hidden > options.width) continue;
      if (stopped()) fail(ErrorKind::interrupted, "stopped");
      if (tell)
        tell(cat(counted(ranks, "rank"), ", ", name_of(dtype), ", ", model.type, " of width ", model.hidden));
      const config::Config config = config_of(model, dtype);
      const std::int64_t parameters = models::gpt_config(config, model.vocabulary).num_parameters();
      comm::run_local(ranks, comm_options, [&](comm::Communicator& comm) {
        const std::shared_ptr<comm::Communicator> world(&comm, [](comm::Communicator*) {});
        const auto dist = std::make_shared<Distributed>(world, comm.rank(), ranks);
        const TrainingTimes times = train(model, dtype, dist, options.steps);
        if (comm.rank() == 0) rates.add(times, config, parameters);
      });
    }
  if (ranks > 1)
    comm::run_local(ranks, comm_options, [&](comm::Communicator& comm) {
      config::Link link = measure_link(comm, comm.rank() == 0 ? tell : Tell());
      if (comm.rank() == 0) machine.links = {std::move(link)};
    });
  return rates.rates();
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

Machine measure_machine(const MachineBenchOptions& options, const std::function<bool()>& stopped,
                        const Tell& tell) {
  Machine machine;
  machine.name = cat(counted(options.cores, "core"), " of ", engine::cpu_model());
  machine.source = "measured by sherd bench machine";
  machine.devices = options.cores;
  const engine::MemorySizes memory = engine::memory_sizes();
  machine.host.memory = memory.limit > 0 ? std::min(memory.limit, memory.total) : memory.total;
  for (const int ranks : options.cores > 1 ? std::vector{1, options.cores} : std::vector{1})
    machine.rates.push_back(measure_ranks(ranks, options, stopped, tell, machine));
  machine.host.update = machine.rates.front().update;
  if (!options.folder.empty()) machine.drive = measure_drive(options.folder, stopped, tell);
  return machine;
}

}  // namespace sherd::bench
