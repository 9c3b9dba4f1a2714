// The cost of saving a checkpoint to training: the seconds of some steps, and of the same number of steps
// with a save before them, beside training (training.save_async) and waiting for it, in alternating rounds of
// one process. Prints one JSON object: medians, and the ratios of medians, of the clock and of the process's
// time on processors, which other programs disturb less. One rank; random tokens.
//
//   bench_save_cost --path DIR --config F [--config F] [--set a.b.c=V]... [--steps 10] [--rounds 5]
//   [--warmup 2]
//
// DIR needs the room for two checkpoints, and the offload's where the configuration has states on NVMe there.
#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <iostream>

#include "bench/programs/options.h"
#include "bench/programs/serving.h"
#include "bench/suite/rounds.h"
#include "config/config.h"
#include "engine/initialize.h"
#include "engine/token_data.h"
#include "models/gpt.h"

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
      : s_(s),
        config_(config::parse_files(s.files, s.overrides)),
        shape_(models::gpt_config(config_, engine::vocabulary_size(config_))),
        folder_(std::filesystem::path(s.path) / cat("save_cost.", ::getpid())) {
    config_.data.reset();  // which random ids stand for
    engine_ = initialize({.dist = dist,
                          .model =
                              [&](const parallel::Layout& layout) {
                                return std::make_shared<models::Gpt>(shape_, layout);
                              },
                          .config = config_})
                  .engine;
    batch_ = {{"tokens", random_ids(1)}, {"labels", random_ids(2)}};
    steps(s.warmup);
    save(true);  // takes the memory that is kept
    engine_->finish_save();
  }
  ~Saving() {
    engine_.reset();
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }
  Saving(const Saving&) = delete;
  Saving& operator=(const Saving&) = delete;

  void measure() {
    Times plain, beside, waiting;
    std::vector<double> call, left;
    for (int round = 0; round < s_.rounds; ++round) {
      plain.add([&] { steps(s_.steps); });
      // The time that the writing thread takes on processors after the steps is the save's, too; not on the
      // clock.
      beside.add(
          [&] {
            call.push_back(bench::seconds_of([&] { save(true); }));
            steps(s_.steps);
          },
          [&] { left.push_back(bench::seconds_of([&] { engine_->finish_save(); })); });
      waiting.add([&] {
        save(false);
        steps(s_.steps);
      });
    }
    const auto ratio = [&](const char* name, const Times& times) {
      return cat("\"", name, "_ratio\": ", bench::median(times.wall) / bench::median(plain.wall), ", \"",
                 name, "_cpu_ratio\": ", bench::median(times.cpu) / bench::median(plain.cpu));
    };
    std::cout << "{\"bench\": \"save_cost\", \"parameters\": " << shape_.num_parameters(false)
              << ", \"steps\": " << s_.steps << ", \"rounds\": " << s_.rounds
              << ", \"steps_s\": " << bench::median(plain.wall) << ", \"call_s\": " << bench::median(call)
              << ", \"left_after_steps_s\": " << bench::median(left) << ", " << ratio("beside", beside)
              << ", " << ratio("waiting", waiting) << ", \"host_copy_bytes\": "
              << engine_->device().ledger().current(device::Tier::host, device::Category::checkpoint) << "}"
              << std::endl;
  }

 private:
  /// Seconds of each round, by the clock and on processors.
  struct Times {
    std::vector<double> wall, cpu;
    template <class Body, class After>
    void add(const Body& body, const After& after) {
      const double begun = on_processors();
      wall.push_back(bench::seconds_of(body));
      after();
      cpu.push_back(on_processors() - begun);
    }
    template <class Body>
    void add(const Body& body) {
      add(body, [] {});
    }
    static double on_processors() {
      rusage used{};
      ::getrusage(RUSAGE_SELF, &used);
      const auto seconds = [](const timeval& t) {
        return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
      };
      return seconds(used.ru_utime) + seconds(used.ru_stime);
    }
  };

  void steps(int count) {
    for (int i = 0; i < count; ++i) engine_->train_batch([&] { return batch_; });
    engine_->device().synchronize();
  }
  void save(bool async) {
    engine_->save_checkpoint(folder_.string(), engine::SaveOptions{.async = async, .keep_last = 1});
  }
  tensor::Tensor random_ids(std::uint64_t stream) {
    const tensor::Shape shape{engine_->config().batch.micro_batch_size, shape_.seq_length};
    std::vector<std::int32_t> ids(static_cast<std::size_t>(shape.numel()));
    for (std::size_t i = 0; i < ids.size(); ++i)
      ids[i] = static_cast<std::int32_t>(philox({9, stream}, i)[0] %
                                         static_cast<std::uint64_t>(shape_.vocab_size));
    return tensor::Tensor::of<std::int32_t>(engine_->device(), shape, ids);
  }

  const SaveCostSettings& s_;
  config::Config config_;
  models::GptConfig shape_;
  std::filesystem::path folder_;
  std::unique_ptr<Engine> engine_;
  tensor::Batch batch_;
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
