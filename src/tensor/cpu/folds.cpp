#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "tensor/cpu/conversions.h"

namespace sherd::tensor::cpu {
namespace {

/// Rows that are added in fp32 before the sum goes on in double.
constexpr Count rows_at_once = 64;
/// Columns of a block of sums on the stack.
constexpr Count block_columns = 512;

/// Elements [first, first + n), n <= stack_block, as fp32.
void load_block(const IsaTable& isa, const Tensor& x, Count first, Count n, float* values) {
  isa.convert[storage_index(x)].load(at(x, first), values, n);
}

/// In sixteen lanes, whose order is the same everywhere.
template <class T>
double block_sum(const T* x, Count n) {
  T lane[16] = {};
  Count i = 0;
  for (; i + 16 <= n; i += 16)
    for (int k = 0; k < 16; ++k) lane[k] += x[i + k];
  for (int k = 0; i < n; ++i, ++k) lane[k] += x[i];
  for (int width = 8; width >= 1; width /= 2)
    for (int k = 0; k < width; ++k) lane[k] += lane[k + width];
  return static_cast<double>(lane[0]);
}

/// The sum of n elements that follow each other.
double run_sum(const IsaTable& isa, const Tensor& x, Count first, Count n) {
  double sum = 0;
  float values[stack_block];
  for (Count i = 0; i < n; i += stack_block) {
    const Count count = std::min(stack_block, n - i);
    if (x.dtype() == DType::f64) {
      sum += block_sum(x.data<double>() + first + i, count);
      continue;
    }
    load_block(isa, x, first + i, count, values);
    sum += block_sum(values, count);
  }
  return sum;
}

void write_sum(const IsaTable& isa, double sum, const Tensor& out, Count element, bool accumulate) {
  if (out.dtype() == DType::f64) {
    double& to = out.data<double>()[element];
    to = accumulate ? to + sum : sum;
    return;
  }
  const auto narrow = static_cast<float>(sum);
  write_sums(isa, &narrow, out, element, 1, accumulate);
}

/// Runs that follow each other; long ones in chunks.
void sum_runs(Device& device, const IsaTable& isa, const Tensor& x, const AxisExtents& axis, double factor,
              const Tensor& out, bool accumulate) {
  const Count n = axis.extent, chunks = std::max<Count>(1, (n + element_grain - 1) / element_grain);
  if (chunks == 1) {
    return for_items(device, axis.outer, row_grain(n), [&](Count row) {
      write_sum(isa, factor * run_sum(isa, x, row * n, n), out, row, accumulate);
    });
  }
  std::vector<double> parts(static_cast<std::size_t>(axis.outer * chunks));
  for_items(device, axis.outer * chunks, 1, [&](Count part) {
    const Count first = part % chunks * element_grain;
    parts[static_cast<std::size_t>(part)] =
        run_sum(isa, x, part / chunks * n + first, std::min(element_grain, n - first));
  });
  for (Count row = 0; row < axis.outer; ++row) {
    double sum = 0;
    for (Count chunk = 0; chunk < chunks; ++chunk)
      sum += parts[static_cast<std::size_t>(row * chunks + chunk)];
    write_sum(isa, factor * sum, out, row, accumulate);
  }
}

/// Columns [0, count) of a block whose rows lie axis.inner apart.
void sum_block(const IsaTable& isa, const Tensor& x, Count first, Count count, const AxisExtents& axis,
               double* total) {
  std::fill_n(total, count, 0.0);
  for (Count row = 0; row < axis.extent; row += rows_at_once) {
    const Count last = std::min(axis.extent, row + rows_at_once);
    float sums[block_columns] = {};
    for (Count r = row; r < last; ++r) {
      const Count from = first + r * axis.inner;
      if (x.dtype() == DType::f64)
        for (Count i = 0; i < count; ++i) total[i] += x.data<double>()[from + i];
      else
        isa.convert[storage_index(x)].add_to(at(x, from), sums, count);
    }
    for (Count i = 0; i < count; ++i) total[i] += static_cast<double>(sums[i]);
  }
}

/// fn(first element of x, first of what is left, columns) for blocks of columns of axis.outer times
/// axis.inner.
template <class Fn>
void for_blocks(Device& device, const AxisExtents& axis, const Fn& fn) {
  const Count blocks = (axis.inner + block_columns - 1) / block_columns;
  const Count work = axis.extent * std::min(axis.inner, block_columns);
  for_items(device, axis.outer * blocks, row_grain(work), [&](Count task) {
    const Count outer = task / blocks, column = task % blocks * block_columns;
    fn(outer * axis.extent * axis.inner + column, outer * axis.inner + column,
       std::min(block_columns, axis.inner - column));
  });
}

template <class T>
using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;

/// b takes a's place as the largest so far.
template <class C>
bool above(C b, C a) {
  return b > a || (b != b && a == a);
}

// ---- softmax ----

constexpr float least = std::numeric_limits<float>::lowest();

/// A block of a row, scaled, with what its distances add; what is hidden, and -infinity, is the least finite
/// value.
void load_scores(const IsaTable& isa, const Tensor& x, Count row, Count column, Count n, const Softmax& args,
                 float* values) {
  const Count columns = x.shape().back();
  load_block(isa, x, row * columns + column, n, values);
  isa.elementwise[storage_f32].scale(values, static_cast<float>(args.scale), values, n);
  if (args.distances.defined())
    isa.elementwise[storage_f32].add(
        values, args.distances.data<float>() + args.distance(row, columns) + column, values, n);
  for (Count i = 0; i < n; ++i) values[i] = values[i] < least ? least : values[i];
  if (!args.seen.defined()) return;
  const std::uint8_t* seen = args.seen.data<std::uint8_t>() + column;
  for (Count i = 0; i < n; ++i) values[i] = seen[i] ? values[i] : least;
}

struct RowExponentials {
  float top = least;
  double sum = 0;  ///< sum of e^(x - top)
};

RowExponentials sum_scores(const IsaTable& isa, const Tensor& x, Count row, Count seen, const Softmax& args) {
  RowExponentials out;
  float values[stack_block];
  for (Count i = 0; i < seen; i += stack_block) {
    const Count n = std::min(stack_block, seen - i);
    load_scores(isa, x, row, i, n, args, values);
    float top, sum;
    isa.softmax[storage_f32].max_and_sum(values, n, &top, &sum);
    if (top > out.top) {
      out.sum *= std::exp(static_cast<double>(out.top) - static_cast<double>(top));
      out.top = top;
    } else if (top == least && !std::isnan(sum)) {
      continue;  // nothing is seen here
    } else {
      sum *= static_cast<float>(std::exp(static_cast<double>(top) - static_cast<double>(out.top)));
    }
    out.sum += static_cast<double>(sum);
  }
  return out;
}

void softmax_row(const IsaTable& isa, const Tensor& x, Count row, const Softmax& args, const Tensor& y) {
  const Count n = x.shape().back(), first = row * n, seen = args.columns_of(row, n);
  const RowExponentials row_sum = sum_scores(isa, x, row, seen, args);
  const auto log_sum = static_cast<float>(std::log(row_sum.sum));
  const auto factor = static_cast<float>(row_sum.sum == 0 ? 0 : 1 / row_sum.sum);
  float values[stack_block];
  for (Count i = 0; i < n; i += stack_block) {
    const Count count = std::min(stack_block, n - i), here = std::clamp<Count>(seen - i, 0, count);
    if (here > 0) load_scores(isa, x, row, i, here, args, values);
    if (row_sum.sum == 0)
      std::fill_n(values, here, 0.0f);
    else if (args.log)  // one after the other: their sum would round away a small logarithm beside a large
                        // top
      for (Count k = 0; k < here; ++k) values[k] = (values[k] - row_sum.top) - log_sum;
    else
      isa.softmax[storage_f32].gradient(values, here, row_sum.top, factor);
    std::fill(values + here, values + count, 0.0f);
    isa.convert[storage_index(y)].store(values, at(y, first + i), count);
  }
}

void softmax_row_f64(const double* x, Count row, Count n, const Softmax& args, double* y) {
  const std::uint8_t* seen = args.seen.defined() ? args.seen.data<std::uint8_t>() : nullptr;
  const Count visible = args.columns_of(row, n);
  constexpr double none = -std::numeric_limits<double>::infinity();
  const double* distances =
      args.distances.defined() ? args.distances.data<double>() + args.distance(row, n) : nullptr;
  const auto score = [&](Count i) {
    if (i >= visible || (seen && !seen[i])) return none;
    return x[i] * args.scale + (distances ? distances[i] : 0);
  };
  double top = none, sum = 0;
  for (Count i = 0; i < n; ++i) top = above(score(i), top) ? score(i) : top;
  for (Count i = 0; i < n && top != none; ++i) sum += std::exp(score(i) - top);
  for (Count i = 0; i < n; ++i) {
    const double value = score(i);
    y[i] = top == none ? 0 : args.log ? value - top - std::log(sum) : std::exp(value - top) / sum;
  }
}

/// Σ y·dy, or Σ dy for the logarithm.
double slope_sum(const IsaTable& isa, const Tensor& y, const Tensor& dy, Count first, Count n, bool log) {
  double sum = 0;
  float values[stack_block], slopes[stack_block];
  for (Count i = 0; i < n; i += stack_block) {
    const Count count = std::min(stack_block, n - i);
    load_block(isa, dy, first + i, count, slopes);
    if (!log) {
      load_block(isa, y, first + i, count, values);
      isa.elementwise[storage_f32].multiply(values, slopes, slopes, count);
    }
    sum += block_sum(slopes, count);
  }
  return sum;
}

void softmax_backward_row(const IsaTable& isa, const Tensor& y, const Tensor& dy, Count first, Count n,
                          const Softmax& args, const Tensor& dx) {
  const auto sum = static_cast<float>(slope_sum(isa, y, dy, first, n, args.log)),
             scale = static_cast<float>(args.scale);
  float values[stack_block], slopes[stack_block];
  for (Count i = 0; i < n; i += stack_block) {
    const Count count = std::min(stack_block, n - i);
    load_block(isa, y, first + i, count, values);
    load_block(isa, dy, first + i, count, slopes);
    if (args.log) {
      isa.softmax[storage_f32].gradient(values, count, 0.0f, sum);
      for (Count k = 0; k < count; ++k) values[k] = scale * (slopes[k] - values[k]);
    } else {
      for (Count k = 0; k < count; ++k) values[k] = scale * (values[k] * (slopes[k] - sum));
    }
    isa.convert[storage_index(dx)].store(values, at(dx, first + i), count);
  }
}

void softmax_backward_row_f64(const double* y, const double* dy, Count n, const Softmax& args, double* dx) {
  double sum = 0;
  for (Count i = 0; i < n; ++i) sum += args.log ? dy[i] : y[i] * dy[i];
  for (Count i = 0; i < n; ++i)
    dx[i] = args.scale * (args.log ? dy[i] - std::exp(y[i]) * sum : y[i] * (dy[i] - sum));
}

}  // namespace

void CpuKernels::sum_axis(const Tensor& x, const AxisExtents& axis, double factor, const Tensor& out,
                          bool accumulate) {
  check_sum_axis(x, axis, out);
  if (out.numel() == 0) return;
  if (sums_rows(x, axis, factor, out)) return sum_rows(x.reshape({axis.extent, axis.inner}), out, accumulate);
  if (axis.inner == 1) return sum_runs(device_, isa_, x, axis, factor, out, accumulate);
  for_blocks(device_, axis, [&](Count from, Count to, Count count) {
    double total[block_columns];
    sum_block(isa_, x, from, count, axis, total);
    if (out.dtype() == DType::f64) {
      for (Count i = 0; i < count; ++i) write_sum(isa_, factor * total[i], out, to + i, accumulate);
      return;
    }
    float sums[block_columns];
    for (Count i = 0; i < count; ++i) sums[i] = static_cast<float>(factor * total[i]);
    write_sums(isa_, sums, out, to, count, accumulate);
  });
}

void CpuKernels::max_axis(const Tensor& x, const AxisExtents& axis, const Tensor& out) {
  if (axis.kept() == 0) return;
  check_max_axis("max_axis", x, axis, out);
  with_floating(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    for_blocks(device_, axis, [&](Count from, Count to, Count count) {
      const T* in = x.data<T>() + from;
      T* top = out.data<T>() + to;
      std::copy_n(in, count, top);
      for (Count k = 1; k < axis.extent; ++k)
        for (Count i = 0; i < count; ++i) {
          const T value = in[k * axis.inner + i];
          if (above(convert_one<Wide<T>>(value), convert_one<Wide<T>>(top[i]))) top[i] = value;
        }
    });
  });
}

