#include "optim/one_bit.h"

#include <atomic>
#include <cmath>
#include <mutex>
#include <vector>

#include "base/error.h"
#include "device/device.h"
#include "optim/cuda/dispatch.h"

namespace sherd::optim {
namespace {

/// Elements that a thread takes at once, and whose squares it adds up at once.
constexpr std::int64_t one_bit_grain = 1 << 16, one_bit_piece = 1 << 14;

/// Memory of a device as a tensor.
tensor::Tensor at(float* data, std::int64_t n) {
  const device::MemoryBlock block{reinterpret_cast<std::byte*>(data),
                                  static_cast<std::size_t>(n) * sizeof(float)};
  return tensor::Tensor::view_of(device::Storage(block, nullptr), 0, {n}, DType::f32);
}

/// Runs pass(begin, end, room for the squares of its blocks of 64) over all elements, and adds the squares
/// up.
template <class Pass>
void summed(std::int64_t n, Arena& arena, tensor::ExactSum& squares, const Pass& pass) {
  std::mutex mutex;  // guards `squares`; the order of additions does not show in an exact sum
  arena.parallel_for(n, one_bit_grain, [&](std::int64_t begin, std::int64_t end) {
    double blocks[one_bit_piece / signs_per_word];
    tensor::ExactSum mine;
    for (std::int64_t at = begin; at < end; at += one_bit_piece) {
      const std::int64_t to = std::min(at + one_bit_piece, end);
      pass(at, to, blocks);
      mine.add(std::span<const double>(blocks).first(
          static_cast<std::size_t>((to - at + signs_per_word - 1) / signs_per_word)));
    }
    const std::lock_guard lock(mutex);
    squares.add(mine);
  });
}

}  // namespace

void compress_momentum(const MomentumSpan& span, Arena& arena, tensor::ExactSum& squares, CpuIsa isa) {
  require(span.n == 0 || (span.grad && span.momentum && span.error && span.signs),
          "compress_momentum: no memory for ", span.n, " elements");
  const auto compress = one_bit_table(isa).compress[grad_index(span.grad_dtype)];
  const auto bytes = static_cast<std::int64_t>(size_of(span.grad_dtype));
  const auto beta = static_cast<float>(span.beta1), rest = static_cast<float>(1 - span.beta1);
  summed(span.n, arena, squares, [&](std::int64_t begin, std::int64_t end, double* blocks) {
    compress(static_cast<const std::byte*>(span.grad) + begin * bytes, static_cast<float>(span.grad_factor),
             beta, rest, span.momentum + begin, span.error + begin, span.signs + begin / signs_per_word,
             blocks, end - begin);
  });
}

void compress_momentum(const MomentumSpan& span, tensor::Kernels& kernels, tensor::ExactSum& squares) {
  device::Device& device = kernels.device();
  if (!on_gpu(device, span.error)) return compress_momentum(span, device.arena(), squares);
  compress_on_gpu(device, span);
  if (span.n > 0) kernels.sum_of_squares(at(span.error, span.n), squares);
}

void average_momentum(const SentMomentum& sent, float* error, std::uint64_t* result, std::int64_t n,
                      Arena& arena, tensor::ExactSum& squares, CpuIsa isa) {
  require(sent.replicas > 0, "average_momentum: of no replicas");
  std::vector<float> scales;
  const auto from = [&](const auto* first, int replica) {
    return reinterpret_cast<decltype(first)>(reinterpret_cast<const std::byte*>(first) +
                                             replica * sent.stride);
  };
  for (int replica = 0; replica < sent.replicas; ++replica) scales.push_back(*from(sent.scale, replica));
  summed(n, arena, squares, [&](std::int64_t begin, std::int64_t end, double* blocks) {
    std::vector<const std::uint64_t*> signs;
    for (int replica = 0; replica < sent.replicas; ++replica)
      signs.push_back(from(sent.signs, replica) + begin / signs_per_word);
    one_bit_table(isa).average(signs.data(), scales.data(), sent.replicas, error + begin,
                               result + begin / signs_per_word, blocks, end - begin);
  });
}

void average_momentum(const SentMomentum& sent, float* error, std::uint64_t* result, std::int64_t n,
                      tensor::Kernels& kernels, tensor::ExactSum& squares) {
  device::Device& device = kernels.device();
  if (!on_gpu(device, error)) return average_momentum(sent, error, result, n, device.arena(), squares);
  average_on_gpu(device, sent, error, result, n);
  if (n > 0) kernels.sum_of_squares(at(error, n), squares);
}

float one_bit_scale(const tensor::ExactSum& squares, std::int64_t n) {
  return n == 0 ? 0.0f : static_cast<float>(std::sqrt(squares.value() / static_cast<double>(n)));
}

void settle_error(float* error, float scale, std::int64_t n, Arena& arena) {
  arena.parallel_for(n, one_bit_grain, [&](std::int64_t begin, std::int64_t end) {
    one_bit_table(cpu_isa()).settle(error + begin, scale, end - begin);
  });
}

AgreedMomentum part_of(const AgreedMomentum& momentum, std::int64_t begin) {
  AgreedMomentum out = momentum;
  out.signs += begin / signs_per_word, out.error += begin;
  return out;
}

void settle_error(float* error, float scale, std::int64_t n, device::Device& device) {
  if (!on_gpu(device, error)) return settle_error(error, scale, n, device.arena());
  settle_on_gpu(device, error, scale, n);
}

namespace {
void require_whole_words(const AgreedMomentum& momentum) {
  require(momentum.first_bit == 0, "update_agreed: begins at bit ", momentum.first_bit,
          " of a word of signs, and takes them from the first on");
}
}  // namespace

void update_agreed(const SpanUpdate& span, const AgreedMomentum& momentum, const Hyper& hyper,
                   std::int64_t step, device::Device& device, FiniteCheck& check) {
  if (!on_gpu(device, momentum.error)) {
    if (!update_agreed(span, momentum, hyper, step, device.arena())) check.fail();
    return;
  }
  require_whole_words(momentum);
  // In place of the momentum, which is read no more; then as if that were a gradient.
  take_on_gpu(device, momentum, static_cast<const float*>(span.moments[1]),
              static_cast<float*>(span.moments[0]), span.n);
  SpanUpdate taken = span;
  taken.grad = span.moments[0], taken.grad_dtype = DType::f32, taken.grad_factor = 1, taken.agreed = true;
  update(std::span(&taken, 1), hyper, step, device, check);
}

bool update_agreed(const SpanUpdate& span, const AgreedMomentum& momentum, const Hyper& hyper,
                   std::int64_t step, Arena& arena, CpuIsa isa) {
  require_whole_words(momentum);
  require(span.moment_dtype == DType::f32 && !span.grad,
          "update_agreed: takes fp32 moments, and momentum in place of a gradient");
  SpanUpdate given = span;
  given.grad_dtype = DType::f32, given.grad_factor = momentum.scale, given.agreed = true;
  const SpanPlan plan = plan_span(given, hyper, step);
  if (span.n == 0) return true;
  const auto* rule = std::get_if<OneBitAdam>(&plan.rule);
  require(rule, "update_agreed: ", config::name_of(hyper.type), " takes gradients");
  std::atomic<bool> finite = true;
  arena.parallel_for(span.n, one_bit_grain, [&](std::int64_t begin, std::int64_t end) {
    SpanChunk chunk = chunk_of(given, plan, begin, end);
    chunk.grad = momentum.signs + begin / signs_per_word;
    const Extremes top =
        one_bit_table(isa).update[plan.master](chunk, rule, momentum.error + begin, momentum.settled);
    if (top.weight > plan.largest_weight || top.moment > plan.largest_moment)
      finite.store(false, std::memory_order_relaxed);
  });
  return finite.load();
}

}  // namespace sherd::optim
