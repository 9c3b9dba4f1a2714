// The optimizer step of the whole engine, on the processor or a GPU, as a configuration describes it: every
// time is taken between two moments at which the device has done all its work. One batch of random tokens is
// trained on over and over, so that no dataset is needed. Prints one JSON object; with --serve a script sets
// it beside others (bench/train_vs_peers.py, bench/parallel_vs_pytorch.py). With --ranks several ranks of
// this process share the work, and rank 0 takes the times.
//
// --serve answers the lines "steps N" with the seconds of N steps, "phases" with where a step's time goes
// when the device is waited for after each phase, and "report" with losses and memory.
#include <array>
#include <memory>
#include <sstream>

#include "base/cpu_isa.h"
#include "base/text/excerpt.h"
#include "bench/programs/gpt_in_training.h"
#include "bench/programs/options.h"
#include "bench/suite/rounds.h"
#include "device/accelerator.h"
#include "engine/setup/make_device.h"

namespace {

using namespace sherd;
using device::Tier;

struct TrainSettings {
  std::vector<std::string> files, overrides;
  int ranks = 1, warmup = 2, steps = 5;
  bool serve = false;
};

/// A model in training, and what is asked about it.
class TrainedModel : public bench::GptInTraining {
 public:
  TrainedModel(const TrainSettings& s, const DistributedPtr& dist)
      : GptInTraining(s.files, s.overrides, dist) {}

  /// Seconds of `count` optimizer steps, from an idle device to an idle device.
  double seconds_of_steps(int count) {
    return bench::seconds_of([&] { steps(count); });
  }

  /// Where the time of one step goes, as JSON. The waits make it slower than a step without them.
  std::string phases() {
    double forward = 0, backward = 0, update = 0;
    const auto timed = [&](double& total, const auto& body) {
      total += bench::seconds_of([&] { body(), engine().device().synchronize(); });
    };
    for (bool last = false; !last;) {
      last = engine().is_gradient_accumulation_boundary();
      autograd::Var loss;
      timed(forward, [&] { loss = engine().forward(batch()); });
      timed(backward, [&] { engine().backward(loss); });
      timed(update, [&] { engine().step(); });
    }
    return cat("{\"forward_s\": ", forward, ", \"backward_s\": ", backward, ", \"update_s\": ", update, "}");
  }

  /// The facts that a reader of the times must know.
  std::string facts() const {
    const config::Batch& batch = engine().config().batch;
    std::ostringstream out;
    out.precision(12);
    out << "{\"peer\": \"sherd\", \"device\": \"" << device_name() << "\", \"dtype\": \""
        << name_of(engine().config().precision.compute)
        << "\", \"parameters\": " << shape().num_parameters(false)
        << ", \"micro_batch\": " << batch.micro_batch_size
        << ", \"accumulation\": " << batch.gradient_accumulation_steps << ", \"seq\": " << shape().seq_length
        << ", \"tokens_per_step\": " << batch.train_batch_size * shape().seq_length
        << ", \"flops_per_token\": " << flops(models::AttentionFlops::causal_half)
        << ", \"flops_per_token_full_attention\": " << flops(models::AttentionFlops::full)
        << ", \"peak_flops\": " << peak() << ", \"build_s\": " << build_seconds() << "}";
    return out.str();
  }

  std::string report() const {
    const device::Ledger& ledger = engine().device().ledger();
    const engine::StepReport& step = engine().last_step();
    std::ostringstream out;
    out.precision(9);
    out << "{\"step\": " << engine().global_steps() << ", \"loss\": " << step.loss
        << ", \"grad_norm\": " << step.grad_norm << ", \"device_peak\": " << ledger.peak(Tier::device)
        << ", \"activation_peak\": " << ledger.peak(Tier::device, device::Category::activations)
        << ", \"host_peak\": " << ledger.peak(Tier::host) << ", \"nvme_peak\": " << ledger.peak(Tier::nvme)
        << ", \"nvme_read\": " << engine().io_bytes().read
        << ", \"nvme_written\": " << engine().io_bytes().written;
    const tensor::AttentionRoutes attention = engine().kernels().attention_routes();
    if (device::Accelerator* gpu = engine().device().accelerator()) {
      out << ", \"attention_by_library\": " << attention.by_library
          << ", \"attention_by_own_kernels\": " << attention.by_own;
      const device::DeviceMemory memory = gpu->memory();
      // The numbers are of all programs: with the driver's own and what the allocator keeps, which no ledger
      // knows.
      out << ", \"gpu_in_use\": " << memory.total - memory.free << ", \"gpu_memory\": " << memory.total;
    }
    out << "}";
    return out.str();
  }

