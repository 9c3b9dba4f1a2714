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

StorageIndex storage_of(DType dtype, const char* what) {
  switch (dtype) {
    case DType::f32:
      return storage_f32;
    case DType::bf16:
      return storage_bf16;
    case DType::f16:
      return storage_f16;
    default:
      fail(ErrorKind::usage, "optim::update: the ", what, " must be fp32, bf16 or fp16, not ",
           name_of(dtype));
  }
}

// The largest bit pattern of a finite fp32 weight that stays finite when rounded to `dtype`.
std::uint32_t largest_weight(DType dtype) {
  if (dtype == DType::bf16) return 0x7f7f7fffu;
  return dtype == DType::f16 ? 0x477fefffu : 0x7f7fffffu;
}
constexpr std::uint32_t largest_moment = 0x7f7fffffu;

AdamScalars adam_scalars(const SpanUpdate& span, const Hyper& hyper, std::int64_t step) {
  const double t = static_cast<double>(step);
  const double c1 = hyper.bias_correction ? 1 - std::pow(hyper.beta1, t) : 1.0;
  const double c2 = hyper.bias_correction ? 1 / std::sqrt(1 - std::pow(hyper.beta2, t)) : 1.0;
  const double decay = span.decay ? hyper.weight_decay * (hyper.decoupled_decay ? hyper.lr : 1.0) : 0.0;
  const auto f = [](double x) { return static_cast<float>(x); };
  return {f(span.grad_factor), f(hyper.beta1), f(1 - hyper.beta1), f(hyper.beta2), f(1 - hyper.beta2), f(c2),
          f(hyper.eps),        f(decay),       f(hyper.lr / c1)};
}

SgdScalars sgd_scalars(const SpanUpdate& span, const Hyper& hyper) {
  return {static_cast<float>(span.grad_factor), static_cast<float>(hyper.momentum),
          static_cast<float>(span.decay ? hyper.weight_decay : 0.0), static_cast<float>(hyper.lr)};
}

Chunk chunk_of(const SpanUpdate& span, std::int64_t begin, std::int64_t end) {
  const auto at = [&](void* base) { return base ? static_cast<float*>(base) + begin : nullptr; };
  const std::int64_t grad_size = static_cast<std::int64_t>(size_of(span.grad_dtype));
  Chunk chunk{};
  chunk.master = span.master + begin;
  chunk.grad = static_cast<const std::byte*>(span.grad) + begin * grad_size;
  chunk.first = at(span.moments[0]), chunk.second = at(span.moments[1]);
  chunk.param = span.param_dtype == DType::f32 ? nullptr : static_cast<std::byte*>(span.param) + begin * 2;
  chunk.n = end - begin;
  chunk.stream = span.n >= stream_from && reinterpret_cast<std::uintptr_t>(chunk.param) % 64 == 0;
  return chunk;
}

void check(const SpanUpdate& span, const Hyper& hyper, std::int64_t step) {
  require(step >= 1, "optim::update: steps count from 1, not ", step);
  require(span.n >= 0, "optim::update: ", span.n, " elements");
  require(!span.low && span.moment_dtype == DType::f32,
          "optim::update: split masters and bf16 moments are not in this build yet");
  require(span.n == 0 || (span.master && span.grad), "optim::update: the span has no master or no gradient");
  const std::vector<std::string> names = hyper.moment_names();
  for (std::size_t i = 0; i < names.size(); ++i)
    require(span.n == 0 || span.moments[i], "optim::update: the span has no ", names[i]);
  require(span.n == 0 || span.param_dtype == DType::f32 || span.param, "optim::update: a ",
          name_of(span.param_dtype), " copy is asked for, and there is no memory for it");
}

// Calls body(chunk) over the span and says whether everything written is finite.
template <class Body>
bool run(const SpanUpdate& span, Arena& arena, const Body& body) {
  std::atomic<bool> finite = true;
  const std::uint32_t weight_limit = largest_weight(span.param_dtype);
  arena.parallel_for(span.n, grain, [&](std::int64_t begin, std::int64_t end) {
    const Extremes extremes = body(chunk_of(span, begin, end));
    if (extremes.weight > weight_limit || extremes.moment > largest_moment)
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
  const UpdateTable& table = table_of(isa);
  const StorageIndex grad = storage_of(span.grad_dtype, "gradient");
  const StorageIndex param = storage_of(span.param_dtype, "parameter");
  if (hyper.type == OptimizerType::sgd) {
    const SgdMode mode = hyper.momentum == 0 ? sgd_plain : hyper.nesterov ? sgd_nesterov : sgd_momentum;
    return run(span, arena,
               [rule = table.sgd[grad][param][mode], scalars = sgd_scalars(span, hyper)](const Chunk& chunk) {
                 return rule(chunk, scalars);
               });
  }
  const AdamScalars scalars = adam_scalars(span, hyper, step);
  return run(span, arena,
             [rule = table.adam[grad][param][hyper.decoupled_decay ? 0 : 1], scalars](const Chunk& chunk) {
               return rule(chunk, scalars);
             });
}

}  // namespace sherd::optim
