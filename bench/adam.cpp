// The fused optimizer step beside what memory allows and beside separate passes, in alternating rounds of one
// process; prints one JSON object with the median time of each case and medians of the ratios of each round.
//   bench_adam [millions of parameters] [threads] [rounds]
//   bench_adam serve [millions of parameters] [threads]   runs the case named on each line of standard input
//   and
//                                                         answers with its seconds (adam_vs_deepspeed.py)

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "adam_streams.h"
#include "optim/split_master.h"
#include "optim/update_rule.h"
#include "tensor/exact_sum.h"
#include "tensor/kernels.h"

namespace {

using namespace sherd;
using tensor::Tensor;

constexpr std::int64_t grain = 1 << 16;

struct Case {
  std::string name;
  int bytes;  // per parameter, read and written; 0 for several passes
  std::function<void()> run;
};

class Bench {
 public:
  Bench(std::int64_t n, int threads)
      : n_(n),
        device_(device::make_cpu_device(threads)),
        kernels_(tensor::make_kernels(*device_)),
        p_(make(DType::f32, 0.5f)),
        m_(make(DType::f32, 0)),
        v_(make(DType::f32, 0)),
        g_(make(DType::f32, 0.02f)),
        p16_(make(DType::bf16, 0.5f)),
        g16_(make(DType::bf16, 0.02f)),
        high_(make(DType::bf16, 0.5f)),
        low_(make(DType::bf16, 0)),
        m16_(make(DType::bf16, 0)),
        v16_(make(DType::bf16, 0)) {
    hyper_.weight_decay = 0.1;
    streams_ = {p_.data<float>(), m_.data<float>(), v_.data<float>(),
                g_.data<float>(), halves(p16_),     halves(g16_)};
    add_cases();
  }

  const std::vector<Case>& cases() const { return cases_; }

  // Seconds of one run of the case.
  double time(const Case& c) {
    const auto start = std::chrono::steady_clock::now();
    c.run();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }

 private:
  Tensor make(DType dtype, double value) {
    Tensor x = Tensor::empty(*device_, {n_}, dtype);
    kernels_->fill(x, value);
    return x;
  }
  static std::uint16_t* halves(const Tensor& x) { return reinterpret_cast<std::uint16_t*>(x.raw()); }

  void each(const std::function<void(std::int64_t, std::int64_t)>& body) {
    device_->arena().parallel_for(n_, grain, body);
  }

  // fp32 masters and moments with a bf16 copy; 16-bit gradients, masters in halves, 16-bit moments as asked.
  optim::SpanUpdate span(bool grads16, bool split, bool moments16) {
    optim::SpanUpdate u;
    if (split)
      u.low = halves(low_);
    else
      u.master = streams_.p;
    u.grad = grads16 ? g16_.raw() : g_.raw(), u.grad_dtype = grads16 ? DType::bf16 : DType::f32;
    u.moments[0] = moments16 ? m16_.raw() : m_.raw(), u.moments[1] = moments16 ? v16_.raw() : v_.raw();
    u.moment_dtype = moments16 ? DType::bf16 : DType::f32, u.rounding = {1, 2};
    u.param = split ? high_.raw() : p16_.raw(), u.param_dtype = DType::bf16;
    u.n = n_;
    return u;
  }
  void fused(const optim::SpanUpdate& u) {
    if (!optim::update(u, hyper_, ++step_, device_->arena()))
      fail(ErrorKind::numerics, "bench_adam: overflow");
  }
  // The engine's step: the gradients' norm, then one pass.
  void norm_and_fused(optim::SpanUpdate u) {
    tensor::ExactSum squares;
    kernels_->sum_of_squares(g16_, squares);
    u.grad_factor = optim::gradient_factor(std::sqrt(squares.value()), 1, 1);
    fused(u);
  }

  void copy_out() {
    each(
        [&](std::int64_t b, std::int64_t e) { bench::round_to_16(streams_.p + b, streams_.p16 + b, e - b); });
  }
  void adam_alone() {
    each([&](std::int64_t b, std::int64_t e) { bench::adam_pass(streams_, {}, b, e); });
  }
  void five_passes() {
    each([&](std::int64_t b, std::int64_t e) { bench::upcast(streams_.g16 + b, streams_.g + b, e - b); });
    double squares = 0;
    std::mutex mutex;
    each([&](std::int64_t b, std::int64_t e) {
      const double part = bench::sum_of_squares(streams_.g + b, e - b);
      const std::lock_guard lock(mutex);
      squares += part;
    });
    const auto factor = static_cast<float>(optim::gradient_factor(std::sqrt(squares), 1, 1));
    each([&](std::int64_t b, std::int64_t e) { bench::scale(streams_.g + b, factor, e - b); });
    adam_alone();
    copy_out();
  }

