#include "optim/parameter_norms.h"

#include <array>
#include <cstring>
#include <mutex>

#include "optim/cuda/dispatch.h"
#include "optim/description.h"
#include "optim/device_update.h"
#include "optim/split_master.h"

namespace sherd::optim {
namespace {

using device::Category;
using tensor::Tensor;

/// Elements of the copies: that stay in a core's cache; that are made in a GPU's memory.
constexpr std::int64_t piece = 2048, piece_on_gpu = std::int64_t{1} << 20;

/// As `part`, with everything that an update writes elsewhere: fp32 weights in `weights`, alone, and moments.
SpanUpdate copied(const SpanUpdate& part, float* weights, const std::array<void*, 2>& moments) {
  SpanUpdate out = part;
  out.master = weights, out.low = nullptr, out.param = nullptr, out.param_dtype = DType::f32;
  for (std::size_t i = 0; i < moments.size(); ++i)
    if (part.moments[i]) out.moments[i] = moments[i];
  out.measures = true;
  return out;
}

/// Sums of squares of blocks of 64, in the order of Kernels::sum_of_squares(): eight lanes, then pairs.
void add_squares(const float* x, std::int64_t n, tensor::ExactSum& sum) {
  std::array<double, piece / 64> blocks;
  std::size_t count = 0;
  for (std::int64_t first = 0; first < n; first += 64, ++count) {
    double lane[8] = {};
    if (n - first >= 64) {  // with as many turns as the compiler knows
      for (int turn = 0; turn < 8; ++turn)
        for (int i = 0; i < 8; ++i) {
          const double value = x[first + 8 * turn + i];
          lane[i] += value * value;
        }
    } else {
      for (std::int64_t i = 0; first + i < n; ++i) {
        const double value = x[first + i];
        lane[i % 8] += value * value;
      }
    }
    for (int width = 4; width >= 1; width /= 2)
      for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
    blocks[count] = lane[0];
  }
  sum.add(std::span(blocks).first(count));
}

/// Room for what an update writes of a part of a span, in a GPU's memory.
struct Copies {
  Copies(device::Device& device, std::int64_t elements, DType moment_dtype, std::size_t states)
      : most(std::min(elements, piece_on_gpu)),
        weights(Tensor::empty(device, {most}, DType::f32, Category::workspace)) {
    for (std::size_t i = 0; i < std::min(states, moments.size()); ++i)
      moments[i] = Tensor::empty(device, {most}, moment_dtype, Category::workspace);
  }
  std::int64_t most;
  Tensor weights;
  std::array<Tensor, 2> moments;
};

void measure_on_gpu(const SpanUpdate& span, const Hyper& hyper, std::int64_t step, tensor::Kernels& kernels,
                    NormSums& sums) {
  device::Device& device = kernels.device();
  const Copies copies(device, span.n, span.moment_dtype, describe(hyper).states.size());
  const auto& [most, weights, moments] = copies;
  FiniteCheck unused(device);
  for (std::int64_t at = 0; at < span.n; at += most) {
    const SpanUpdate part = part_of(span, at, std::min(most, span.n - at));
    const auto bytes = [&](DType dtype) { return static_cast<std::size_t>(part.n) * size_of(dtype); };
    if (part.low)
      join_on_gpu(device, part.param, part.low, weights.data<float>(), part.n);
    else
      device.copy(weights.raw(), part.master, bytes(DType::f32));
    for (std::size_t i = 0; i < moments.size(); ++i)
      if (part.moments[i]) device.copy(moments[i].raw(), part.moments[i], bytes(part.moment_dtype));
    const Tensor here = weights.range(0, part.n);
    kernels.sum_of_squares(here, sums.weight);
    const SpanUpdate copy = copied(part, weights.data<float>(),
                                   {moments[0].defined() ? moments[0].raw() : nullptr,
                                    moments[1].defined() ? moments[1].raw() : nullptr});
    update(std::span(&copy, 1), hyper, step, device, unused);
    kernels.sum_of_squares(here, sums.measured);
  }
}

}  // namespace

void measure(const SpanUpdate& span, const Hyper& hyper, std::int64_t step, Arena& arena, NormSums& sums,
             CpuIsa isa) {
  std::mutex mutex;  // guards `sums`; the order of additions does not show in an exact sum
  arena.parallel_for(span.n, 16 * piece, [&](std::int64_t begin, std::int64_t end) {
    alignas(64) float weights[piece];
    alignas(64) float moments[2][piece];
    NormSums mine;
    for (std::int64_t at = begin; at < end; at += piece) {
      const SpanUpdate part = part_of(span, at, std::min(piece, end - at));
      const auto bytes = [&](DType dtype) { return static_cast<std::size_t>(part.n) * size_of(dtype); };
      if (part.low)
        join_master(part.param, part.low, weights, part.n, arena, isa);
      else
        std::memcpy(weights, part.master, bytes(DType::f32));
      for (std::size_t i = 0; i < 2; ++i)
        if (part.moments[i]) std::memcpy(moments[i], part.moments[i], bytes(part.moment_dtype));
      add_squares(weights, part.n, mine.weight);
      update(copied(part, weights, {moments[0], moments[1]}), hyper, step, arena, isa);
      add_squares(weights, part.n, mine.measured);
    }
    const std::lock_guard lock(mutex);
    sums.weight.add(mine.weight);
    sums.measured.add(mine.measured);
  });
}

void charge_measure(device::Device& device, std::int64_t elements, DType moment_dtype, std::size_t states) {
  const Copies booked(device, elements, moment_dtype, states);
}

void measure(const SpanUpdate& span, const Hyper& hyper, std::int64_t step, tensor::Kernels& kernels,
             NormSums& sums) {
  if (span.n > 0 && on_gpu(kernels.device(), span.grad))
    return measure_on_gpu(span, hyper, step, kernels, sums);
  measure(span, hyper, step, kernels.device().arena(), sums);
}

}  // namespace sherd::optim
