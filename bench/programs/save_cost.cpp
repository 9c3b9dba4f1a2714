// The cost of saving a checkpoint to training: the seconds of some steps, and of the same number of steps
// with a save before them, beside training (training.save_async) and waiting for it, in alternating rounds of
// one process. Prints one JSON object: medians, and the ratios of medians, of the clock and of the process's
// time on processors, which other programs disturb less. One rank; random tokens.
//
// The folder of --path needs the room for two checkpoints, and the offload's where the configuration has
// states on NVMe there.
#include <filesystem>
#include <iostream>

#include "bench/programs/gpt_in_training.h"
#include "bench/programs/options.h"
#include "bench/suite/rounds.h"

namespace {

using namespace sherd;

struct SaveCostSettings {
  std::string path;
  std::vector<std::string> files, overrides;
  int steps = 10, rounds = 5, warmup = 2;
};

class Saving {
 public:
  Saving(const SaveCostSettings& s, const DistributedPtr& dist)
      : s_(s), folder_(s.path, "save_cost"), training_(s.files, s.overrides, dist) {
    training_.steps(s.warmup);
    save(true);  // takes the memory that is kept
    engine().finish_save();
  }

  void measure() {
    Times plain, beside, waiting;
    std::vector<double> call, left;
    for (int round = 0; round < s_.rounds; ++round) {
      plain.add([&] { training_.steps(s_.steps); });
      // The time that the writing thread takes on processors after the steps is the save's, too; not on the
      // clock.
      beside.add(
          [&] {
            call.push_back(bench::seconds_of([&] { save(true); }));
            training_.steps(s_.steps);
          },
          [&] { left.push_back(bench::seconds_of([&] { engine().finish_save(); })); });
      waiting.add([&] {
        save(false);
        training_.steps(s_.steps);
      });
    }
    const auto ratio = [&](const char* name, const Times& times) {
      return cat("\"", name, "_ratio\": ", bench::median(times.wall) / bench::median(plain.wall), ", \"",
                 name, "_cpu_ratio\": ", bench::median(times.cpu) / bench::median(plain.cpu));
    };
    std::cout << "{\"bench\": \"save_cost\", \"parameters\": " << training_.shape().num_parameters(false)
              << ", \"steps\": " << s_.steps << ", \"rounds\": " << s_.rounds
              << ", \"steps_s\": " << bench::median(plain.wall) << ", \"call_s\": " << bench::median(call)
              << ", \"left_after_steps_s\": " << bench::median(left) << ", " << ratio("beside", beside)
              << ", " << ratio("waiting", waiting) << ", \"host_copy_bytes\": "
              << engine().device().ledger().current(device::Tier::host, device::Category::checkpoint) << "}"
              << std::endl;
  }

 private:
  /// Seconds of each round, by the clock and on processors.
  struct Times {
    std::vector<double> wall, cpu;
    template <class Body, class After>
    void add(const Body& body, const After& after) {
      const double begun = bench::processor_seconds();
      wall.push_back(bench::seconds_of(body));
      after();
      cpu.push_back(bench::processor_seconds() - begun);
    }
    template <class Body>
    void add(const Body& body) {
      add(body, [] {});
    }
  };

  Engine& engine() { return training_.engine(); }
  void save(bool async) {
    engine().save_checkpoint(folder_.path().string(), engine::SaveOptions{.async = async, .keep_last = 1});
  }

  const SaveCostSettings& s_;
  const bench::WorkFolder folder_;
  bench::GptInTraining training_;
};

SaveCostSettings parse(int argc, char** argv) {
  SaveCostSettings s;
  bench::Options(
      "bench_save_cost",
      "--path DIR --config F [--config F] [--set a.b.c=V]... [--steps 10] [--rounds 5] [--warmup 2]")
      .value("path", s.path)
      .list("config", s.files)
      .list("set", s.overrides)
      .value("steps", s.steps)
      .value("rounds", s.rounds)
      .value("warmup", s.warmup)
      .parse(argc, argv);
  require(!s.files.empty(), "--config says what to train");
  require(std::filesystem::is_directory(s.path), "--path '", s.path, "' is no folder");
  require(s.steps > 0 && s.rounds > 0 && s.warmup >= 0,
          "--steps and --rounds must be positive, and --warmup not negative");
  return s;
}

}  // namespace

int main(int argc, char** argv) {
  return bench::guarded("bench_save_cost", [&] {
    const SaveCostSettings s = parse(argc, argv);
    launch_ranks(1, [&](const DistributedPtr& dist) { Saving(s, dist).measure(); });
  });
}
