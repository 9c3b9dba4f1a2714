#pragma once

#include <functional>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "comm/communicator.h"
#include "config/config.h"
#include "config/machine.h"
#include "engine/step/step_report.h"
#include "tensor/kernel_work.h"

// Kernels of training, timed where they run, and the rates that follow from their times.

namespace sherd::bench {

/// A transformer that trains for a few steps.
struct TrainedModel {
  const char* type;
  std::int64_t hidden, layers, heads, seq, rows, vocabulary;
};

/// The overhead of a call to the device, beside the kernel's work, in seconds; 0 where the thread itself
/// computes.
struct CallTimes {
  double alone = 0;   ///< a kernel of no work, queued and waited for
  double queued = 0;  ///< one of several kernels of no work that were queued before they begin
  double launch = 0;  ///< in which the thread queues one
};

CallTimes measure_calls(tensor::Kernels& kernels);

/// The median of `rounds` times of `run`, with all that it gives the device to do. `ready` runs before the
/// clock does.
double median_seconds(device::Device& device, int rounds, const std::function<void()>& run,
                      const std::function<void()>& ready = {});

/// One kernel of a training, with the time that it took.
struct TimedWork {
  tensor::KernelWork work;
  double seconds = 0;
};

/// One rank's measurements of training: the kernels of passes, and the seconds of whole passes and updates.
struct TrainingTimes {
  std::vector<TimedWork> kernels;
  double passes_seconds = 0, update_seconds = 0;
  int updates = 0;
  CallTimes calls;
};

config::Config config_of(const TrainedModel& model, DType dtype, config::DeviceType device);

/// Trains one model on this rank, beside the others of `world`, for a step, and then for `steps` that are
/// measured.
TrainingTimes train(const TrainedModel& model, const config::Config& config,
                    const std::shared_ptr<comm::Communicator>& world, int steps);

/// Four digits: a measurement has no more.
double rounded(double value);

/// Sums of amounts and seconds, of which a rate is made.
struct Measured {
  double amount = 0, seconds = 0;
  int times = 0;
  double rate() const { return rounded(amount / seconds); }
  void add(double more, double took) { amount += more, seconds += took, ++times; }
};

/// Rates from the times of kernels.
class RatesFromTimes {
 public:
  /// `ranks` as in config::DeviceRates; `peak`: FLOP/s by a data sheet, 0 where the fastest product tells.
  RatesFromTimes(int ranks, std::function<double(DType)> peak);

  void add(const TrainingTimes& times, const config::Config& config, std::int64_t parameters);
  config::DeviceRates rates();

 private:
  void add(const TimedWork& each, const CallTimes& calls);
  /// Nothing is said of a rate by what takes a device no longer than the call.
  bool tells(const Measured& time) const { return time.seconds > time.times * calls_.alone; }

  config::DeviceRates rates_;
  std::function<double(DType)> peak_;
  std::map<DType, std::map<std::tuple<std::int64_t, std::int64_t, std::int64_t>, Measured>> products_;
  std::map<std::pair<DType, bool>, Measured> attention_;
  std::map<std::pair<tensor::KernelFamily, DType>, Measured> families_;
  Measured around_, update_;
  CallTimes calls_;
};

}  // namespace sherd::bench
