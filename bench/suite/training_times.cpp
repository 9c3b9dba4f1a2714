#include "bench/suite/training_times.h"

#include <algorithm>
#include <array>
#include <chrono>

#include "base/error.h"
#include "base/text/excerpt.h"
#include "bench/suite/rounds.h"
#include "engine/engine.h"
#include "engine/estimate/step_time.h"
#include "engine/report/report.h"
#include "engine/setup/make_device.h"
#include "engine/setup/process_grid.h"
#include "models/gpt.h"
#include "tensor/meta/recording_kernels.h"

namespace sherd::bench {
namespace {

using config::DeviceRates;
using tensor::KernelFamily;
using tensor::KernelWork;
using tensor::meta::RecordingKernels;
using Op = sharding::Instruction::Op;

/// The time once the device has done all that it was given.
double now(device::Device& device) {
  device.synchronize();
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// Passes every kernel on, and tells how long it took.
class TimingKernels final : public tensor::ForwardingKernels<TimingKernels> {
 public:
  TimingKernels(std::unique_ptr<tensor::Kernels> inner, std::function<void(double)> tell)
      : inner_(std::move(inner)), tell_(std::move(tell)) {}
  tensor::Device& device() override { return inner_->device(); }
  bool folds_gradients() const override { return inner_->folds_gradients(); }
  bool multiplies_stored() const override { return inner_->multiplies_stored(); }
  void require_fp8(const tensor::Fp8Recipe& recipe) const override { inner_->require_fp8(recipe); }
  template <class Kernel, class... Args>
  void forward(KernelFamily, Kernel kernel, Args&... args) {
    const double begin = now(device());
    (inner_.get()->*kernel)(args...);
    tell_(now(device()) - begin);
  }

 private:
  std::unique_ptr<tensor::Kernels> inner_;
  std::function<void(double)> tell_;
};

/// Writes down what one rank does.
class Recorder final : public engine::InstructionObserver {
 public:
  explicit Recorder(device::Device& device) : device_(device) {}

  void begin(const sharding::Instruction& instruction) override {
    // The last micro-batch's backward exchanges gradients.
    passes_ =
        (instruction.op == Op::forward || instruction.op == Op::backward) && instruction.micro_batch == 0;
    begun_ = now(device_);
  }
  void end(const sharding::Instruction& instruction, double) override {
    if (passes_) times.passes_seconds += now(device_) - begun_;
    if (instruction.op == Op::update) times.update_seconds += now(device_) - begun_, ++times.updates;
    passes_ = open_ = false;
  }
  void tell(const KernelWork& work) {
    open_ = passes_;
    if (open_) times.kernels.push_back({work});
  }
  void tell(double seconds) {
    if (open_) times.kernels.back().seconds = seconds;
    open_ = false;
  }

  TrainingTimes times;

 private:
  device::Device& device_;
  bool passes_ = false, open_ = false;
  double begun_ = 0;
};

}  // namespace

double median_seconds(device::Device& device, int rounds, const std::function<void()>& run,
                      const std::function<void()>& ready) {
  std::vector<double> seconds;
  for (int i = 0; i < rounds; ++i) {
    if (ready) ready();
    const double begin = now(device);
    run();
    seconds.push_back(now(device) - begin);
  }
  return median(std::move(seconds));
}

CallTimes measure_calls(tensor::Kernels& kernels) {
  device::Device& device = kernels.device();
  if (!device.accelerator()) return {};
  constexpr int several = 10, rounds = 9;
  constexpr std::size_t much = std::size_t{256}
                               << 20;  // whose copy takes longer than queueing several kernels
  constexpr double least = 1e-7;
  const tensor::Tensor x = tensor::Tensor::zeros(device, {32}, DType::f32);
  const device::Storage from = device.allocate(much, device::Category::workspace),
                        to = device.allocate(much, device::Category::workspace);
  const auto copy = [&] { device.copy(to.data(), from.data(), much); };
  std::vector<double> queueing;
  const auto copy_and_kernels = [&] {
    copy();
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < several; ++i) kernels.fill(x, 1);
    queueing.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  };
  CallTimes out;
  out.alone = median_seconds(device, rounds, [&] { kernels.fill(x, 1); });
  const double behind =
      median_seconds(device, rounds, copy_and_kernels) - median_seconds(device, rounds, copy);
  out.launch = std::max(least, median(queueing) / several);
  out.queued = std::max(least, behind / several);
  return out;
}

config::Config config_of(const TrainedModel& m, DType dtype, config::DeviceType device) {
  config::Config config = config::parse_text(
      cat(R"({"model": {"type": ")", m.type, R"(", "hidden_size": )", m.hidden, R"(, "num_layers": )",
          m.layers, R"(, "num_heads": )", m.heads, R"(, "seq_length": )", m.seq, R"(, "vocab_size": )",
          m.vocabulary, R"(}, "train_micro_batch_size_per_gpu": )", m.rows,
          R"(, "gradient_accumulation_steps": 2,)",
          dtype == DType::bf16 ? R"("bf16": {"enabled": true},)" : "", R"("steps_per_print": 0})"),
      "the benchmark");
  config.device.type = device;
  config.device.cuda_graphs = false;  // kernels are timed one by one
  config.notes.clear();
  return config;
}

TrainingTimes train(const TrainedModel& m, const config::Config& config,
                    const std::shared_ptr<comm::Communicator>& world, int steps) {
  const auto dist = std::make_shared<Distributed>(world, world->rank(), world->size());
  const std::shared_ptr<device::Device> device = engine::make_device(config, *dist);
  Recorder recorder(*device);
  std::unique_ptr<tensor::Kernels> inner = engine::make_kernels(config, *device);
  recorder.times.calls = measure_calls(*inner);
  auto timing =
      std::make_unique<TimingKernels>(std::move(inner), [&](double seconds) { recorder.tell(seconds); });
  auto kernels = std::make_unique<RecordingKernels>(std::move(timing),
                                                    [&](const KernelWork& work) { recorder.tell(work); });
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
  engine.set_observer(&recorder);
  for (int i = 0; i < steps; ++i) engine.train_batch([&] { return batch; });
  engine.set_observer(nullptr);
  return std::move(recorder.times);
}

double rounded(double value) {
  return std::stod(engine::printed("%.4g", value));
}

RatesFromTimes::RatesFromTimes(int ranks, std::function<double(DType)> peak) : peak_(std::move(peak)) {
  rates_.ranks = ranks;
}

void RatesFromTimes::add(const TrainingTimes& times, const config::Config& config, std::int64_t parameters) {
  double inside = 0;
  for (const TimedWork& each : times.kernels) {
    inside += each.seconds;
    add(each, times.calls);
  }
  around_.add(static_cast<double>(times.kernels.size()), std::max(0.0, times.passes_seconds - inside));
  update_.add(times.updates * static_cast<double>(parameters) * engine::update_bytes(config),
              times.update_seconds);
  calls_ = times.calls;
}

DeviceRates RatesFromTimes::rates() {
  for (auto& [dtype, shapes] : products_) {
    config::ProductRates products{.dtype = dtype};
    for (const auto& [extents, time] : shapes) {
      if (!tells(time)) continue;
      const auto& [rows, columns, depth] = extents;
      products.measured.push_back({rows, columns, depth, time.rate()});
      products.peak = std::max(products.peak, time.rate());
    }
    if (products.measured.empty()) continue;
    if (const double sheet = peak_(dtype); sheet > 0) products.peak = sheet;
    const auto attention = [&](const std::pair<DType, bool>& which) {
      const Measured& time = attention_[which];
      return time.seconds > 0 && tells(time) ? std::min(1.0, rounded(time.rate() / products.peak)) : 0.5;
    };
    products.attention.forward = attention({dtype, false});
    products.attention.backward = attention({dtype, true});
    rates_.products.push_back(std::move(products));
  }
  Measured all;
  for (const auto& [of, time] : families_) {
    if (!tells(time)) continue;
    const auto& [family, dtype] = of;
    rates_.families.push_back(
        {std::string(tensor::kernel_families[static_cast<std::size_t>(family)]), dtype, time.rate()});
    all.add(time.amount, time.seconds);
  }
  if (rates_.products.empty() || rates_.families.empty())
    fail(ErrorKind::usage,
         "the kernels of these models take no longer than the calls: measure wider ones (--width)");
  rates_.bandwidth = all.rate();
  rates_.update = update_.rate();
  if (calls_.queued > 0) {
    rates_.latency = rounded(calls_.queued), rates_.launch = rounded(calls_.launch);
    rates_.overlap = 0.8;  // assumed: NCCL's kernels take a part of the multiprocessors
  } else {
    rates_.latency = rounded(around_.seconds / around_.amount);
    rates_.overlap = 0;  // a rank's calls take the cores that its kernels run on
  }
  return std::move(rates_);
}

void RatesFromTimes::add(const TimedWork& each, const CallTimes& calls) {
  constexpr double least_bytes =
      1 << 17;  // what smaller kernels take is latency, and says nothing of a bandwidth
  const KernelWork& work = each.work;
  const double seconds = each.seconds - calls.alone;
  if (work.family == KernelFamily::gemm)
    products_[work.dtype][{work.rows, work.columns, work.depth}].add(work.flops, seconds);
  else if (work.family == KernelFamily::attention && work.flops > 0)
    attention_[{work.dtype, work.backward}].add(work.flops, seconds);
  else if (work.bytes >= least_bytes)
    families_[{work.family, work.dtype}].add(work.bytes, seconds);
}

}  // namespace sherd::bench