  /// Ranks other than 0 do as it says, until it says 0 steps.
  void follow() {
    for (int count = 1; count != 0;) {
      count = told(0);
      if (count > 0) steps(count);
      if (count < 0) phases();
    }
  }
  /// The same number on all ranks: what rank 0 gives.
  int told(int count) {
    comm::Communicator& world = engine().dist().world();
    if (world.size() == 1) return count;
    const tensor::Tensor x = tensor::Tensor::of<std::int32_t>(engine().device(), {1}, std::array{count});
    world.broadcast(x, 0, {.label = "what to do", .scalar = true}).wait();
    return tensor::to_host(engine().device(), x).data<std::int32_t>()[0];
  }

  double tokens_per_step() const {
    return static_cast<double>(engine().train_batch_size() * shape().seq_length);
  }

 private:
  double flops(models::AttentionFlops convention) const {
    return models::flops_per_token(shape(), shape().seq_length, convention);
  }
  /// The GPU's, as MFU counts it; 0 on a processor and where it is unknown.
  double peak() const {
    return engine().device().accelerator() ? engine::share_gpus_locally(config(), 1).peak : 0;
  }
  std::string device_name() const {
    if (const device::Accelerator* gpu = engine().device().accelerator()) return gpu->name();
    return cat("cpu, ", counted(engine().device().arena().threads(), "thread"), ", ", name_of(cpu_isa()));
  }
};

std::string answer(TrainedModel& training, const std::string& line) {
  std::istringstream in(line);
  std::string word;
  int count = 1;
  in >> word >> count;
  if (word == "steps") return cat(training.seconds_of_steps(training.told(count)));
  if (word == "phases") return training.told(-1), training.phases();
  if (word == "report") return training.report();
  fail(ErrorKind::usage, "asked for '", line, "': steps N, phases and report are answered");
}

void measure(TrainedModel& training, const TrainSettings& s) {
  if (s.warmup > 0) training.steps(training.told(s.warmup));
  std::vector<double> seconds(static_cast<std::size_t>(s.steps));
  for (double& step : seconds) step = training.seconds_of_steps(training.told(1));
  training.told(-1);
  const std::string phases = training.phases();
  const double median = bench::median(seconds);
  std::cout << "{\"bench\": \"train_step\", \"step_s\": " << median
            << ", \"tokens_per_s\": " << training.tokens_per_step() / median
            << ", \"facts\": " << training.facts() << ", \"phases\": " << phases
            << ", \"report\": " << training.report() << "}" << std::endl;
}

TrainSettings parse(int argc, char** argv) {
  TrainSettings s;
  bench::Options("bench_train_step",
                 "--config F [--config F] [--set a.b.c=V]... [--ranks 1] [--warmup 2] [--steps 5] [--serve]")
      .list("config", s.files)
      .list("set", s.overrides)
      .value("ranks", s.ranks)
      .value("warmup", s.warmup)
      .value("steps", s.steps)
      .flag("serve", s.serve)
      .parse(argc, argv);
  require(!s.files.empty(), "--config says what to train");
  require(s.steps > 0 && s.warmup >= 0, "--steps must be positive, and --warmup not negative");
  return s;
}

}  // namespace

int main(int argc, char** argv) {
  return bench::guarded("bench_train_step", [&] {
    const TrainSettings s = parse(argc, argv);
    launch_ranks(s.ranks, [&](const DistributedPtr& dist) {
      TrainedModel training(s, dist);
      if (dist->rank() > 0) return training.follow();
      if (s.serve)
        bench::serve(training.facts(), [&](const std::string& line) { return answer(training, line); });
      else
        measure(training, s);
      training.told(0);
    });
  });
}
