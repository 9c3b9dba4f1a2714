#include "comm/exchange/worker.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <vector>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "base/arena.h"
#include "base/cpu_isa.h"
#include "comm/isa/reduce_kernels.h"

namespace sherd::comm {
namespace {

static_assert(static_cast<int>(Element::u8) == static_cast<int>(DType::u8));
static_assert(static_cast<int>(Element::f16) == static_cast<int>(DType::f16));
static_assert(static_cast<int>(Combine::min) == static_cast<int>(ReduceOp::min));

/// Flush-to-zero while a sum runs on whatever thread calls in, so that local and mpi, sync and async agree.
class FlushScope {
 public:
#if defined(__SSE2__)
  FlushScope() : saved_(_mm_getcsr()) {
    set_flush_denormals();
  }
  ~FlushScope() {
    _mm_setcsr(saved_);
  }

 private:
  unsigned saved_;
#endif
};

void run(const ReduceArgs& args) {
  FlushScope flush;
  switch (cpu_isa()) {
    case CpuIsa::avx512:
      return avx512::reduce(args);
    case CpuIsa::avx2:
      return avx2::reduce(args);
    case CpuIsa::portable:
      return portable::reduce(args);
  }
}

void copy_past_caches(std::byte* to, const std::byte* from, std::size_t bytes) {
  switch (cpu_isa()) {
    case CpuIsa::avx512:
      return avx512::copy_past_caches(to, from, bytes);
    case CpuIsa::avx2:
      return avx2::copy_past_caches(to, from, bytes);
    case CpuIsa::portable:
      return portable::copy_past_caches(to, from, bytes);
  }
}

/// Half of the last cache: ranks share it, and what is read passes through it too. (Not from sysconf, which
/// counts every cache of a large AMD processor as one.)
std::size_t half_of_last_cache() {
  std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index3/size");
  std::size_t size = 0;
  char unit = 0;
  if (file >> size >> unit && size > 0) return (unit == 'M' ? size << 20 : size << 10) / 2;
  return std::size_t{8} << 20;
}

/// Below this a copy is not worth a fence.
constexpr std::size_t least_streamed = 64 << 10;

class CpuWorker final : public Worker {
 public:
  explicit CpuWorker(int threads);
  bool immediate() const override { return true; }
  void begin(const Call&, std::size_t bytes) override { stream_ = bytes > cached_; }
  void end(Call&) override {}
  void copy(std::byte* to, const std::byte* from, std::size_t bytes) override;
  void reduce(const ReduceSpec& how, std::span<const std::byte* const> sources,
              std::span<std::byte* const> outs, std::int64_t count) override;

 private:
  std::unique_ptr<Arena> arena_;  ///< null with one thread
  std::size_t cached_;            ///< bytes that may be found in the caches later
  bool stream_ = false;
};

CpuWorker::CpuWorker(int threads) : cached_(half_of_last_cache()) {
  require(threads >= 1, "a communicator needs at least 1 thread, not ", threads);
  if (threads > 1) arena_ = std::make_unique<Arena>(threads);
}

void CpuWorker::copy(std::byte* to, const std::byte* from, std::size_t bytes) {
  constexpr std::int64_t grain = 1 << 20;
  if (to == from || bytes == 0) return;
  const auto move = [&](std::int64_t begin, std::int64_t end) {
    const auto count = static_cast<std::size_t>(end - begin);
    if (stream_ && bytes >= least_streamed)
      copy_past_caches(to + begin, from + begin, count);
    else
      std::memcpy(to + begin, from + begin, count);
  };
  if (!arena_ || bytes <= grain) return move(0, static_cast<std::int64_t>(bytes));
  arena_->parallel_for(static_cast<std::int64_t>(bytes), grain, move);
}

void CpuWorker::reduce(const ReduceSpec& how, std::span<const std::byte* const> sources,
                       std::span<std::byte* const> outs, std::int64_t count) {
  constexpr std::int64_t grain = 1 << 17;
  if (count == 0) return;
  std::vector<const void*> from(sources.begin(), sources.end());
  std::vector<void*> to(outs.begin(), outs.end());
  ReduceArgs args;
  args.sources = from.data();
  args.ranks = static_cast<int>(from.size());
  args.outs = to.data();
  args.outputs = static_cast<int>(to.size());
  args.in = static_cast<Element>(how.in);
  args.rounding = static_cast<Element>(how.rounding);
  args.out = static_cast<Element>(how.out);
  args.combine = static_cast<Combine>(how.op);
  args.factor = how.factor;
  args.onto = how.onto;
  args.onto_type = static_cast<Element>(how.onto_type);
  args.stream = stream_ && how.onto != to[0] && outs.size() == 1 &&
                static_cast<std::size_t>(count) * size_of(how.out) >= least_streamed &&
                std::find(from.begin(), from.end(), to[0]) == from.end();
  const auto body = [&](std::int64_t begin, std::int64_t end) {
    ReduceArgs part = args;
    part.begin = begin, part.end = end;
    run(part);
  };
  if (!arena_ || count <= grain) return body(0, count);
  arena_->parallel_for(count, grain, body);
}

}  // namespace

std::unique_ptr<Worker> make_cpu_worker(int threads) {
  return std::make_unique<CpuWorker>(threads);
}

}  // namespace sherd::comm
