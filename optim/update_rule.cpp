#include "optim/update_rule.h"

#include <atomic>

#include "base/error.h"
#include "optim/description.h"
#include "optim/isa/update_plan.h"

namespace sherd::optim {
namespace {

using config::OptimizerType;

// Elements per chunk: some 2 MB of Adam's streams.
constexpr std::int64_t grain = 1 << 16;
// Above this the 16-bit copy would be evicted before anybody reads it.
constexpr std::int64_t stream_from = 1 << 22;

struct Tables {
  const AdamTable& adam;
  const SgdTable& sgd;
};

Tables tables_of(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::avx512:
      return {avx512::adam_table, avx512::sgd_table};
    case CpuIsa::avx2:
      return {avx2::adam_table, avx2::sgd_table};
    case CpuIsa::portable:
      break;
  }
  return {portable::adam_table, portable::sgd_table};
}

// Element `begin` of a stream that may be absent.
template <class Byte>
Byte* at(Byte* base, std::int64_t begin, DType dtype) {
  return base ? base + begin * static_cast<std::int64_t>(size_of(dtype)) : nullptr;
}
std::byte* at(void* base, std::int64_t begin, DType dtype) {
  return at(static_cast<std::byte*>(base), begin, dtype);
}

Chunk chunk_of(const SpanUpdate& span, const RandomKey& noise, std::int64_t begin, std::int64_t end) {
  Chunk chunk{};
  chunk.master = span.low ? nullptr : span.master + begin;
  chunk.low = span.low ? span.low + begin : nullptr;
  chunk.grad = at(static_cast<const std::byte*>(span.grad), begin, span.grad_dtype);
  chunk.first = at(span.moments[0], begin, span.moment_dtype);
  chunk.second = at(span.moments[1], begin, span.moment_dtype);
  chunk.param = span.param_dtype == DType::f32 ? nullptr : at(span.param, begin, span.param_dtype);
  chunk.n = end - begin;
  chunk.stream = span.param_dtype == DType::bf16 && !span.low && span.n >= stream_from &&
                 reinterpret_cast<std::uintptr_t>(chunk.param) % 64 == 0;
  chunk.noise_seed = noise.seed, chunk.noise_stream = noise.stream;
  chunk.first_element = span.first_element + begin;
  return chunk;
}

// Calls rule(chunk, scalars) over the span and says whether everything written is finite.
template <class Scalars>
bool run(const SpanUpdate& span, const UpdatePlan& plan, Arena& arena,
         Extremes (*rule)(const Chunk&, const Scalars&), const Scalars& scalars) {
  std::atomic<bool> finite = true;
  arena.parallel_for(span.n, grain, [&](std::int64_t begin, std::int64_t end) {
    const Extremes extremes = rule(chunk_of(span, plan.noise, begin, end), scalars);
    if (extremes.weight > plan.largest_weight || extremes.moment > plan.largest_moment)
      finite.store(false, std::memory_order_relaxed);
  });
  return finite.load();
}

}  // namespace

Hyper::Hyper(const config::OptimizerRule& c)
    : type(c.type),
      lr(c.lr),
      beta1(c.beta1),
      beta2(c.beta2),
      eps(c.eps),
      weight_decay(c.weight_decay),
      decoupled_decay(c.decoupled_decay()),
      bias_correction(c.bias_correction),
      momentum(c.momentum),
      nesterov(c.nesterov) {}

Description describe(const Hyper& hyper) {
  if (hyper.type == OptimizerType::adam) return {"Adam", {{"exp_avg"}, {"exp_avg_sq"}}};
  if (hyper.type == OptimizerType::adamw) return {"AdamW", {{"exp_avg"}, {"exp_avg_sq"}}};
  if (hyper.momentum > 0) return {"SGD", {{"momentum_buffer"}}};
  return {"SGD", {}};
}

bool update(const SpanUpdate& span, const Hyper& hyper, std::int64_t step, Arena& arena) {
  return update_with(cpu_isa(), span, hyper, step, arena);
}

bool update_with(CpuIsa isa, const SpanUpdate& span, const Hyper& hyper, std::int64_t step, Arena& arena) {
  const UpdatePlan plan = plan_span(span, hyper, step);
  if (span.n == 0) return true;
  const Tables tables = tables_of(isa);
  if (plan.rule == UpdatePlan::adam)
    return run(span, plan, arena, tables.adam.step[plan.grad][plan.master][plan.moment], plan.adam_scalars);
  return run(span, plan, arena,
             plan.rule == UpdatePlan::plain_sgd ? tables.sgd.plain[plan.grad][plan.master]
                                                : tables.sgd.momentum[plan.grad][plan.master][plan.moment],
             plan.sgd_scalars);
}

}  // namespace sherd::optim
