#include <algorithm>
#include <vector>

#include "tensor/cuda/families.cuh"
#include "tensor/extents.h"

namespace sherd::tensor::SHERD_CUDA {
namespace {

/// The frequencies of so many pairs of a head, an argument of a kernel.
struct Frequencies {
  static constexpr Count most = 128;
  double at[most];
};

/// Cosine and sine of position·frequency, times the scales, of pairs [first, first + count); computed in
/// double and rounded once.
template <class C>
__global__ void angles_kernel(Count seq, Count half, Count first, Count count, Frequencies frequencies,
                              double scale, double query_beta, Count query_positions, C* cosine, C* sine) {
  for (Count item = grid_thread(); item < seq * count; item += grid_threads()) {
    const Count position = item / count, i = item % count, at = position * half + first + i;
    const double angle = static_cast<double>(position) * frequencies.at[i];
    const double factor = scale * query_scale(query_beta, query_positions, position);
    cosine[at] = static_cast<C>(::cos(angle) * factor);
    sine[at] = static_cast<C>(::sin(angle) * factor);
  }
}

void write_angles(const Target& target, const RotaryAngles& to) {
  const std::vector<double> all = rotary_frequencies(to.rotary, to.half);
  for (Count first = 0; first < to.half; first += Frequencies::most) {
    const Count count = std::min(Frequencies::most, to.half - first);
    Frequencies some{};
    std::copy_n(all.begin() + first, count, some.at);
    with_compute_type(to.cosine.dtype(), [&](auto type) {
      using C = decltype(type);
      launch(angles_kernel<C>, blocks_for(to.seq * count, element_threads, target.processors),
             element_threads, 0, target.stream, to.seq, to.half, first, count, some,
             attention_scale(to.rotary), to.rotary.query_beta, Count{to.rotary.query_positions},
             out<C>(to.cosine), out<C>(to.sine));
    });
  }
}

template <class S>
struct RotaryArguments {
  const S* x;
  S* y;
  const Compute<S>*cosine, *sine, *key_cosine, *key_sine;
  Compute<S> direction;
  Count rows, seq, half, head;
  Positions positions;
  const std::int32_t* row_positions;  ///< null: as `positions` says
  int heads, per_group;  ///< heads of all kinds in a row, and in a group, whose last one holds values
};

/// A block takes one row after the other; a thread `width` pairs (i, i + half) of a head. Behind the pairs
/// that turn follow those of elements that only pass.
template <int width, class S>
__global__ void rotary_kernel(RotaryArguments<S> a) {
  using C = Compute<S>;
  const Count turned = a.half / width, packs = a.head / 2 / width;  // per half a head
  for (Count row = blockIdx.x; row < a.rows; row += gridDim.x) {
    const Count angles = (a.row_positions ? a.row_positions[row] : a.positions.at(row % a.seq)) * a.half;
    for (Count item = threadIdx.x; item < a.heads * packs; item += blockDim.x) {
      const Count head = item / packs, pack = item - head * packs, begin = (row * a.heads + head) * a.head;
      const int in_group = static_cast<int>(head) % a.per_group;
      const bool values = in_group == a.per_group - 1, keys = in_group == a.per_group - 2,
                 turns = pack < turned;
      if ((values || !turns) && a.x == a.y) continue;
      const Count i = pack * width, at = begin + (turns ? i : a.half + i),
                  other = turns ? at + a.half : at + a.head / 2 - a.half;
      Pack<S, width> u = load_pack<width>(a.x + at), v = load_pack<width>(a.x + other);
      if (!values && turns) {
        const C *cosine = (keys ? a.key_cosine : a.cosine) + angles + i,
                *sine = (keys ? a.key_sine : a.sine) + angles + i;
        SHERD_UNROLL
        for (int k = 0; k < width; ++k) {
          const C x = widen(u.at[k]), y = widen(v.at[k]), s = sine[k] * a.direction;
          u.at[k] = narrow<S>(x * cosine[k] - y * s);
          v.at[k] = narrow<S>(y * cosine[k] + x * s);
        }
      }
      store_pack(a.y + at, u);
      store_pack(a.y + other, v);
    }
  }
}

}  // namespace

void CudaKernels::rotary(const Tensor& qkv, const Attention& geometry, const Rotary& rotary, bool transposed,
                         const Tensor& out) {
  const auto [rows, seq, head, turned] = check_rotary(qkv, geometry, rotary, out);
  if (qkv.numel() == 0) return;
  const auto tables = angles_.of_both(target_.device, geometry.positions.end(seq), turned / 2, rotary,
                                      compute_type(qkv.dtype()),
                                      [&](const RotaryAngles& made) { write_angles(target_, made); });
  with_floating(qkv.dtype(), [&, rows = rows, seq = seq, head = head, half = turned / 2](auto type) {
    using S = decltype(type);
    using C = Compute<S>;
    constexpr int width = pack_width<S>;
    const RotaryArguments<S> args{in<S>(qkv),
                                  SHERD_CUDA::out<S>(out),
                                  in<C>(tables.first.cosine),
                                  in<C>(tables.first.sine),
                                  in<C>(tables.second.cosine),
                                  in<C>(tables.second.sine),
                                  transposed ? C{-1} : C{1},
                                  rows,
                                  seq,
                                  half,
                                  head,
                                  geometry.positions,
                                  geometry.row_positions ? in<std::int32_t>(geometry.row_positions) : nullptr,
                                  geometry.heads + 2 * geometry.kv_heads,
                                  geometry.heads / geometry.kv_heads + 2};
    // Both halves of what turns, and of what passes, are whole packs.
    const bool packs = half % width == 0 && head / 2 % width == 0 && aligned_for_packs(qkv.raw(), out.raw());
    const Count items = args.heads * (packs ? head / 2 / width : head / 2);
    const auto threads =
        static_cast<unsigned>(items >= element_threads ? element_threads : (items + 31) / 32 * 32);
    launch(packs ? rotary_kernel<width, S> : rotary_kernel<1, S>, blocks_for(rows, 1, target_.processors, 32),
           threads, 0, target_.stream, args);
  });
}

}  // namespace sherd::tensor::SHERD_CUDA
