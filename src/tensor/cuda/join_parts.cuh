#pragma once

#include <initializer_list>

#include "tensor/cuda/families.cuh"

// The second half of sums over many rows: blocks have left one sum per column each, and these are added up.

namespace sherd::tensor::SHERD_CUDA {

inline constexpr unsigned join_columns = 16, join_lanes = 32;

/// Where the joined sums go.
struct JoinedSums {
  void* at;
  DType dtype;
};

/// Element `column` of the first or the second, by blockIdx.y, (+)= the sum of parts[blockIdx.y, p, column]
/// over the `count` parts p: lane threadIdx.y takes every 32nd part, then the lanes are added in order.
template <class C>
__global__ void join_parts_kernel(const C* parts, Count count, Count columns, JoinedSums first,
                                  JoinedSums second, bool accumulate) {
  SHERD_SHARED(C, lanes, join_lanes * join_columns);
  const Count column = Count{blockIdx.x} * join_columns + threadIdx.x;
  const C* from = parts + blockIdx.y * count * columns;
  C sum = 0;
  if (column < columns)
    for (Count part = threadIdx.y; part < count; part += join_lanes)
      sum = sum + from[part * columns + column];
  lanes[threadIdx.y * join_columns + threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= columns) return;
  for (unsigned lane = 1; lane < join_lanes; ++lane) sum = sum + lanes[lane * join_columns + threadIdx.x];
  const auto write = [&]<class T>(T* to) {
    to[column] = narrow<T>(accumulate ? widen(to[column]) + sum : sum);
  };
  const JoinedSums out = blockIdx.y == 0 ? first : second;
  if constexpr (std::is_same_v<C, double>)
    write(static_cast<double*>(out.at));
  else if (out.dtype == DType::bf16)
    write(static_cast<bf16*>(out.at));
  else if (out.dtype == DType::f16)
    write(static_cast<f16*>(out.at));
  else
    write(static_cast<float*>(out.at));
}

/// outs[y][i] (+)= the sum of parts[y, p, i] over p, in an order that `count` alone decides. parts: [defined
/// outs, count, columns]; outs: up to two, of a dtype that C computes for; those that are not defined are
/// passed over.
template <class C>
void join_parts(const Target& target, const C* parts, Count count, Count columns,
                std::initializer_list<Tensor> outs, bool accumulate) {
  JoinedSums defined[2]{};
  unsigned joins = 0;
  for (const Tensor& to : outs)
    if (to) defined[joins++] = {to.raw(), to.dtype()};
  launch(join_parts_kernel<C>,
         dim3(static_cast<unsigned>((columns + join_columns - 1) / join_columns), joins),
         dim3(join_columns, join_lanes), 0, target.stream, parts, count, columns, defined[0], defined[1],
         accumulate);
}

}  // namespace sherd::tensor::SHERD_CUDA
