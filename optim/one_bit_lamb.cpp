#include "optim/one_bit_lamb.h"

#include <algorithm>
#include <cstring>
#include <mutex>

#include "base/error.h"
#include "device/device.h"
#include "optim/cuda/dispatch.h"
#include "optim/isa/span_plan.h"
#include "optim/split_master.h"

namespace sherd::optim {
namespace {

using device::Category;
using tensor::Tensor;

/// Elements that a thread takes at once; whose weights it joins at once; that a GPU takes at once.
constexpr std::int64_t lamb_grain = 1 << 15, lamb_piece = 2048, lamb_piece_on_gpu = std::int64_t{1} << 20;

void check(const SpanUpdate& span, const AgreedMomentum* agreed, const float* fresh, const Hyper& hyper) {
  require(hyper.type == config::OptimizerType::onebitlamb, "refresh_variance: ", config::name_of(hyper.type),
          " has no fresh variance");
  require(span.moment_dtype == DType::f32, "refresh_variance: takes fp32 moments, not ",
          name_of(span.moment_dtype));
  require(span.n == 0 || (span.moments[0] && span.moments[1] && fresh), "refresh_variance: no memory for ",
          span.n, " elements");
  require(!agreed || agreed->first_bit == 0 || agreed->first_bit + span.n <= signs_per_word,
          "refresh_variance: ", span.n, " elements from bit ", agreed ? agreed->first_bit : 0,
          " of a word on go beyond it");
}

/// The fp32 weights of a part of a span, which `room` has space for.
const float* weights_of(CpuIsa isa, const SpanUpdate& part, float* room, Arena& arena) {
  if (!part.low) return part.master;
  join_master(part.param, part.low, room, part.n, arena, isa);
  return room;
}

/// A GPU's results for a piece of a span.
struct Room {
  Room(device::Device& device, std::int64_t elements)
      : most(std::min(elements, lamb_piece_on_gpu)),
        weights(Tensor::empty(device, {most}, DType::f32, Category::workspace)),
        directions(Tensor::empty(device, {most}, DType::f32, Category::workspace)),
        updates(Tensor::empty(device, {most}, DType::f32, Category::workspace)),
        ratio(Tensor::empty(device, {1}, DType::f32, Category::workspace)) {}
  std::int64_t most;
  Tensor weights, directions, updates, ratio;
};

}  // namespace

void remember(const Hyper& hyper, double trust, TrustMemory& memory) {
  memory.factor = 1, memory.refreshed = false;
  const double beta = hyper.as<config::OneBitLambOptions>().coeff_beta;
  if (trust != 1) memory.mean = beta * memory.mean + (1 - beta) * trust;
}

double frozen_trust(const Hyper& hyper, double direction, double update, double ratio, TrustMemory& memory) {
  const auto& own = hyper.as<config::OneBitLambOptions>();
  const double part = update > direction ? direction / update : 1.0;
  const double near = std::clamp(ratio * part + 1 - part, own.factor_min, own.factor_max);
  memory.factor = std::clamp(near, memory.factor * (1 - own.factor_threshold),
                             memory.factor * (1 + own.factor_threshold));
  memory.refreshed = true;
  return (memory.mean == 0 ? 1 : memory.mean) * memory.factor;
}

void refresh_variance(const SpanUpdate& span, const AgreedMomentum* agreed, float* fresh, bool first,
                      const Hyper& hyper, Arena& arena, NormSums& sums, CpuIsa isa) {
  check(span, agreed, fresh, hyper);
  if (agreed && agreed->first_bit > 0 && span.n > 0) {
    const std::uint64_t signs = *agreed->signs >> agreed->first_bit;
    const AgreedMomentum moved{&signs, agreed->scale, agreed->error, agreed->settled};
    return refresh_variance(span, &moved, fresh, first, hyper, arena, sums, isa);
  }
  const OneBitTable& table = one_bit_table(isa);
  const auto refresh = agreed ? table.refresh_agreed : table.refresh[grad_index(span.grad_dtype)];
  const FrozenLamb rule = FrozenLamb::make(hyper, span.decay);
  std::mutex mutex;  // guards `sums`; the order of additions does not show in an exact sum
  arena.parallel_for(span.n, lamb_grain, [&](std::int64_t begin, std::int64_t end) {
    alignas(64) float room[lamb_piece];
    double directions[lamb_piece / signs_per_word], updates[lamb_piece / signs_per_word];
    NormSums mine;
    for (std::int64_t at = begin; at < end; at += lamb_piece) {
      const SpanUpdate part = part_of(span, at, std::min(lamb_piece, end - at));
      FrozenRun run{};
      run.source = part.grad, run.factor = static_cast<float>(span.grad_factor);
      if (agreed) {
        const AgreedMomentum here = part_of(*agreed, at);
        run.source = here.signs, run.factor = here.scale;
        run.error = here.error, run.settled = here.settled;
      }
      run.momentum = static_cast<float*>(part.moments[0]);
      run.variance = static_cast<const float*>(part.moments[1]);
      run.fresh = fresh + at, run.fresh_before = first ? run.variance : run.fresh;
      run.weight = weights_of(isa, part, room, arena);
      run.direction = directions, run.update = updates, run.n = part.n;
      mine.ratio = std::max(mine.ratio, refresh(rule, run));
      const auto blocks = static_cast<std::size_t>((part.n + signs_per_word - 1) / signs_per_word);
      mine.weight.add(std::span<const double>(directions).first(blocks));
      mine.measured.add(std::span<const double>(updates).first(blocks));
    }
    const std::lock_guard lock(mutex);
    sums.weight.add(mine.weight), sums.measured.add(mine.measured);
    sums.ratio = std::max(sums.ratio, mine.ratio);
  });
}

void refresh_variance(const SpanUpdate& span, const AgreedMomentum* agreed, float* fresh, bool first,
                      const Hyper& hyper, tensor::Kernels& kernels, NormSums& sums) {
  device::Device& device = kernels.device();
  if (span.n == 0) return;
  if (!on_gpu(device, fresh))
    return refresh_variance(span, agreed, fresh, first, hyper, device.arena(), sums);
  check(span, agreed, fresh, hyper);
  const Room room(device, span.n);
  kernels.fill(room.ratio, 0);
  for (std::int64_t at = 0; at < span.n; at += room.most) {
    const SpanUpdate part = part_of(span, at, std::min(room.most, span.n - at));
    const float* weights = part.master;
    if (part.low) {
      weights = room.weights.data<float>();
      join_on_gpu(device, part.param, part.low, room.weights.data<float>(), part.n);
    }
    const AgreedMomentum rest = agreed ? part_of(*agreed, at) : AgreedMomentum();
    refresh_on_gpu(device, FrozenLamb::make(hyper, span.decay), part, agreed ? &rest : nullptr, weights,
                   fresh + at, first,
                   {room.directions.data<float>(), room.updates.data<float>(), room.ratio.data<float>()});
    kernels.sum_of_squares(room.directions.range(0, part.n), sums.weight);
    kernels.sum_of_squares(room.updates.range(0, part.n), sums.measured);
  }
  sums.ratio = std::max(sums.ratio, *tensor::to_host(device, room.ratio).data<float>());
}

void charge_refresh(device::Device& device, std::int64_t elements) {
  const Room booked(device, elements);
}

}  // namespace sherd::optim
