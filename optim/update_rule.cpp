#include "optim/update_rule.h"

#include <atomic>

#include "base/error.h"
#include "optim/isa/span_plan.h"
#include "optim/quantized.h"

namespace sherd::optim {
namespace {

// Elements per chunk: some 2 MB of Adam's streams.
constexpr std::int64_t update_grain = 1 << 16;
// Above this the 16-bit copy would be evicted before anybody reads it.
constexpr std::int64_t stream_from = 1 << 22;

const UpdateTable& update_table(CpuIsa isa) {
  return loops_of(isa, avx512::update_table, avx2::update_table, portable::update_table);
}

template <class Pointer>
Pointer moved(Pointer base, std::int64_t elements, DType dtype) {
  if (!base) return nullptr;
  using Byte =
      std::conditional_t<std::is_const_v<std::remove_pointer_t<Pointer>>, const std::byte, std::byte>;
  return reinterpret_cast<Pointer>(reinterpret_cast<Byte*>(base) +
                                   elements * static_cast<std::int64_t>(size_of(dtype)));
}

}  // namespace

SpanChunk chunk_of(const SpanUpdate& span, const SpanPlan& plan, std::int64_t begin, std::int64_t end) {
  const SpanUpdate part = part_of(span, begin, end - begin);
  SpanChunk chunk{};
  chunk.master = part.low ? nullptr : part.master;
  chunk.low = part.low;
  chunk.grad = part.grad;
  chunk.grad_type = plan.grad;
  chunk.first = part.moments[0], chunk.second = part.moments[1];
  chunk.param = part.param_dtype == DType::f32 ? nullptr : part.param;
  chunk.n = part.n;
  chunk.factor = plan.factor;
  chunk.stream = span.param_dtype == DType::bf16 && !span.low && span.n >= stream_from &&
                 reinterpret_cast<std::uintptr_t>(chunk.param) % 64 == 0;
  chunk.noise_seed = plan.noise.seed, chunk.noise_stream = plan.noise.stream;
  chunk.first_element = part.first_element;
  return chunk;
}

SpanUpdate part_of(const SpanUpdate& span, std::int64_t begin, std::int64_t n) {
  SpanUpdate out = span;
  out.master = moved(span.master, begin, DType::f32);
  out.low = moved(span.low, begin, DType::u16);
  out.grad = moved(span.grad, begin, span.grad_dtype);
  for (void*& moment : out.moments) moment = moved(moment, begin, span.moment_dtype);
  for (float*& scale : out.scales) scale = moved(scale, begin / quantized_block, DType::f32);
  out.param = moved(span.param, begin, span.param_dtype);
  out.first_element += begin;
  out.n = n;
  return out;
}

bool update(const SpanUpdate& span, const Hyper& hyper, std::int64_t step, Arena& arena, CpuIsa isa) {
  const SpanPlan plan = plan_span(span, hyper, step);
  if (span.n == 0) return true;
  if (span.moment_dtype == DType::u8) return update_codes(isa, span, plan, arena);
  const RuleLoop loop = update_table(isa).rule[plan.rule.index()].loop[plan.master][plan.moment];
  const void* rule = std::visit([](const auto& any) -> const void* { return &any; }, plan.rule);
  std::atomic<bool> finite = true;
  arena.parallel_for(span.n, update_grain, [&](std::int64_t begin, std::int64_t end) {
    const Extremes extremes = loop(chunk_of(span, plan, begin, end), rule);
    if (extremes.weight > plan.largest_weight || extremes.moment > plan.largest_moment)
      finite.store(false, std::memory_order_relaxed);
  });
  return finite.load();
}

}  // namespace sherd::optim
