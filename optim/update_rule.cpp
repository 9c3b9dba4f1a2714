#include "optim/update_rule.h"

#include <atomic>
#include <cmath>

#include "base/error.h"
#include "optim/isa/tables.h"

namespace sherd::optim {
namespace {

using config::OptimizerType;

// Elements per chunk: some 2 MB of Adam's streams.
constexpr std::int64_t grain = 1 << 16;
// Above this the 16-bit copy would be evicted before anybody reads it.
constexpr std::int64_t stream_from = 1 << 22;

// Keeps the rounding bits apart from every other use of the parameter's stream.
constexpr std::uint64_t moment_rounding = 0x6d6f6d656e74ull;

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

GradIndex grad_index(const SpanUpdate& span) {
  switch (span.grad_dtype) {
    case DType::f32:
      return grad_f32;
    case DType::bf16:
      return grad_bf16;
    case DType::f16:
      return grad_f16;
    default:
      fail(ErrorKind::usage, "optim::update: the gradient must be fp32, bf16 or fp16, not ",
           name_of(span.grad_dtype));
  }
}

MasterIndex master_index(const SpanUpdate& span) {
  if (span.low) return master_split;
  switch (span.param_dtype) {
    case DType::f32:
      return master_alone;
    case DType::bf16:
      return master_and_bf16;
    case DType::f16:
      return master_and_f16;
    default:
      fail(ErrorKind::usage, "optim::update: the parameter must be fp32, bf16 or fp16, not ",
           name_of(span.param_dtype));
  }
}

MomentIndex moment_index(const SpanUpdate& span) {
  if (span.moment_dtype == DType::f32) return moment_f32;
  require(span.moment_dtype == DType::bf16, "optim::update: the moments must be fp32 or bf16, not ",
          name_of(span.moment_dtype));
  return moment_bf16;
}

// The largest bit pattern of a finite fp32 weight that stays finite when rounded to `dtype`.
std::uint32_t largest_weight(DType dtype) {
  if (dtype == DType::bf16) return 0x7f7f7fffu;
  return dtype == DType::f16 ? 0x477fefffu : 0x7f7fffffu;
}
// The same for moments: above the largest bf16, rounding may go to infinity.
std::uint32_t largest_moment(DType dtype) {
  return dtype == DType::bf16 ? 0x7f7f0000u : 0x7f7fffffu;
}

AdamScalars adam_scalars(const SpanUpdate& span, const Hyper& hyper, std::int64_t step) {
  const double t = static_cast<double>(step);
  const double c1 = hyper.bias_correction ? 1 - std::pow(hyper.beta1, t) : 1.0;
  const double c2 = hyper.bias_correction ? 1 / std::sqrt(1 - std::pow(hyper.beta2, t)) : 1.0;
  const double decay = span.decay ? hyper.weight_decay * (hyper.decoupled_decay ? hyper.lr : 1.0) : 0.0;
  const auto f = [](double x) { return static_cast<float>(x); };
  return {f(span.grad_factor),   f(hyper.beta1),     f(1 - hyper.beta1),
          f(hyper.beta2),        f(1 - hyper.beta2), f(c2),
          f(hyper.eps),          f(decay),           f(hyper.lr / c1),
          !hyper.decoupled_decay};
}

SgdScalars sgd_scalars(const SpanUpdate& span, const Hyper& hyper) {
  return {static_cast<float>(span.grad_factor), static_cast<float>(hyper.momentum),
          static_cast<float>(span.decay ? hyper.weight_decay : 0.0), static_cast<float>(hyper.lr),
          hyper.nesterov};
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

void check_masters(const SpanUpdate& span) {
  if (span.low) {
    require(!span.master, "optim::update: the span has both an fp32 and a split master");
    require(span.param_dtype == DType::bf16, "optim::update: split masters need a bf16 parameter, not ",
            name_of(span.param_dtype));
  } else {
    require(span.master, "optim::update: the span has no master");
  }
  require(span.param_dtype == DType::f32 || span.param, "optim::update: a ", name_of(span.param_dtype),
          " parameter is asked for, and there is no memory for it");
}

void check(const SpanUpdate& span, const Hyper& hyper, std::int64_t step) {
  require(step >= 1, "optim::update: steps count from 1, not ", step);
  require(span.n >= 0 && span.first_element >= 0, "optim::update: ", span.n, " elements from ",
          span.first_element);
  if (span.n == 0) return;
  check_masters(span);
  require(span.grad, "optim::update: the span has no gradient");
  const std::vector<std::string> names = hyper.moment_names();
  for (std::size_t i = 0; i < names.size(); ++i)
    require(span.moments[i], "optim::update: the span has no ", names[i]);
}

// Calls rule(chunk, scalars) over the span and says whether everything written is finite.
template <class Scalars>
bool run(const SpanUpdate& span, std::int64_t step, Arena& arena,
         Extremes (*rule)(const Chunk&, const Scalars&), const Scalars& scalars) {
  std::atomic<bool> finite = true;
  const std::uint32_t weight_limit = largest_weight(span.param_dtype);
  const std::uint32_t moment_limit = largest_moment(span.moment_dtype);
  const RandomKey noise = span.rounding.at(moment_rounding).at(static_cast<std::uint64_t>(step));
  arena.parallel_for(span.n, grain, [&](std::int64_t begin, std::int64_t end) {
    const Extremes extremes = rule(chunk_of(span, noise, begin, end), scalars);
    if (extremes.weight > weight_limit || extremes.moment > moment_limit)
      finite.store(false, std::memory_order_relaxed);
  });
  return finite.load();
}

}  // namespace

Hyper::Hyper(const config::Optimizer& c)
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

std::vector<std::string> Hyper::moment_names() const {
  if (type != OptimizerType::sgd) return {"exp_avg", "exp_avg_sq"};
  return momentum > 0 ? std::vector<std::string>{"momentum_buffer"} : std::vector<std::string>{};
}

bool update(const SpanUpdate& span, const Hyper& hyper, std::int64_t step, Arena& arena) {
  return update_with(cpu_isa(), span, hyper, step, arena);
}

bool update_with(CpuIsa isa, const SpanUpdate& span, const Hyper& hyper, std::int64_t step, Arena& arena) {
  check(span, hyper, step);
  if (span.n == 0) return true;
  const Tables tables = tables_of(isa);
  const GradIndex grad = grad_index(span);
  const MasterIndex master = master_index(span);
  const MomentIndex moment = moment_index(span);
  if (hyper.type == OptimizerType::sgd)
    return run(
        span, step, arena,
        hyper.momentum == 0 ? tables.sgd.plain[grad][master] : tables.sgd.momentum[grad][master][moment],
        sgd_scalars(span, hyper));
  return run(span, step, arena, tables.adam.step[grad][master][moment], adam_scalars(span, hyper, step));
}

}  // namespace sherd::optim