  void add_cases() {
    const auto add = [&](const char* name, int bytes, std::function<void()> run) {
      cases_.push_back({name, bytes, std::move(run)});
    };
    add("limit", 30,
        [&] { each([&](std::int64_t b, std::int64_t e) { bench::move_streams(streams_, b, e); }); });
    add("fused", 30, [&] { fused(span(false, false, false)); });
    add("fused_grad16", 28, [&] { fused(span(true, false, false)); });
    add("split", 26, [&] { fused(span(true, true, false)); });
    add("split_moments16", 18, [&] { fused(span(true, true, true)); });
    add("path", 0, [&] { norm_and_fused(span(true, false, false)); });
    add("path_split", 0, [&] { norm_and_fused(span(true, true, false)); });
    add("path_moments16", 0, [&] { norm_and_fused(span(true, true, true)); });
    add("adam_alone", 28, [&] { adam_alone(); });
    add("five_passes", 0, [&] { five_passes(); });
  }

  std::int64_t n_;
  std::shared_ptr<device::Device> device_;
  std::unique_ptr<tensor::Kernels> kernels_;
  Tensor p_, m_, v_, g_, p16_, g16_, high_, low_, m16_, v16_;
  bench::Streams streams_{};
  optim::Hyper hyper_;
  std::int64_t step_ = 0;
  std::vector<Case> cases_;
};

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

void report(std::int64_t n, int threads, Bench& bench, int rounds) {
  std::map<std::string, std::vector<double>> seconds;
  for (int round = 0; round <= rounds; ++round)
    for (const Case& c : bench.cases()) {
      const double s = bench.time(c);
      if (round > 0) seconds[c.name].push_back(s);  // the first is a warm-up
    }
  const auto ratio = [&](const char* of, const char* to) {
    std::vector<double> each;
    for (std::size_t i = 0; i < seconds[of].size(); ++i) each.push_back(seconds[of][i] / seconds[to][i]);
    return median(each);
  };
  std::printf("{\"bench\": \"adam\", \"parameters\": %lld, \"threads\": %d, \"isa\": \"%s\"",
              static_cast<long long>(n), threads, std::string(name_of(cpu_isa())).c_str());
  for (const Case& c : bench.cases()) {
    const double s = median(seconds[c.name]);
    std::printf(", \"%s_ms\": %.2f", c.name.c_str(), s * 1e3);
    if (c.bytes)
      std::printf(", \"%s_gb_per_s\": %.1f", c.name.c_str(), c.bytes * static_cast<double>(n) / s * 1e-9);
  }
  std::printf(
      ", \"fused_of_the_limit\": %.3f, \"path_against_five_passes\": %.2f, "
      "\"path_split_against_five_passes\": %.2f, \"path_moments16_against_five_passes\": %.2f}\n",
      ratio("limit", "fused"), ratio("five_passes", "path"), ratio("five_passes", "path_split"),
      ratio("five_passes", "path_moments16"));
}

int serve(Bench& bench) {
  std::puts("ready");
  for (std::string line; std::fflush(stdout), std::getline(std::cin, line);) {
    const auto found = std::find_if(bench.cases().begin(), bench.cases().end(),
                                    [&](const Case& c) { return c.name == line; });
    if (found == bench.cases().end())
      return std::fprintf(stderr, "bench_adam: no case \"%s\"\n", line.c_str()), 1;
    std::printf("%.9f\n", bench.time(*found));
  }
  return 0;
}

double number(int argc, char** argv, int index, double otherwise) {
  return argc > index ? std::atof(argv[index]) : otherwise;
}

}  // namespace

int main(int argc, char** argv) {
  if (!__builtin_cpu_supports("avx2")) return std::puts("{\"skipped\": \"needs AVX2\"}"), 0;
  const bool serving = argc > 1 && !std::strcmp(argv[1], "serve");
  const int at = serving ? 2 : 1;
  const auto n = static_cast<std::int64_t>(number(argc, argv, at, 50) * 1e6) / grain * grain;
  const int threads = static_cast<int>(number(argc, argv, at + 1, available_cores()));
  const int rounds = static_cast<int>(number(argc, argv, at + 2, 9));
  if (n <= 0 || threads < 1 || rounds < 1)
    return std::fputs("bench_adam: arguments must be positive\n", stderr), 1;
  Bench bench(n, threads);
  if (serving) return serve(bench);
  report(n, threads, bench, rounds);
  return 0;
}