void CpuKernels::max_axis_backward(const Tensor& x, const Tensor& y, const Tensor& dy,
                                   const AxisExtents& axis, const Tensor& dx) {
  if (axis.kept() == 0) return;
  check_max_axis("max_axis_backward", x, axis, y);
  require_alike("max_axis_backward", dx, {&x});
  require_vector("max_axis_backward", "dy", dy, axis.kept(), x.dtype());
  with_floating(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    for_blocks(device_, axis, [&](Count from, Count to, Count count) {
      const T *in = x.data<T>() + from, *top = y.data<T>() + to, *slope = dy.data<T>() + to;
      bool found[block_columns] = {};
      for (Count k = 0; k < axis.extent; ++k)
        for (Count i = 0; i < count; ++i) {
          const auto value = convert_one<Wide<T>>(in[k * axis.inner + i]),
                     most = convert_one<Wide<T>>(top[i]);
          const bool here = !found[i] && (value == most || (value != value && most != most));
          dx.data<T>()[from + k * axis.inner + i] = here ? slope[i] : T{};
          found[i] = found[i] || here;
        }
    });
  });
}

void CpuKernels::softmax(const Tensor& x, const Softmax& args, const Tensor& y) {
  check_softmax(x, args, y);
  const Count n = x.shape().back();
  if (x.numel() == 0) return;
  for_items(device_, x.shape().rows(), row_grain(n), [&](Count row) {
    x.dtype() == DType::f64
        ? softmax_row_f64(x.data<double>() + row * n, row, n, args, y.data<double>() + row * n)
        : softmax_row(isa_, x, row, args, y);
  });
}

void CpuKernels::softmax_backward(const Tensor& y, const Tensor& dy, const Softmax& args, const Tensor& dx) {
  check_softmax_backward(y, dy, args, dx);
  const Count n = y.shape().back();
  if (y.numel() == 0) return;
  for_items(device_, y.shape().rows(), row_grain(n), [&](Count row) {
    y.dtype() == DType::f64
        ? softmax_backward_row_f64(y.data<double>() + row * n, dy.data<double>() + row * n, n, args,
                                   dx.data<double>() + row * n)
        : softmax_backward_row(isa_, y, dy, row * n, n, args, dx);
  });
}

}  // namespace sherd::tensor::cpu
