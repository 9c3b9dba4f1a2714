// The optimizer step of `sherd bench adam` beside the same step in separate passes, in alternating rounds of
// one process; prints one JSON object with the median time of each case and medians of the ratios of each
// round.
// With --serve it answers the case named on each line of standard input with its seconds
// (adam_vs_deepspeed.py).
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <mutex>
#include <string>
#include <vector>

#include "base/cpu_isa.h"
#include "bench/programs/adam_passes.h"
#include "bench/programs/options.h"
#include "bench/programs/serving.h"
#include "bench/suite/adam_bench.h"

namespace {

using namespace sherd;

/// The step as separate passes, over the memory of `bench`.
class Passes {
 public:
  explicit Passes(bench::AdamBench& bench) : bench_(bench), s_(bench.streams()) {}

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
  bench::AdamBench& bench_;
  bench::OptimizerStreams s_;
};

void report(const bench::AdamBench& bench, const std::vector<bench::Contender>& cases, int threads,
            int rounds) {
  bench::Rounds times(rounds);
  times.run(cases);
  std::printf("{\"bench\": \"adam\", \"parameters\": %lld, \"threads\": %d, \"isa\": \"%s\"",
              static_cast<long long>(bench.parameters()), threads, std::string(name_of(cpu_isa())).c_str());
  for (const bench::Contender& c : cases)
    std::printf(", \"%s_ms\": %.2f", c.name.c_str(), times.median_seconds(c.name) * 1e3);
  std::printf(", \"fused_of_the_limit\": %.3f", times.ratio("limit", "fused"));
  for (const char* path : {"path", "path_split", "path_moments16"})
    std::printf(", \"%s_against_five_passes\": %.2f", path, times.ratio("five_passes", path));
  std::puts("}");
}

void serve(const std::vector<bench::Contender>& cases) {
  bench::serve("{}", [&](const std::string& line) {
    const auto found =
        std::find_if(cases.begin(), cases.end(), [&](const auto& c) { return c.name == line; });
    require(found != cases.end(), "no case \"", line, "\"");
    return bench::seconds_of(found->run);
  });
}

}  // namespace

int main(int argc, char** argv) {
  return bench::guarded("bench_adam", [&] {
    double millions = 50;
    int threads = available_cores(), rounds = 9;
    bool serving = false;
    bench::Options("bench_adam", "[--millions 50] [--threads N] [--rounds 9] [--serve]")
        .value("millions", millions)
        .value("threads", threads)
        .value("rounds", rounds)
        .flag("serve", serving)
        .parse(argc, argv);
    const auto n = static_cast<std::int64_t>(millions * 1e6) / 65536 * 65536;
    require(n > 0 && threads > 0 && rounds > 0, "numbers must be positive");
    bench::AdamBench bench(n, threads);
    Passes passes(bench);
    std::vector<bench::Contender> cases;
    for (const bench::AdamCase& c : bench.cases()) cases.push_back({c.name, c.run});
    cases.push_back({"adam_alone", [&] { passes.adam(); }});
    cases.push_back({"five_passes", [&] { passes.five(); }});
    if (serving) return serve(cases);
    report(bench, cases, threads, rounds);
  });
}
