#include "tensor/cpu/isa/tables.h"
#include "tensor/cpu/isa/vec.h"

namespace sherd::tensor::cpu::SHERD_ISA {
namespace {

#if defined(SHERD_ISA_avx512)
constexpr int most_rows = 4, most_cols = 4;  // of a tile; 8·16 running sums at most lie in registers
#else
constexpr int most_rows = 2, most_cols = 2;
#endif

template <class S>
struct FewRowsLoops {
  struct PaddedRow {
    S element[32];
  };
  static PaddedRow padded(const S* from, Count n) {
    PaddedRow out{};
    __builtin_memcpy(out.element, from, static_cast<std::size_t>(n) * sizeof(S));
    return out;
  }

  /// Adds the products of 32 elements of each row.
  template <int rows, int cols>
  SHERD_INLINE static void add(const S* const (&a)[rows], const S* const (&b)[cols],
                               Sum32<S> (&sum)[rows][cols]) {
#pragma GCC unroll 4
    for (int p = 0; p < 32 / lanes; p += 2) {
      Pair x[rows];
#pragma GCC unroll 4
      for (int i = 0; i < rows; ++i) x[i] = load_pair<true>(a[i] + p * lanes);
#pragma GCC unroll 4
      for (int j = 0; j < cols; ++j) {
        const Pair y = load_pair<true>(b[j] + p * lanes);
#pragma GCC unroll 4
        for (int i = 0; i < rows; ++i) {
          sum[i][j].part[p] += x[i].a * y.a;
          sum[i][j].part[p + 1] += x[i].b * y.b;
        }
      }
    }
  }

  template <int rows, int cols>
  static void tile(const S* a, Count a_stride, const S* b, Count b_stride, Count depth, float* c,
                   Count c_stride) {
    Sum32<S> sum[rows][cols];
    const S *left[rows], *right[cols];
    Count p = 0;
    for (; p + 32 <= depth; p += 32) {
#pragma GCC unroll 4
      for (int i = 0; i < rows; ++i) left[i] = a + i * a_stride + p;
#pragma GCC unroll 4
      for (int j = 0; j < cols; ++j) {
        right[j] = b + j * b_stride + p;
        // The next tile's: streams are short for the hardware. Into the second cache, which has more requests
        // under way than the first.
        __builtin_prefetch(right[j] + cols * b_stride, 0, 2);
      }
      add<rows, cols>(left, right, sum);
    }
    if (p < depth) {
      PaddedRow ends[rows + cols];
      for (int i = 0; i < rows; ++i) left[i] = (ends[i] = padded(a + i * a_stride + p, depth - p)).element;
      for (int j = 0; j < cols; ++j)
        right[j] = (ends[rows + j] = padded(b + j * b_stride + p, depth - p)).element;
      add<rows, cols>(left, right, sum);
    }
    for (int i = 0; i < rows; ++i)
      for (int j = 0; j < cols; ++j) c[i * c_stride + j] = sum[i][j].total();
  }

  template <int cols>
  static void all_rows(const S* a, Count a_stride, Count rows, const S* b, Count b_stride, Count depth,
                       float* c, Count c_stride) {
    constexpr int wide = cols > 2 ? 1 : most_rows;
    Count i = 0;
    for (; i + wide <= rows; i += wide)
      tile<wide, cols>(a + i * a_stride, a_stride, b, b_stride, depth, c + i * c_stride, c_stride);
    for (; i < rows; ++i) tile<1, cols>(a + i * a_stride, a_stride, b, b_stride, depth, c + i * c_stride, 0);
  }

  static void products(const void* a, Count a_stride, Count rows, const void* b, Count b_stride, Count cols,
                       Count depth, float* c, Count c_stride) {
    const S* left = static_cast<const S*>(a);
    const S* right = static_cast<const S*>(b);
    Count j = 0;
    if (rows < most_rows)
      for (; j + most_cols <= cols; j += most_cols)
        all_rows<most_cols>(left, a_stride, rows, right + j * b_stride, b_stride, depth, c + j, c_stride);
    for (; j + 2 <= cols; j += 2)
      all_rows<2>(left, a_stride, rows, right + j * b_stride, b_stride, depth, c + j, c_stride);
    if (j < cols) all_rows<1>(left, a_stride, rows, right + j * b_stride, b_stride, depth, c + j, c_stride);
  }

  /// `parts` registers of each of `count` rows.
  template <int parts>
  static void sum_part(const float* weights, const S* x, Count count, Count width, float* out) {
    F sum[parts];
    for (int k = 0; k < parts; ++k) sum[k] = load(out + k * lanes);
    for (Count j = 0; j < count; ++j) {
      const F weight = all(weights[j]);
#pragma GCC unroll 4
      for (int k = 0; k < parts; ++k) sum[k] += weight * load(x + j * width + k * lanes);
    }
    for (int k = 0; k < parts; ++k) store(out + k * lanes, sum[k]);
  }

  static void weighted_sums(const float* weights, Count weight_stride, Count rows, const void* x, Count count,
                            Count width, float* out) {
    const S* from = static_cast<const S*>(x);
    for (Count i = 0; i < rows; ++i, weights += weight_stride, out += width) {
      Count d = 0;
      for (; d + 4 * lanes <= width; d += 4 * lanes) sum_part<4>(weights, from + d, count, width, out + d);
      for (; d + lanes <= width; d += lanes) sum_part<1>(weights, from + d, count, width, out + d);
      if (d == width) continue;
      F sum = load_tail(out + d, width - d);
      for (Count j = 0; j < count; ++j) sum += all(weights[j]) * load_tail(from + j * width + d, width - d);
      store_tail(out + d, sum, width - d);
    }
  }
};

template <class S>
constexpr FewRowsOps table() {
  return {FewRowsLoops<S>::products, FewRowsLoops<S>::weighted_sums};
}

}  // namespace

const FewRowsOps few_rows[storage_count] = {table<float>(), table<Bf16>(), table<F16>()};

}  // namespace sherd::tensor::cpu::SHERD_ISA
