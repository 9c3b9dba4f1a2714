#include "tensor/cuda/fp8.cuh"

// Parts of matrices that ranks share: ranges of elements, with one scale a tensor or in blocks of 128 x 128.

namespace sherd::tensor::SHERD_CUDA {
namespace {

/// A range in tiles; `scale_stride` is 0 where all share a scale.
struct Fp8Span {
  Count cols, begin, end, first_tile_row, across, scale_stride;
  bool packs;

  Count tiles() const { return ((end - 1) / cols / fp8_side - first_tile_row + 1) * across; }
  __device__ Count tile_row() const { return first_tile_row + blockIdx.x / across; }
  __device__ Count tile_col() const { return blockIdx.x % across; }
  __device__ Count place() const { return scale_stride ? tile_row() * scale_stride + tile_col() : 0; }

  /// body(first, count): runs of up to `width` elements, counted from the range's first one, of the block's
  /// tile.
  template <int width, class Body>
  __device__ void for_parts(const Body& body) const {
    constexpr int lanes = fp8_side / width, rows = int{fp8_threads} / lanes;
    const Count col = tile_col() * fp8_side + static_cast<int>(threadIdx.x) % lanes * width;
    if (col >= cols) return;
    const Count stop = col + width < cols ? col + width : cols;
    for (int r = static_cast<int>(threadIdx.x) / lanes; r < fp8_side; r += rows) {
      const Count row = (tile_row() * fp8_side + r) * cols;
      const Count first = row + col > begin ? row + col : begin, last = row + stop < end ? row + stop : end;
      if (first < last) body(first - begin, last - first);
    }
  }
};

template <class S>
__global__ void fp8_largest_kernel(const S* values, Fp8Span span, Bits* largest) {
  constexpr int width = pack_width<S>;
  Bits most = 0;
  span.for_parts<width>([&](Count first, Count count) {
    most = Larger{}(most, largest_of(load_part<width>(values + first, count, span.packs)));
  });
  most = block_reduce(most, Larger{}, Bits{0});
  if (threadIdx.x == 0 && most) atomicMax(largest + span.place(), most);
}

template <class S, Fp8Format format>
__global__ void fp8_encode_kernel(const S* values, Fp8Span span, const float* scales, std::uint8_t* codes) {
  constexpr int width = pack_width<S>;
  const float inverse = fp8_inverse(bits_as<Bits>(scales[span.place()]));
  Fp8Lost lost;  // which nobody asks for
  span.for_parts<width>([&](Count first, Count count) {
    const Pack<S, width> x = load_part<width>(values + first, count, span.packs);
    store_part(codes + first, fp8_codes<format>(x, inverse, lost), count, span.packs);
  });
}

template <class S, Fp8Format format>
__global__ void fp8_decode_kernel(const std::uint8_t* codes, Fp8Span span, const float* scales, S* values) {
  constexpr int width = pack_width<S>;
  const float scale = scales[span.place()];
  span.for_parts<width>([&](Count first, Count count) {
    const Pack<std::uint8_t, width> x = load_part<width>(codes + first, count, span.packs);
    Pack<S, width> out;
    SHERD_UNROLL
    for (int k = 0; k < width; ++k) {
      // A GPU's products lose a NaN's bits; a processor's make it a quiet one.
      const float value = fp8_decode<format, Fp8Numbers>(x.at[k]);
      out.at[k] =
          narrow<S>(value != value ? bits_as<float>(bits_as<Bits>(value) | 0x400000u) : value * scale);
    }
    store_part(values + first, out, count, span.packs);
  });
}

Fp8Span span_of(const Fp8Range& range, Fp8Rule rule, const Tensor& values, const void* codes) {
  Fp8Span span{range.cols, range.begin, range.end, 0, 0, 0, false};
  if (rule.scaling == Fp8Scaling::tensor)  // any matrix will do: one whose tiles lie in one piece each
    span.cols = fp8_block, span.end -= span.begin, span.begin = 0;
  else
    span.scale_stride = fp8_scales_shape(rule.scaling, range.rows, range.cols)[1];
  span.across = fp8_blocks(span.cols);
  span.first_tile_row = span.begin / span.cols / fp8_block;
  const auto width = 16 / static_cast<Count>(size_of(values.dtype()));
  span.packs = aligned_for_packs(values.raw()) && reinterpret_cast<std::uintptr_t>(codes) % 16 == 0 &&
               span.begin % width == 0 && span.cols % width == 0;
  return span;
}

void largest_in(const Target& target, const Tensor& values, const Fp8Span& span, const Tensor& scales) {
  with_fp8_source(values.dtype(), [&](auto type) {
    using S = decltype(type);
    launch(fp8_largest_kernel<S>, static_cast<unsigned>(span.tiles()), fp8_threads, 0, target.stream,
           in<S>(values), span, out<Bits>(scales));
  });
}

}  // namespace

void raise_to_largest(const Target& target, const Tensor& x, const Tensor& scale) {
  largest_in(target, x, span_of({1, x.numel(), 0, x.numel()}, {}, x, nullptr), scale);
}

void CudaKernels::fp8_largest(const Tensor& values, const Fp8Range& range, Fp8Rule rule,
                              const Tensor& scales) {
  check_fp8_range("fp8_largest", values, range, rule, scales);
  if (values.numel() > 0) largest_in(target_, values, span_of(range, rule, values, nullptr), scales);
}

void CudaKernels::fp8_encode(const Tensor& values, const Fp8Range& range, Fp8Rule rule, const Tensor& scales,
                             const Tensor& codes) {
  check_fp8_range("fp8_encode", values, range, rule, scales);
  require_vector("fp8_encode", "codes", codes, values.numel(), DType::u8);
  if (values.numel() == 0) return;
  const Fp8Span span = span_of(range, rule, values, codes.raw());
  with_fp8_source(values.dtype(), [&](auto type) {
    with_fp8_format(rule.format, [&](auto format) {
      using S = decltype(type);
      launch(fp8_encode_kernel<S, decltype(format)::value>, static_cast<unsigned>(span.tiles()), fp8_threads,
             0, target_.stream, in<S>(values), span, in<float>(scales), out<std::uint8_t>(codes));
    });
  });
}

void CudaKernels::fp8_decode(const Tensor& codes, const Fp8Range& range, Fp8Rule rule, const Tensor& scales,
                             const Tensor& values) {
  check_fp8_range("fp8_decode", values, range, rule, scales);
  require_vector("fp8_decode", "codes", codes, values.numel(), DType::u8);
  if (values.numel() == 0) return;
  const Fp8Span span = span_of(range, rule, values, codes.raw());
  with_fp8_source(values.dtype(), [&](auto type) {
    with_fp8_format(rule.format, [&](auto format) {
      using S = decltype(type);
      launch(fp8_decode_kernel<S, decltype(format)::value>, static_cast<unsigned>(span.tiles()), fp8_threads,
             0, target_.stream, in<std::uint8_t>(codes), span, in<float>(scales), out<S>(values));
    });
  });
}

}  // namespace sherd::tensor::SHERD_CUDA
