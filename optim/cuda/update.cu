#include <algorithm>

#include "optim/cuda/kernels.h"
#include "optim/cuda/streams.cuh"

namespace sherd::optim::SHERD_CUDA {
namespace {

/// Spans whose tiles one kernel takes (the idea of apex's multi_tensor_apply). Within the 4 KiB that
/// arguments of a kernel may have on every driver.
struct SpanTable {
  static constexpr int most = 32;
  Common common;
  unsigned* not_finite;
  int count;
  Streams at[most];
};
static_assert(sizeof(SpanTable) + 128 < 4096);

/// The numbers of a tile's columns and rows, for each moment; optim/update_rule.h says which words they are.
struct Noise {
  std::uint16_t columns[2][side], rows[2][side];
  __device__ void draw(RandomKey key, std::uint64_t tile_index) {
    if (threadIdx.x >= 32) return;
    const unsigned pair = threadIdx.x % 16;
    const bool is_row = threadIdx.x >= 16;
    const auto words = philox(key, 16 * (2 * tile_index + (is_row ? 1 : 0)) + pair);
    std::uint16_t(&numbers)[2][side] = is_row ? rows : columns;
    for (int word = 0; word < 4; ++word) {
      std::uint16_t* to = numbers[word / 2] + word % 2 * 32 + 2 * pair;
      to[0] = static_cast<std::uint16_t>(words[word]);
      to[1] = static_cast<std::uint16_t>(words[word] >> 16);
    }
  }
  __device__ std::uint32_t bits(int moment, Count element) const {
    return static_cast<std::uint16_t>(columns[moment][element % side] + rows[moment][element / side % side]);
  }
};

/// Stores moments as M: fp32 as they are, bf16 with the 16 random bits of their element added below and then
/// cut.
template <int width, class M>
__device__ inline void write_moment(const Streams& x, int moment, Count at, const float (&from)[width],
                                    const Noise& noise) {
  if constexpr (std::is_same_v<M, bf16>) {
    Pack<std::uint16_t, width> pack;
    for (int k = 0; k < width; ++k) {
      const std::uint32_t random = noise.bits(moment, x.first_element + at + k);
      pack.at[k] = static_cast<std::uint16_t>((bits_as<std::uint32_t>(from[k]) + random) >> 16);
    }
    store_pack(static_cast<std::uint16_t*>(x.moments[moment]) + at, pack);
  } else {
    write<width, float>(x.moments[moment], at, from);
  }
}

/// `width` elements from `at` on. Says whether something written is not finite in its format.
template <int width, class Rule, MasterIndex form, class M>
__device__ inline bool step_elements(const Rule& rule, const Streams& x, const Common& common, Count at,
                                     const Noise& noise) {
  float weight[width], grad[width], first[width] = {}, second[width] = {};
  read_gradient(x, common.grad_index, at, grad);
  read_master<width, form>(x, at, weight);
  if constexpr (Rule::state_count > 0) read<width, M>(x.moments[0], at, first);
  if constexpr (Rule::state_count > 1) read<width, M>(x.moments[1], at, second);
  bool bad = false;
  for (int k = 0; k < width; ++k) {
    step_element(rule, Math{}, weight[k], grad[k] * common.factor, first[k], second[k]);
    bad |= magnitude(weight[k]) > common.largest_weight;
    if constexpr (Rule::state_count > 0)
      bad |= magnitude(Rule::watched == 0 ? first[k] : second[k]) > common.largest_moment;
  }
  write_master<width, form>(x, at, weight);
  if constexpr (Rule::state_count > 0) write_moment<width, M>(x, 0, at, first, noise);
  if constexpr (Rule::state_count > 1) write_moment<width, M>(x, 1, at, second, noise);
  return bad;
}

/// Tile by tile of the parameters; packs of four where everything is aligned for them, and one by one what is
/// left.
template <class Rule, MasterIndex form, class M>
__global__ void __launch_bounds__(threads) update_kernel(Rule rule, SpanTable table) {
  constexpr bool rounded = Rule::state_count > 0 && std::is_same_v<M, bf16>;
  constexpr int width = 4;
  SHERD_SHARED(Noise, noise, 1);
  const Common common = table.common;
  const Count tiles = table.at[table.count - 1].end_tile;
  int span = 0;
  bool bad = false;
  for (Count t = blockIdx.x; t < tiles; t += gridDim.x) {
    while (t >= table.at[span].end_tile) ++span;
    const Streams x = table.at[span];
    rule.decay = x.decay;
    // The tile's index in its parameter: the span's last one is that of its last element.
    const Count tile_index = (x.first_element + x.n - 1) / tile - (x.end_tile - 1 - t);
    if constexpr (rounded) {
      __syncthreads();  // until everyone is done with the last tile's numbers
      noise->draw(x.noise, static_cast<std::uint64_t>(tile_index));
      __syncthreads();
    }
    Count begin = tile_index * tile - x.first_element;
    const Count end = begin + tile < x.n ? begin + tile : x.n;
    if (begin < 0) begin = 0;
    const Count packed = x.packs ? begin + (end - begin) / width * width : begin;
    for (Count at = begin + Count{threadIdx.x} * width; at < packed; at += Count{threads} * width)
      bad |= step_elements<width, Rule, form, M>(rule, x, common, at, *noise);
    for (Count at = packed + threadIdx.x; at < end; at += threads)
      bad |= step_elements<1, Rule, form, M>(rule, x, common, at, *noise);
  }
  if (bad) atomicOr(table.not_finite, 1u);
}

template <class Rule, class M, class Launch>
void with_master(MasterIndex form, const Launch& run) {
  switch (form) {
    case master_alone:
      return run(update_kernel<Rule, master_alone, M>);
    case master_and_bf16:
      return run(update_kernel<Rule, master_and_bf16, M>);
    case master_and_f16:
      return run(update_kernel<Rule, master_and_f16, M>);
    default:
      return run(update_kernel<Rule, master_split, M>);
  }
}

template <class Rule>
void queue(const Target& target, const SpanPlan& plan, const Rule& rule, const SpanTable& table) {
  const Count tiles = table.at[table.count - 1].end_tile;
  const auto run = [&](auto kernel) {
    launch(kernel, blocks_for(tiles, 1, target.processors, 8), threads, 0, target.stream, rule, table);
  };
  if (Rule::state_count > 0 && plan.moment == moment_bf16)
    with_master<Rule, std::conditional_t<(Rule::state_count > 0), bf16, float>>(plan.master, run);
  else
    with_master<Rule, float>(plan.master, run);
}

AnyRule with_decay(AnyRule any, float decay) {
  std::visit([=](auto& rule) { rule.decay = decay; }, any);
  return any;
}

/// Whether a kernel for `a` serves `b`.
bool share_kernel(const SpanPlan& a, const SpanPlan& b) {
  return with_decay(a.rule, 0) == with_decay(b.rule, 0) && a.factor == b.factor && a.grad == b.grad &&
         a.master == b.master && a.moment == b.moment && a.largest_weight == b.largest_weight &&
         a.largest_moment == b.largest_moment;
}

__global__ void split_kernel(const float* master, std::uint16_t* high, std::uint16_t* low, Count n) {
  for (Count i = grid_thread(); i < n; i += grid_threads()) {
    const auto bits = bits_as<std::uint32_t>(master[i]);
    high[i] = static_cast<std::uint16_t>((bits + 0x8000u) >> 16);
    low[i] = static_cast<std::uint16_t>(bits);
  }
}
__global__ void join_kernel(const std::uint16_t* high, const std::uint16_t* low, float* master, Count n) {
  for (Count i = grid_thread(); i < n; i += grid_threads())
    master[i] = bits_as<float>((std::uint32_t{high[i]} << 16) +
                               static_cast<std::uint32_t>(std::int32_t{static_cast<std::int16_t>(low[i])}));
}
__global__ void round_kernel(const float* master, void* to, DType dtype, Count n) {
  for (Count i = grid_thread(); i < n; i += grid_threads()) {
    if (dtype == DType::bf16)
      static_cast<std::uint16_t*>(to)[i] =
          static_cast<std::uint16_t>((bits_as<std::uint32_t>(master[i]) + 0x8000u) >> 16);
    else
      static_cast<f16*>(to)[i] = narrow<f16>(master[i]);
  }
}

}  // namespace

void update(const Target& target, std::span<const PlannedSpan> spans, unsigned* not_finite) {
  SpanTable table{};
  const SpanPlan* common = nullptr;
  const auto flush = [&] {
    if (table.count > 0)
      std::visit([&](const auto& rule) { queue(target, *common, rule, table); }, common->rule);
    table.count = 0;
  };
  for (const auto& [plan, span] : spans) {
    if (span.n == 0) continue;
    if (span.moment_dtype == DType::u8) {
      flush();
      update_codes(target, {plan, span}, not_finite);
      continue;
    }
    if (table.count == SpanTable::most || (table.count > 0 && !share_kernel(*common, plan))) flush();
    if (table.count == 0) {
      common = &plan;
      table.common = {plan.grad, plan.factor, plan.largest_weight, plan.largest_moment};
      table.not_finite = not_finite;
    }
    table.at[table.count] = streams_of(plan, span, table.count > 0 ? table.at[table.count - 1].end_tile : 0);
    ++table.count;
  }
  flush();
}

void split_master(const Target& target, const float* master, void* high, std::uint16_t* low, std::int64_t n) {
  if (n == 0) return;
  launch(split_kernel, blocks_for(n, threads, target.processors), threads, 0, target.stream, master,
         static_cast<std::uint16_t*>(high), low, n);
}

void join_master(const Target& target, const void* high, const std::uint16_t* low, float* master,
                 std::int64_t n) {
  if (n == 0) return;
  launch(join_kernel, blocks_for(n, threads, target.processors), threads, 0, target.stream,
         static_cast<const std::uint16_t*>(high), low, master, n);
}

void round_masters(const Target& target, const float* master, void* to, DType dtype, std::int64_t n) {
  if (n == 0) return;
  if (dtype == DType::f32) return target.device.copy(to, master, static_cast<std::size_t>(n) * sizeof(float));
  launch(round_kernel, blocks_for(n, threads, target.processors), threads, 0, target.stream, master, to,
         dtype, n);
}

}  // namespace sherd::optim::SHERD_CUDA
