// Fused AdamW (fp32 masters, moments and gradients, bf16 copy: 30 bytes per parameter) beside a loop that
// only moves the same bytes with the same prefetch and stores. Rounds alternate in one process; prints one
// JSON object.
//   bench_adam [millions of parameters] [threads] [rounds]

#include <immintrin.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "optim/update_rule.h"

namespace {

using namespace sherd;

constexpr std::int64_t grain = 1 << 16;
constexpr double bytes_per_parameter = 30;

// 64-byte aligned, first touched by the threads that use it.
template <class T>
struct Buffer {
  explicit Buffer(std::int64_t n, Arena& arena, T value)
      : data(static_cast<T*>(
            std::aligned_alloc(64, (static_cast<std::size_t>(n) * sizeof(T) + 63) / 64 * 64))) {
    if (!data) std::abort();
    arena.parallel_for(n, grain, [&](std::int64_t begin, std::int64_t end) {
      std::fill(data.get() + begin, data.get() + end, value);
    });
  }
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  std::unique_ptr<T[], Free> data;
};

struct Streams {
  float *p, *m, *v;
  const float* g;
  std::uint16_t* out;
};

// The streaming limit: reads and writes what Adam does, with next to no arithmetic.
__attribute__((target("avx2"))) void move_bytes(const Streams& s, std::int64_t begin, std::int64_t end) {
  const __m256 tiny = _mm256_set1_ps(1e-6f);
  for (std::int64_t i = begin; i + 16 <= end; i += 16) {
    for (const void* ahead :
         {static_cast<const void*>(s.p + i + 128), static_cast<const void*>(s.m + i + 128),
          static_cast<const void*>(s.v + i + 128), static_cast<const void*>(s.g + i + 128)})
      _mm_prefetch(static_cast<const char*>(ahead), _MM_HINT_T0);
    __m256i half[2];
    for (int k = 0; k < 2; ++k) {
      const std::int64_t at = i + 8 * k;
      const __m256 g = _mm256_mul_ps(_mm256_loadu_ps(s.g + at), tiny);
      const __m256 p = _mm256_sub_ps(_mm256_loadu_ps(s.p + at), g);
      _mm256_storeu_ps(s.m + at, _mm256_add_ps(_mm256_loadu_ps(s.m + at), g));
      _mm256_storeu_ps(s.v + at, _mm256_add_ps(_mm256_loadu_ps(s.v + at), g));
      _mm256_storeu_ps(s.p + at, p);
      half[k] = _mm256_srli_epi32(_mm256_castps_si256(p), 16);
    }
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(half[0], half[1]), 0xd8);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(s.out + i), packed);
  }
  _mm_sfence();
}

template <class Body>
double seconds(const Body& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

double number(int argc, char** argv, int index, double otherwise) {
  return argc > index ? std::atof(argv[index]) : otherwise;
}

}  // namespace

int main(int argc, char** argv) {
  if (!__builtin_cpu_supports("avx2")) return std::puts("{\"skipped\": \"needs AVX2\"}"), 0;
  const auto n = static_cast<std::int64_t>(number(argc, argv, 1, 50) * 1e6) / grain * grain;
  const int threads = static_cast<int>(number(argc, argv, 2, available_cores()));
  const int rounds = static_cast<int>(number(argc, argv, 3, 9));
  if (n <= 0 || threads < 1 || rounds < 1)
    return std::fputs("bench_adam: arguments must be positive\n", stderr), 1;
  Arena arena(threads);
  Buffer<float> p(n, arena, 0.5f), m(n, arena, 0.01f), v(n, arena, 1e-4f), g(n, arena, 0.02f);
  Buffer<std::uint16_t> out(n, arena, 0);
  const Streams streams{p.data.get(), m.data.get(), v.data.get(), g.data.get(), out.data.get()};

  optim::SpanUpdate span;
  span.master = streams.p, span.grad = streams.g, span.moments[0] = streams.m, span.moments[1] = streams.v;
  span.param = streams.out, span.param_dtype = DType::bf16, span.n = n;
  optim::Hyper hyper;
  hyper.weight_decay = 0.1;

  std::vector<double> limit, adam, ratio;
  for (int round = 0; round <= rounds; ++round) {
    const double moved = seconds([&] {
      arena.parallel_for(n, grain,
                         [&](std::int64_t begin, std::int64_t end) { move_bytes(streams, begin, end); });
    });
    const double stepped = seconds([&] { optim::update(span, hyper, round + 1, arena); });
    if (round == 0) continue;  // warm-up
    limit.push_back(moved), adam.push_back(stepped), ratio.push_back(moved / stepped);
  }
  const double bytes = bytes_per_parameter * static_cast<double>(n);
  std::printf(
      "{\"bench\": \"adam\", \"parameters\": %lld, \"threads\": %d, \"isa\": \"%s\", \"adam_ms\": %.2f, "
      "\"limit_ms\": %.2f, \"adam_gb_per_s\": %.1f, \"limit_gb_per_s\": %.1f, \"of_the_limit\": %.3f}\n",
      static_cast<long long>(n), threads, std::string(name_of(cpu_isa())).c_str(), median(adam) * 1e3,
      median(limit) * 1e3, bytes / median(adam) / 1e9, bytes / median(limit) / 1e9, median(ratio));
  return 0;
}
