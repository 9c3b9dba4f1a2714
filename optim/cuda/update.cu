#include <algorithm>

#include "base/random.h"
#include "device/cuda/launch.cuh"
#include "optim/cuda/update.h"
#include "optim/isa/quantized.h"

namespace sherd::optim::SHERD_CUDA {
namespace {

using namespace device::SHERD_CUDA;
using Count = std::int64_t;

/// A span among those of a kernel. Offsets are applied by those who use its memory.
struct Streams {
  float* master;
  std::uint16_t* low;
  const void* grad;
  void* moments[2];
  void* param;
  Count n;
  Count first_element;
  RandomKey noise;
  Count end_tile;  ///< tiles of the spans up to this one
  float decay;
  bool packs;  ///< everything is aligned for packs of four
};

/// What the spans of a kernel have in common.
struct Common {
  GradIndex grad_index;
  float factor;  ///< of gradients
  std::uint32_t largest_weight, largest_moment;
};

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

/// What rules take from here.
struct Math {
  __device__ static float root(float x) { return ::sqrtf(x); }
};

/// Elements that a block takes at a time: a tile of the noise, 64 rows of 64.
constexpr int side = 64, tile = side * side;
constexpr unsigned threads = 256;

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

__device__ inline std::uint32_t magnitude(float x) {
  return bits_as<std::uint32_t>(x) & 0x7fffffffu;
}

template <int width, class T>
__device__ inline void read(const void* from, Count at, float (&to)[width]) {
  const Pack<T, width> pack = load_pack<width>(static_cast<const T*>(from) + at);
  for (int k = 0; k < width; ++k) to[k] = widen(pack.at[k]);
}
template <int width, class T>
__device__ inline void write(void* to, Count at, const float (&from)[width]) {
  Pack<T, width> pack;
  for (int k = 0; k < width; ++k) pack.at[k] = narrow<T>(from[k]);
  store_pack(static_cast<T*>(to) + at, pack);
}

template <int width>
__device__ inline void read_gradient(const Streams& x, GradIndex index, Count at, float (&to)[width]) {
  if (index == grad_f32)
    read<width, float>(x.grad, at, to);
  else if (index == grad_bf16)
    read<width, bf16>(x.grad, at, to);
  else
    read<width, f16>(x.grad, at, to);
}

template <int width, MasterIndex form>
__device__ inline void read_master(const Streams& x, Count at, float (&to)[width]) {
  if constexpr (form == master_split) {
    const auto high = load_pack<width>(static_cast<const std::uint16_t*>(x.param) + at);
    const auto low = load_pack<width>(x.low + at);
    for (int k = 0; k < width; ++k)
      to[k] = bits_as<float>((std::uint32_t{high.at[k]} << 16) +
                             static_cast<std::uint32_t>(std::int32_t{static_cast<std::int16_t>(low.at[k])}));
  } else {
    read<width, float>(x.master, at, to);
  }
}

template <int width, MasterIndex form>
__device__ inline void write_master(const Streams& x, Count at, const float (&from)[width]) {
  if constexpr (form != master_split) write<width, float>(x.master, at, from);
  if constexpr (form == master_and_f16) write<width, f16>(x.param, at, from);
  if constexpr (form == master_and_bf16 || form == master_split) {
    Pack<std::uint16_t, width> high, low;
    for (int k = 0; k < width; ++k) {
      const auto bits = bits_as<std::uint32_t>(from[k]);
      high.at[k] = static_cast<std::uint16_t>((bits + 0x8000u) >> 16);
      low.at[k] = static_cast<std::uint16_t>(bits);
    }
    store_pack(static_cast<std::uint16_t*>(x.param) + at, high);
    if constexpr (form == master_split) store_pack(x.low + at, low);
  }
}

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
void queue(const Target& target, const UpdatePlan& plan, const Rule& rule, const SpanTable& table) {
  const Count tiles = table.at[table.count - 1].end_tile;
  const auto run = [&](auto kernel) {
    launch(kernel, blocks_for(tiles, 1, target.processors, 8), threads, 0, target.stream, rule, table);
  };
  if (Rule::state_count > 0 && plan.moment == moment_bf16)
    with_master<Rule, std::conditional_t<(Rule::state_count > 0), bf16, float>>(plan.master, run);
  else
    with_master<Rule, float>(plan.master, run);
}

float decay_of(const AnyRule& any) {
  return std::visit([](const auto& rule) { return rule.decay; }, any);
}
AnyRule with_decay(AnyRule any, float decay) {
  std::visit([=](auto& rule) { rule.decay = decay; }, any);
  return any;
}

/// Whether a kernel for `a` serves `b`.
bool share_kernel(const UpdatePlan& a, const UpdatePlan& b) {
  return with_decay(a.rule, 0) == with_decay(b.rule, 0) && a.factor == b.factor && a.grad == b.grad &&
         a.master == b.master && a.moment == b.moment && a.largest_weight == b.largest_weight &&
         a.largest_moment == b.largest_moment;
}

/// `tiles`: of the spans before it.
Streams streams_of(const UpdatePlan& plan, const SpanUpdate& span, Count tiles) {
  Streams x{span.low ? nullptr : span.master,
            span.low,
            span.grad,
            {span.moments[0], span.moments[1]},
            span.param_dtype == DType::f32 ? nullptr : span.param,
            span.n,
            plan.moment == moment_bf16 ? span.first_element : 0,
            plan.noise,
            0,
            decay_of(plan.rule),
            false};
  x.end_tile = tiles + (x.first_element + x.n - 1) / tile - x.first_element / tile + 1;
  // A tile's first element may lie anywhere in memory; all others of a tile follow at multiples of four.
  x.packs =
      x.first_element % 4 == 0 &&
      aligned_for_packs(x.master, x.low, static_cast<const std::byte*>(x.grad),
                        static_cast<const std::byte*>(x.moments[0]),
                        static_cast<const std::byte*>(x.moments[1]), static_cast<const std::byte*>(x.param));
  return x;
}

/// What a kernel needs of a dynamic map (optim/isa/dynamic_map.h).
struct Map {
  float base[16], slope[16];
  float begin[DynamicMap::levels], inverse[DynamicMap::levels], offset[DynamicMap::levels],
      top[DynamicMap::levels];
  bool has_signs;

