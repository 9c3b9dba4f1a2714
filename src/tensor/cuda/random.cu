#include "base/random.h"
#include "tensor/cuda/families.cuh"

namespace sherd::tensor::SHERD_CUDA {
namespace {

/// Elements of a thread: whole blocks of the stream (four words) and whole accesses.
template <class S>
constexpr int dropout_width = pack_width<S> > 4 ? pack_width<S> : 4;

template <class C>
struct Keep {
  RandomKey key;
  std::uint64_t first;
  std::uint32_t threshold;
  C factor;
};

/// to[i] = (residual[i] +) x[i]·factor where the word of element keep.first + i says so. Without packs, the
/// first thread begins with the block of the stream that element keep.first is in.
template <bool packs, bool with_residual, class S>
__global__ void dropout_kernel(const S* x, const S* residual, S* to, Count n, Keep<Compute<S>> keep) {
  using C = Compute<S>;
  constexpr int width = dropout_width<S>;
  const Count skipped = packs ? 0 : static_cast<Count>(keep.first % 4);
  for (Count at = grid_thread() * width; at < skipped + n; at += grid_threads() * width) {
    const Count first = at - skipped;  // below 0 where the stream's block begins before
    const bool whole = first + width <= n;
    Pack<S, width> value{}, base{};
    if (packs && whole) {
      value = load_pack<width>(x + first);
      if (with_residual) base = load_pack<width>(residual + first);
    } else {
      for (int k = 0; k < width && first + k < n; ++k) {
        if (first + k < 0) continue;
        value.at[k] = x[first + k];
        if (with_residual) base.at[k] = residual[first + k];
      }
    }
    for (int block = 0; block < width / 4; ++block) {
      const auto words = philox(keep.key, keep.first / 4 + static_cast<std::uint64_t>(at / 4 + block));
      for (int k = 0; k < 4; ++k) {
        S& element = value.at[4 * block + k];
        const C kept = words[k] >> 8 >= keep.threshold ? widen(element) * keep.factor : C{0};
        element = narrow<S>(with_residual ? widen(base.at[4 * block + k]) + kept : kept);
      }
    }
    if (packs && whole)
      store_pack(to + first, value);
    else
      for (int k = 0; k < width && first + k < n; ++k)
        if (first + k >= 0) to[first + k] = value.at[k];
  }
}

/// Elements 4·index … 4·index + 3 of a stream, as fp32 values.
struct Four {
  float at[4];
};
/// base/random.h's normal_block().
struct NormalBlocks {
  __device__ Four operator()(RandomKey key, std::uint64_t index) const {
    const auto words = philox(key, index);
    Four out;
    for (int pair = 0; pair < 4; pair += 2) {
      const double u = (static_cast<double>(words[pair]) + 0.5) * 0x1p-32;
      const double angle = 2.0 * 3.14159265358979323846 * (static_cast<double>(words[pair + 1]) * 0x1p-32);
      const double radius = ::sqrt(-2.0 * ::log(u));
      out.at[pair] = static_cast<float>(radius * ::cos(angle));
      out.at[pair + 1] = static_cast<float>(radius * ::sin(angle));
    }
    return out;
  }
};
/// uniform_at() of four elements.
struct UniformBlocks {
  __device__ Four operator()(RandomKey key, std::uint64_t index) const {
    const auto words = philox(key, index);
    Four out;
    for (int k = 0; k < 4; ++k) out.at[k] = static_cast<float>(words[k] >> 8) * 0x1p-24f;
    return out;
  }
};

/// x[i] = offset + factor·(element first + i), in double, then rounded to fp32 and to S. A thread takes a
/// block of the stream.
template <class Blocks, class S>
__global__ void fill_stream_kernel(Blocks blocks, RandomKey key, Count first, double offset, double factor,
                                   S* x, Count n) {
  const Count skipped = first % 4, count = (skipped + n + 3) / 4;
  for (Count block = grid_thread(); block < count; block += grid_threads()) {
    const Four four = blocks(key, static_cast<std::uint64_t>(first / 4 + block));
    for (int k = 0; k < 4; ++k) {
      const Count i = 4 * block + k - skipped;
      if (i < 0 || i >= n) continue;
      const double value = offset + factor * static_cast<double>(four.at[k]);
      x[i] = narrow<S>(static_cast<Compute<S>>(value));
    }
  }
}

template <class Blocks>
void fill_stream(const Target& target, const char* kernel, const Tensor& x, RandomKey key, Count first,
                 double offset, double factor) {
  require_floating(kernel, "x", x);
  require(first >= 0, kernel, ": the first index must not be negative");
  if (x.numel() == 0) return;
  with_floating(x.dtype(), [&](auto type) {
    using S = decltype(type);
    launch(fill_stream_kernel<Blocks, S>, blocks_for(x.numel() / 4 + 2, element_threads, target.processors),
           element_threads, 0, target.stream, Blocks{}, key, first, offset, factor, out<S>(x), x.numel());
  });
}

}  // namespace

void CudaKernels::dropout(const Tensor& x, const Tensor& residual, float p, RandomElements random,
                          const Tensor& out) {
  require_alike("dropout", out, {&x});
  if (residual) require_alike("dropout", out, {&residual});
  const std::uint32_t threshold = keep_threshold("dropout", p);
  if (threshold == 0) return residual ? add(residual, x, out) : copy(x, out);
  if (out.numel() == 0) return;
  with_floating(out.dtype(), [&](auto type) {
    using S = decltype(type);
    using C = Compute<S>;
    const S* base = in_or_null<S>(residual);
    const Keep<C> keep{random.key, random.first, threshold, C{1} / (C{1} - static_cast<C>(p))};
    const bool packs = random.first % 4 == 0 && aligned_for_packs(x.raw(), out.raw(), base);
    const auto kernel = packs ? (base ? dropout_kernel<true, true, S> : dropout_kernel<true, false, S>)
                              : (base ? dropout_kernel<false, true, S> : dropout_kernel<false, false, S>);
    launch(kernel,
           blocks_for(out.numel() + 3, Count{element_threads} * dropout_width<S>, target_.processors, 32),
           element_threads, 0, target_.stream, in<S>(x), base, SHERD_CUDA::out<S>(out), out.numel(), keep);
  });
}

void CudaKernels::dropout_backward(const Tensor& dy, float p, RandomElements random, const Tensor& dx) {
  dropout(dy, {}, p, random, dx);
}

void CudaKernels::fill_normal(const Tensor& x, RandomKey key, std::int64_t first, double mean, double std) {
  fill_stream<NormalBlocks>(target_, "fill_normal", x, key, first, mean, std);
}

void CudaKernels::fill_uniform(const Tensor& x, RandomKey key, std::int64_t first, double low, double high) {
  fill_stream<UniformBlocks>(target_, "fill_uniform", x, key, first, low, high - low);
}

}  // namespace sherd::tensor::SHERD_CUDA
