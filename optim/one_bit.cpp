#include "optim/one_bit.h"

#include <atomic>
#include <cmath>
#include <mutex>
#include <vector>

#include "base/error.h"
#include "optim/isa/update_plan.h"

namespace sherd::optim {
namespace {

constexpr std::int64_t word = 64;
/// Elements that a thread takes at once, and whose squares it adds up at once.
constexpr std::int64_t grain = 1 << 16, piece = 1 << 14;

/// Runs pass(begin, end, room for the squares of its blocks of 64) over all elements, and adds the squares
/// up.
template <class Pass>
void summed(std::int64_t n, Arena& arena, tensor::ExactSum& squares, const Pass& pass) {
  std::mutex mutex;  // guards `squares`; the order of additions does not show in an exact sum
  arena.parallel_for(n, grain, [&](std::int64_t begin, std::int64_t end) {
    double blocks[piece / word];
    tensor::ExactSum mine;
    for (std::int64_t at = begin; at < end; at += piece) {
      const std::int64_t to = std::min(at + piece, end);
      pass(at, to, blocks);
      mine.add(std::span<const double>(blocks).first(static_cast<std::size_t>((to - at + word - 1) / word)));
    }
    const std::lock_guard lock(mutex);
    squares.add(mine);
  });
}

}  // namespace

const OneBitTable& one_bit_table(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::avx512:
      return avx512::one_bit_table;
    case CpuIsa::avx2:
      return avx2::one_bit_table;
    case CpuIsa::portable:
      break;
  }
  return portable::one_bit_table;
}

void compress_momentum(const MomentumSpan& span, Arena& arena, tensor::ExactSum& squares) {
  compress_momentum_with(cpu_isa(), span, arena, squares);
}

void compress_momentum_with(CpuIsa isa, const MomentumSpan& span, Arena& arena, tensor::ExactSum& squares) {
  require(span.n == 0 || (span.grad && span.momentum && span.error && span.signs),
          "compress_momentum: no memory for ", span.n, " elements");
  const auto compress = one_bit_table(isa).compress[grad_index(span.grad_dtype)];
  const auto bytes = static_cast<std::int64_t>(size_of(span.grad_dtype));
  const auto beta = static_cast<float>(span.beta1), rest = static_cast<float>(1 - span.beta1);
  summed(span.n, arena, squares, [&](std::int64_t begin, std::int64_t end, double* blocks) {
    compress(static_cast<const std::byte*>(span.grad) + begin * bytes, static_cast<float>(span.grad_factor),
             beta, rest, span.momentum + begin, span.error + begin, span.signs + begin / word, blocks,
             end - begin);
  });
}

void average_momentum(std::span<const std::uint64_t* const> signs, std::span<const float> scales,
                      float* error, std::uint64_t* result, std::int64_t n, Arena& arena,
                      tensor::ExactSum& squares) {
  average_momentum_with(cpu_isa(), signs, scales, error, result, n, arena, squares);
}

void average_momentum_with(CpuIsa isa, std::span<const std::uint64_t* const> signs,
                           std::span<const float> scales, float* error, std::uint64_t* result, std::int64_t n,
                           Arena& arena, tensor::ExactSum& squares) {
  require(!signs.empty() && signs.size() == scales.size(), "average_momentum: the signs of ", signs.size(),
          " replicas and the scales of ", scales.size());
  summed(n, arena, squares, [&](std::int64_t begin, std::int64_t end, double* blocks) {
    std::vector<const std::uint64_t*> from(signs.begin(), signs.end());
    for (const std::uint64_t*& words : from) words += begin / word;
    one_bit_table(isa).average(from.data(), scales.data(), static_cast<int>(from.size()), error + begin,
                               result + begin / word, blocks, end - begin);
  });
}

float one_bit_scale(const tensor::ExactSum& squares, std::int64_t n) {
  return n == 0 ? 0.0f : static_cast<float>(std::sqrt(squares.value() / static_cast<double>(n)));
}

void settle_error(float* error, float scale, std::int64_t n, Arena& arena) {
  arena.parallel_for(n, grain, [&](std::int64_t begin, std::int64_t end) {
    one_bit_table(cpu_isa()).settle(error + begin, scale, end - begin);
  });
}

bool update_agreed(const SpanUpdate& span, const AgreedMomentum& momentum, const Hyper& hyper,
                   std::int64_t step, Arena& arena) {
  return update_agreed_with(cpu_isa(), span, momentum, hyper, step, arena);
}

bool update_agreed_with(CpuIsa isa, const SpanUpdate& span, const AgreedMomentum& momentum,
                        const Hyper& hyper, std::int64_t step, Arena& arena) {
  require(span.moment_dtype == DType::f32 && !span.grad,
          "update_agreed: takes fp32 moments, and momentum in place of a gradient");
  SpanUpdate given = span;
  given.grad_dtype = DType::f32, given.grad_factor = momentum.scale, given.agreed = true;
  const UpdatePlan plan = plan_span(given, hyper, step);
  if (span.n == 0) return true;
  const auto* rule = std::get_if<OneBitAdam>(&plan.rule);
  require(rule, "update_agreed: ", config::name_of(hyper.type), " takes gradients");
  std::atomic<bool> finite = true;
  arena.parallel_for(span.n, grain, [&](std::int64_t begin, std::int64_t end) {
    Chunk chunk = chunk_of(given, plan, begin, end);
    chunk.grad = momentum.signs + begin / word;
    const Extremes top =
        one_bit_table(isa).update[plan.master](chunk, rule, momentum.error + begin, momentum.settled);
    if (top.weight > plan.largest_weight || top.moment > plan.largest_moment)
      finite.store(false, std::memory_order_relaxed);
  });
  return finite.load();
}

}  // namespace sherd::optim
