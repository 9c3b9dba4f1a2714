#include "tensor/cuda/cuda_kernels.h"
#include "tensor/cuda/families.cuh"
#include "tensor/extents.h"

// Products for the emulator, so that code around them runs there; on a GPU cuBLASLt makes them
// (tensor/cuda/matmul.cpp).

namespace sherd::tensor::SHERD_CUDA {
namespace {

constexpr int tile = 16;

template <class S, class T>
struct ProductArguments {
  const S *a, *b;
  T* c;
  Count m, n, k;
  Count a_row, a_col, b_row, b_col;  ///< strides
  bool accumulate;
};

template <class S, class T>
__global__ void product_kernel(ProductArguments<S, T> p) {
  using C = Compute<S>;
  SHERD_SHARED(C, left, tile * tile);
  SHERD_SHARED(C, right, tile * tile);
  const int x = static_cast<int>(threadIdx.x), y = static_cast<int>(threadIdx.y);
  const Count row = Count{blockIdx.y} * tile + y, col = Count{blockIdx.x} * tile + x;
  // Short sums, added up, keep the rounding errors of long ones away.
  C sum = 0;
  for (Count first = 0; first < p.k; first += tile) {
    left[y * tile + x] =
        row < p.m && first + x < p.k ? widen(p.a[row * p.a_row + (first + x) * p.a_col]) : C{0};
    right[y * tile + x] =
        col < p.n && first + y < p.k ? widen(p.b[(first + y) * p.b_row + col * p.b_col]) : C{0};
    __syncthreads();
    C part = 0;
    for (int i = 0; i < tile; ++i) part += left[y * tile + i] * right[i * tile + x];
    sum += part;
    __syncthreads();
  }
  if (row >= p.m || col >= p.n) return;
  T& to = p.c[row * p.n + col];
  to = narrow<T>(p.accumulate ? widen(to) + sum : sum);
}

template <class S, class T>
void run_product(const Target& target, const Matmul& args, const MatmulExtents& e, const Tensor& c) {
  const dim3 blocks(static_cast<unsigned>((e.n + tile - 1) / tile),
                    static_cast<unsigned>((e.m + tile - 1) / tile));
  launch(product_kernel<S, T>, blocks, dim3(tile, tile), 0, target.stream,
         ProductArguments<S, T>{in<S>(args.a), in<S>(args.b), out<T>(c), e.m, e.n, e.k,
                                args.trans_a ? 1 : e.k, args.trans_a ? e.m : 1, args.trans_b ? 1 : e.n,
                                args.trans_b ? e.k : 1, args.accumulate});
}

struct Fp8Numbers {
  using F = float;
  using U = std::uint32_t;
  using I = std::int32_t;
  static U bits(F f) { return bits_as<U>(f); }
  static F value(U u) { return bits_as<F>(u); }
};

/// Writes the values of codes, which bf16 holds.
__global__ void fp8_values_kernel(const std::uint8_t* codes, const float* scales, Fp8Rule rule, Count rows,
                                  Count cols, bf16* to) {
  for (Count i = grid_thread(); i < rows * cols; i += grid_threads()) {
    const Count row = i / cols, col = i % cols, blocks_of_4 = (fp8_blocks(cols) + 3) / 4;
    const Count place = rule.scaling == Fp8Scaling::rows             ? row
                        : rule.scaling == Fp8Scaling::blocks_1x128   ? col / 128 * fp8_padded(rows) + row
                        : rule.scaling == Fp8Scaling::blocks_128x128 ? row / 128 * blocks_of_4 * 4 + col / 128
                                                                     : 0;
    const std::uint32_t code = codes[row * fp8_padded(cols) + col];
    const float value = rule.format == Fp8Format::e4m3 ? fp8_decode<Fp8Format::e4m3, Fp8Numbers>(code)
                                                       : fp8_decode<Fp8Format::e5m2, Fp8Numbers>(code);
    to[i] = narrow<bf16>(value * scales[place]);
  }
}

void fp8_values(const Target& target, const Fp8Matrix& x, const Tensor& to) {
  launch(fp8_values_kernel, blocks_for(to.numel(), 256, target.processors), 256, 0, target.stream,
         in<std::uint8_t>(x.codes), in<float>(x.scales), x.rule, x.rows, x.cols, out<bf16>(to));
}

}  // namespace

void CudaKernels::matmul(const Matmul& args) {
  const MatmulExtents e = check_matmul(args);
  if (e.m == 0 || e.n == 0) return;
  if (args.fp8_a) {
    Matmul plain = args;
    plain.a = scratch(e.m * e.k, DType::bf16).reshape({e.m, e.k});
    plain.b = scratch(e.n * e.k, DType::bf16).reshape({e.n, e.k});
    fp8_values(target_, args.fp8_a, plain.a), fp8_values(target_, args.fp8_b, plain.b);
    plain.fp8_a = plain.fp8_b = {}, plain.trans_b = true;
    return matmul(plain);
  }
  // The bias joins the sum before it rounds.
  const bool wide = args.bias && size_of(args.c.dtype()) == 2;
  const Tensor sums = wide ? scratch(e.m * e.n, DType::f32) : args.c;
  if (wide && args.accumulate) copy(args.c, sums);
  with_floating(args.a.dtype(), [&](auto type) {
    using S = decltype(type);
    if (sums.dtype() == dtype_of<S>())
      run_product<S, S>(target_, args, e, sums);
    else
      run_product<S, Compute<S>>(target_, args, e, sums);
  });
  if (args.bias) add_row(target_, sums, args.bias, sums);
  if (wide) copy(sums, args.c);
  if (args.pre_activation) copy(args.c, args.pre_activation);
  if (args.activation != Activation::none) activation(args.activation, args.c, args.c);
}

}  // namespace sherd::tensor::SHERD_CUDA
