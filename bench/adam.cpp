// The optimizer step of `sherd bench adam` beside the same step in separate passes, in alternating rounds of
// one process; prints one JSON object with the median time of each case and medians of the ratios of each
// round.
//   bench_adam [millions of parameters] [threads] [rounds]
//   bench_adam serve [millions of parameters] [threads]   runs the case named on each line of standard input
//                                                         and answers with its seconds (adam_vs_deepspeed.py)

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <mutex>
#include <string>
#include <vector>

#include "adam_passes.h"
#include "base/cpu_isa.h"
#include "cli/bench/adam_bench.h"

namespace {

using namespace sherd;

/// The step as separate passes, over the memory of `bench`.
class Passes {
 public:
  explicit Passes(cli::AdamBench& bench) : bench_(bench), s_(bench.streams()) {}

  void adam() {
    bench_.each([&](std::int64_t b, std::int64_t e) { bench::adam_pass(s_, {}, b, e); });
  }
  void five() {
    bench_.each([&](std::int64_t b, std::int64_t e) { bench::upcast(s_.g16 + b, s_.g + b, e - b); });
    double squares = 0;
    std::mutex mutex;
    bench_.each([&](std::int64_t b, std::int64_t e) {
      const double part = bench::sum_of_squares(s_.g + b, e - b);
      const std::lock_guard lock(mutex);
      squares += part;
    });
    const auto factor = static_cast<float>(optim::gradient_factor(std::sqrt(squares), 1, 1));
    bench_.each([&](std::int64_t b, std::int64_t e) { bench::scale(s_.g + b, factor, e - b); });
    adam();
    bench_.each([&](std::int64_t b, std::int64_t e) { bench::round_to_16(s_.p + b, s_.p16 + b, e - b); });
  }

 private:
  cli::AdamBench& bench_;
  cli::OptimizerStreams s_;
};

void report(const cli::AdamBench& bench, const std::vector<cli::Contender>& cases, int threads, int rounds) {
  cli::Rounds times(rounds);
  times.run(cases);
  std::printf("{\"bench\": \"adam\", \"parameters\": %lld, \"threads\": %d, \"isa\": \"%s\"",
              static_cast<long long>(bench.parameters()), threads, std::string(name_of(cpu_isa())).c_str());
  for (const cli::Contender& c : cases)
    std::printf(", \"%s_ms\": %.2f", c.name.c_str(), times.median_seconds(c.name) * 1e3);
  std::printf(", \"fused_of_the_limit\": %.3f", times.ratio("limit", "fused"));
  for (const char* path : {"path", "path_split", "path_moments16"})
    std::printf(", \"%s_against_five_passes\": %.2f", path, times.ratio("five_passes", path));
  std::puts("}");
}

int serve(const std::vector<cli::Contender>& cases) {
  std::puts("ready");
  for (std::string line; std::fflush(stdout), std::getline(std::cin, line);) {
    const auto found =
        std::find_if(cases.begin(), cases.end(), [&](const auto& c) { return c.name == line; });
    if (found == cases.end()) return std::fprintf(stderr, "bench_adam: no case \"%s\"\n", line.c_str()), 1;
    const auto start = std::chrono::steady_clock::now();
    found->run();
    std::printf("%.9f\n", std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  return 0;
}

double number(int argc, char** argv, int index, double otherwise) {
  return argc > index ? std::atof(argv[index]) : otherwise;
}

}  // namespace

int main(int argc, char** argv) {
  const bool serving = argc > 1 && !std::strcmp(argv[1], "serve");
  const int at = serving ? 2 : 1;
  const auto n = static_cast<std::int64_t>(number(argc, argv, at, 50) * 1e6) / 65536 * 65536;
  const int threads = static_cast<int>(number(argc, argv, at + 1, available_cores()));
  const int rounds = static_cast<int>(number(argc, argv, at + 2, 9));
  if (n <= 0 || threads < 1 || rounds < 1)
    return std::fputs("bench_adam: arguments must be positive\n", stderr), 1;
  cli::AdamBench bench(n, threads);
  Passes passes(bench);
  std::vector<cli::Contender> cases;
  for (const cli::AdamCase& c : bench.cases()) cases.push_back({c.name, c.run});
  cases.push_back({"adam_alone", [&] { passes.adam(); }});
  cases.push_back({"five_passes", [&] { passes.five(); }});
  if (serving) return serve(cases);
  report(bench, cases, threads, rounds);
  return 0;
}
