#include "comm/exchange/worker.h"

#include <cstring>
#include <vector>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

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

}  // namespace

Worker::Worker(int threads) {
  require(threads >= 1, "a communicator needs at least 1 thread, not ", threads);
  if (threads > 1) arena_ = std::make_unique<Arena>(threads);
}

void Worker::copy(std::byte* to, const std::byte* from, std::size_t bytes) {
  constexpr std::int64_t grain = 1 << 20;
  if (to == from || bytes == 0) return;
  if (!arena_ || bytes <= grain) {
    std::memcpy(to, from, bytes);
    return;
  }
  arena_->parallel_for(static_cast<std::int64_t>(bytes), grain, [&](std::int64_t begin, std::int64_t end) {
    std::memcpy(to + begin, from + begin, static_cast<std::size_t>(end - begin));
  });
}

void Worker::reduce(const Reduction& how, std::span<const std::byte* const> sources,
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
  args.accumulate = how.accumulate;
  const auto body = [&](std::int64_t begin, std::int64_t end) {
    ReduceArgs part = args;
    part.begin = begin, part.end = end;
    run(part);
  };
  if (!arena_ || count <= grain) return body(0, count);
  arena_->parallel_for(count, grain, body);
}

}  // namespace sherd::comm
