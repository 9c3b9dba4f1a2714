#include "bench/programs/kernel_rounds.h"

#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "device/cuda.h"
#include "device/trace_range.h"

namespace sherd::bench {

using tensor::Tensor;

KernelRounds::KernelRounds(const KernelRoundsOptions& options)
    : options_(options),
      device_(options.cuda ? device::make_cuda_device({.threads = options.threads})
                           : device::make_cpu_device(options.threads)),
      kernels_(tensor::make_kernels(*device_)) {}

KernelRounds::~KernelRounds() = default;

bool KernelRounds::wanted(const std::string& name, DType dtype) const {
  return cat(name, ".", name_of(dtype)).find(options_.filter) != std::string::npos;
}

Tensor KernelRounds::make(const tensor::Shape& shape, DType dtype, device::Tier tier) {
  constexpr std::int64_t block_size = 1 << 16;
  const Tensor x = Tensor::empty(*device_, shape, dtype, device::Category::activations, tier);
  const Tensor block = Tensor::empty(*device_, {block_size}, dtype);
  kernels_->fill_normal(block, {1, 2}, 0, 0, 1);
  for (std::int64_t i = 0; i < x.numel(); i += block_size) {
    const std::int64_t n = std::min(block_size, x.numel() - i);
    kernels_->copy(block.range(0, n), x.range(i, i + n));
  }
  return x;
}

Tensor KernelRounds::ids(std::int64_t n, std::int32_t limit) {
  std::vector<std::int32_t> values(static_cast<std::size_t>(n));
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<std::int32_t>(philox({3, 4}, i)[0] % static_cast<std::uint32_t>(limit));
  return Tensor::of<std::int32_t>(*device_, {n}, values);
}

double KernelRounds::now() const {
  timespec time{};
  // One thread is measured by its own time, which other processes disturb less.
  clock_gettime(!options_.cuda && options_.threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

double KernelRounds::seconds_of(const std::function<void()>& run, int calls) {
  device_->synchronize();
  const double start = now();
  for (int i = 0; i < calls; ++i) run();
  device_->synchronize();
  return (now() - start) / calls;
}

int KernelRounds::calls_for(const std::function<void()>& run) {
  if (!options_.cuda) return 1;
  run();  // loads the kernel
  constexpr double long_enough = 3e-3;
  return static_cast<int>(std::clamp(std::ceil(long_enough / seconds_of(run, 1)), 1.0, 300.0));
}

void KernelRounds::copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (options_.cuda) return device_->copy(to, from, bytes);
  device_->arena().parallel_for(
      static_cast<std::int64_t>(bytes), 128 << 10, [&](std::int64_t begin, std::int64_t end) {
        std::memcpy(to + begin, from + begin, static_cast<std::size_t>(end - begin));
      });
}

void KernelRounds::measure(const MovingCase& test, DType dtype) {
  if (!wanted(test.name, dtype)) return;
  std::size_t bytes = 0;
  for (const Tensor& t : test.reads) bytes += t.bytes();
  for (const Tensor& t : test.writes) bytes += t.bytes();
  const Tensor from = Tensor::zeros(*device_, {static_cast<std::int64_t>(bytes / 2)}, DType::u8);
  const Tensor to = Tensor::zeros(*device_, {static_cast<std::int64_t>(bytes / 2)}, DType::u8);
  const std::function<void()> copy_run = [&] { copy_bytes(to.raw(), from.raw(), from.bytes()); };
  const std::function<void()> test_run = [&] {
    const device::TraceRange range("kernel");  // by which profilers tell it from what made its tensors
    test.run();
  };
  const int calls = calls_for(test_run), copies = calls_for(copy_run);
  double copy = 1e9, run = 1e9;
  for (int round = -1; round < options_.rounds; ++round) {
    const double copied = seconds_of(copy_run, copies), ran = seconds_of(test_run, calls);
    if (round >= 0) copy = std::min(copy, copied), run = std::min(run, ran);
  }
  const std::string name = cat(test.name, ".", name_of(dtype));
  const double rate = static_cast<double>(bytes) / run / 1e9;
  std::printf(
      "{\"kernel\": \"%s\", \"ms\": %.4f, \"gb_per_s\": %.2f, \"memcpy_ms\": %.4f, \"of_memcpy\": %.2f}\n",
      name.c_str(), run * 1e3, rate, copy * 1e3, copy / run);
  std::fflush(stdout);
  rates_.push_back({name, copy / run, 0, rate});
}

void KernelRounds::measure_products(const std::string& name, DType dtype, double flops,
                                    const std::function<void()>& run) {
  if (!wanted(name, dtype)) return;
  const int calls = calls_for(run);
  double best = 1e9;
  for (int round = -1; round < options_.rounds; ++round) {
    const double seconds = seconds_of(run, calls);
    if (round >= 0) best = std::min(best, seconds);
  }
  const std::string whole = cat(name, ".", name_of(dtype));
  std::printf("{\"kernel\": \"%s\", \"ms\": %.4f, \"tflop_per_s\": %.4g}\n", whole.c_str(), best * 1e3,
              flops / best / 1e12);
  std::fflush(stdout);
  rates_.push_back({whole, 0, flops / best / 1e12, 0});
}

void KernelRounds::print_summary() const {
  std::string slow;
  double fastest = 0;
  int moving = 0;
  for (const Rate& rate : rates_) {
    if (rate.tflops > 0) std::printf("kernel %s: %.4g TFLOP/s\n", rate.name.c_str(), rate.tflops);
    if (rate.tflops > 0) continue;
    ++moving;
    fastest = std::max(fastest, rate.gigabytes);
    if (rate.of_copy < 0.7)
      slow += cat(slow.empty() ? "" : ", ", rate.name, " ", std::lround(rate.of_copy * 100), " %");
  }
  if (moving > 0)
    std::printf("kernels that move memory: %d, the fastest %.0f GB/s; below 70 %% of a copy: %s\n", moving,
                fastest, slow.empty() ? "none" : slow.c_str());
}

}  // namespace sherd::bench