  explicit Map(const DynamicMap& from) : has_signs(from.has_signs) {
    std::copy(std::begin(from.base), std::end(from.base), base);
    std::copy(std::begin(from.slope), std::end(from.slope), slope);
    for (int i = 0; i < DynamicMap::levels; ++i)
      begin[i] = from.begin[i], inverse[i] = from.inverse[i], offset[i] = from.offset[i],
      top[i] = from.top[i];
  }
  __device__ float value(std::uint8_t code) const {
    const int from_middle = has_signs ? code - 127 : code + 1,
              k = from_middle < 0 ? -from_middle : from_middle;
    const int row = (k == 0 ? 32 : __clz(k)) % 16;
    const float size = slope[row] * static_cast<float>(k) + base[row];
    return from_middle < 0 ? -size : size;
  }
  /// Of a number from -1 to 1.
  __device__ std::uint8_t code(float x) const {
    const float size = bits_as<float>(magnitude(x));
    int level = 0;
    while (level + 1 < DynamicMap::levels && size >= begin[level + 1]) ++level;
    int k = static_cast<int>(::rintf(::fminf(size * inverse[level] + offset[level], top[level])));
    if (!has_signs) return static_cast<std::uint8_t>(k);
    if (bits_as<std::uint32_t>(x) >> 31) k = k < 127 ? -k : -127;
    return static_cast<std::uint8_t>(k + 127);
  }
};

/// A span with 8-bit moments.
struct CodedSpan {
  Streams x;
  Common common;
  float* scales[2];
  Map signs, sizes;
  unsigned* not_finite;
};

/// The largest magnitude of a thread block's numbers; shared: as many as threads.
__device__ inline std::uint32_t largest(float mine, std::uint32_t* shared) {
  shared[threadIdx.x] = magnitude(mine);
  for (unsigned n = threads / 2; n > 0; n /= 2) {
    __syncthreads();
    if (threadIdx.x < n && shared[threadIdx.x + n] > shared[threadIdx.x])
      shared[threadIdx.x] = shared[threadIdx.x + n];
  }
  __syncthreads();
  const std::uint32_t out = shared[0];
  __syncthreads();  // until everyone has it
  return out;
}

/// A quantised block of elements for each thread block, in turn.
template <MasterIndex form>
__global__ void __launch_bounds__(threads) update_codes_kernel(Adam rule, CodedSpan span) {
  SHERD_SHARED(std::uint32_t, shared, threads);
  const Streams& x = span.x;
  const Count blocks = (x.n + threads - 1) / threads;
  bool bad = false;
  for (Count b = blockIdx.x; b < blocks; b += gridDim.x) {
    const Count at = b * threads + threadIdx.x;
    const bool mine = at < x.n;
    auto *firsts = static_cast<std::uint8_t*>(x.moments[0]),
         *seconds = static_cast<std::uint8_t*>(x.moments[1]);
    float weight[1] = {}, grad[1] = {}, first = 0, second = 0;
    if (mine) {
      read_gradient(x, span.common.grad_index, at, grad);
      read_master<1, form>(x, at, weight);
      first = span.signs.value(firsts[at]) * span.scales[0][b];
      second = span.sizes.value(seconds[at]) * span.scales[1][b];
      step_element(rule, Math{}, weight[0], grad[0] * span.common.factor, first, second);
      bad |= magnitude(weight[0]) > span.common.largest_weight;
      bad |= magnitude(second) > span.common.largest_moment;
      write_master<1, form>(x, at, weight);
    }
    const auto store = [&](float value, const Map& map, float* scale, std::uint8_t* codes) {
      const float top = bits_as<float>(largest(value, shared));
      const bool any = top >= least_scale;
      if (mine) codes[at] = map.code(value * (any ? 1.0f / top : 0.0f));
      if (threadIdx.x == 0) *scale = any ? top : 0.0f;
    };
    store(first, span.signs, span.scales[0] + b, firsts);
    store(second, span.sizes, span.scales[1] + b, seconds);
  }
  if (bad) atomicOr(span.not_finite, 1u);
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

namespace {

void queue_codes(const Target& target, const UpdatePlan& plan, const SpanUpdate& span, unsigned* not_finite) {
  static_assert(threads == quantized_block);
  const CodedSpan coded{
      streams_of(plan, span, 0),        {plan.grad, plan.factor, plan.largest_weight, plan.largest_moment},
      {span.scales[0], span.scales[1]}, Map(map_of(Code::signed_8bit)),
      Map(map_of(Code::unsigned_8bit)), not_finite};
  const auto run = [&](auto kernel) {
    launch(kernel, blocks_for((span.n + threads - 1) / threads, 1, target.processors, 8), threads, 0,
           target.stream, std::get<Adam>(plan.rule), coded);
  };
  switch (plan.master) {
    case master_alone:
      return run(update_codes_kernel<master_alone>);
    case master_and_bf16:
      return run(update_codes_kernel<master_and_bf16>);
    case master_and_f16:
      return run(update_codes_kernel<master_and_f16>);
    default:
      return run(update_codes_kernel<master_split>);
  }
}

}  // namespace

void update(const Target& target, std::span<const PlannedSpan> spans, unsigned* not_finite) {
  SpanTable table{};
  const UpdatePlan* common = nullptr;
  const auto flush = [&] {
    if (table.count > 0)
      std::visit([&](const auto& rule) { queue(target, *common, rule, table); }, common->rule);
    table.count = 0;
  };
  for (const auto& [plan, span] : spans) {
    if (span.n == 0) continue;
    if (span.moment_dtype == DType::u8) {
      flush();
      queue_codes(target, plan, span, not_finite);
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
