#include "optim/update_rule.h"

#include <atomic>

#include "base/error.h"
#include "optim/isa/quantized.h"
#include "optim/isa/update_plan.h"
#include "optim/quantized.h"

namespace sherd::optim {
namespace {

// Elements per chunk: some 2 MB of Adam's streams.
constexpr std::int64_t grain = 1 << 16;
// Above this the 16-bit copy would be evicted before anybody reads it.
constexpr std::int64_t stream_from = 1 << 22;

const UpdateTable& table_of(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::avx512:
      return avx512::update_table;
    case CpuIsa::avx2:
      return avx2::update_table;
    case CpuIsa::portable:
      break;
  }
  return portable::update_table;
}

// Element `begin` of a stream that may be absent.
template <class Byte>
Byte* at(Byte* base, std::int64_t begin, DType dtype) {
  return base ? base + begin * static_cast<std::int64_t>(size_of(dtype)) : nullptr;
}
std::byte* at(void* base, std::int64_t begin, DType dtype) {
  return at(static_cast<std::byte*>(base), begin, dtype);
}

}  // namespace

Chunk chunk_of(const SpanUpdate& span, const UpdatePlan& plan, std::int64_t begin, std::int64_t end) {
  Chunk chunk{};
  chunk.master = span.low ? nullptr : span.master + begin;
  chunk.low = span.low ? span.low + begin : nullptr;
  chunk.grad = at(static_cast<const std::byte*>(span.grad), begin, span.grad_dtype);
  chunk.grad_type = plan.grad;
  chunk.first = at(span.moments[0], begin, span.moment_dtype);
  chunk.second = at(span.moments[1], begin, span.moment_dtype);
  chunk.param = span.param_dtype == DType::f32 ? nullptr : at(span.param, begin, span.param_dtype);
  chunk.n = end - begin;
  chunk.factor = plan.factor;
  chunk.stream = span.param_dtype == DType::bf16 && !span.low && span.n >= stream_from &&
                 reinterpret_cast<std::uintptr_t>(chunk.param) % 64 == 0;
  chunk.noise_seed = plan.noise.seed, chunk.noise_stream = plan.noise.stream;
  chunk.first_element = span.first_element + begin;
  return chunk;
}

template <class Pointer>
Pointer moved(Pointer base, std::int64_t elements, DType dtype) {
  if (!base) return nullptr;
  using Byte =
      std::conditional_t<std::is_const_v<std::remove_pointer_t<Pointer>>, const std::byte, std::byte>;
  return reinterpret_cast<Pointer>(reinterpret_cast<Byte*>(base) +
                                   elements * static_cast<std::int64_t>(size_of(dtype)));
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

bool update(const SpanUpdate& span, const Hyper& hyper, std::int64_t step, Arena& arena) {
  return update_with(cpu_isa(), span, hyper, step, arena);
}

bool update_with(CpuIsa isa, const SpanUpdate& span, const Hyper& hyper, std::int64_t step, Arena& arena) {
  const UpdatePlan plan = plan_span(span, hyper, step);
  if (span.n == 0) return true;
  if (span.moment_dtype == DType::u8) return update_codes(isa, span, plan, arena);
  const RuleLoop loop = table_of(isa).rule[plan.rule.index()].loop[plan.master][plan.moment];
  const void* rule = std::visit([](const auto& any) -> const void* { return &any; }, plan.rule);
  std::atomic<bool> finite = true;
  arena.parallel_for(span.n, grain, [&](std::int64_t begin, std::int64_t end) {
    const Extremes extremes = loop(chunk_of(span, plan, begin, end), rule);
    if (extremes.weight > plan.largest_weight || extremes.moment > plan.largest_moment)
      finite.store(false, std::memory_order_relaxed);
  });
  return finite.load();
}

}  // namespace sherd::optim
