#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "tensor/cpu/loops.h"
#include "tensor/extents.h"

namespace sherd::tensor::cpu {
namespace {

/// Throws for a target outside the vocabulary.
void check_targets(const char* kernel, const Tensor& targets, Count ids, std::int32_t ignore_index) {
  const std::int32_t* target = targets.data<std::int32_t>();
  for (Count i = 0; i < targets.numel(); ++i) {
    if (target[i] == ignore_index || (target[i] >= 0 && target[i] < ids)) [[likely]]
      continue;
    fail(ErrorKind::data, kernel, ": target id ", target[i], " at position ", i, " of ",
         targets.shape().str(), " is outside the vocabulary of ", ids,
         ". Prepare the data with the model's tokenizer, raise the model's ",
         "vocabulary size, or mark positions that do not count with ", ignore_index);
  }
}

double log_sum_exp_f64(const double* row, Count n) {
  double maximum = row[0], sum = 0;
  for (Count i = 1; i < n; ++i) maximum = std::max(maximum, row[i]);
  if (std::isinf(maximum)) return maximum;
  for (Count i = 0; i < n; ++i) sum += std::exp(row[i] - maximum);
  return maximum + std::log(sum);
}

/// The log-sum-exp of one row over all parts.
template <class T>
T merged(const T* lse, Count parts, Count rows, Count row) {
  if (parts == 1) return lse[row];
  T top = std::numeric_limits<T>::lowest();
  for (Count p = 0; p < parts; ++p) top = std::max(top, lse[p * rows + row]);
  double sum = 0;
  for (Count p = 0; p < parts; ++p)
    sum += std::exp(static_cast<double>(lse[p * rows + row]) - static_cast<double>(top));
  return static_cast<T>(static_cast<double>(top) + std::log(sum));
}

template <class T>
void add_up(const T* lse, const T* picked, Count parts, const Tensor& targets, std::int32_t ignore_index,
            T* lse_all, double* total) {
  const std::int32_t* target = targets.data<std::int32_t>();
  const Count rows = targets.numel();
  for (Count row = 0; row < rows; ++row) {
    lse_all[row] = target[row] == ignore_index ? T{0} : merged(lse, parts, rows, row);
    if (target[row] == ignore_index) continue;
    double at_target = 0;
    for (Count p = 0; p < parts; ++p) at_target += static_cast<double>(picked[p * rows + row]);
    total[0] += static_cast<double>(lse_all[row]) - at_target;
    total[1] += 1;
  }
}

/// In blocks, whose short sums keep the rounding errors of a long one away.
double squared_difference_f64(const double* x, const double* y, Count n) {
  double total = 0;
  for (Count begin = 0; begin < n; begin += 128) {
    double sum = 0;
    for (Count i = begin; i < std::min(n, begin + 128); ++i) sum += (x[i] - y[i]) * (x[i] - y[i]);
    total += sum;
  }
  return total;
}

/// One element of any floating dtype.
double load_one(const IsaTable& isa, const Tensor& x, Count element) {
  if (x.dtype() == DType::f64) return x.data<double>()[element];
  float value;
  isa.convert[storage_index(x)].load(at(x, element), &value, 1);
  return static_cast<double>(value);
}

void store_one(const IsaTable& isa, double value, const Tensor& x, Count element) {
  if (x.dtype() == DType::f64) {
    x.data<double>()[element] = value;
    return;
  }
  const float narrow = static_cast<float>(value);
  isa.convert[storage_index(x)].store(&narrow, at(x, element), 1);
}

/// log Σ exp of n elements from `first` on, and the largest.
struct RowSum {
  double lse, most;
};
RowSum sum_row(const IsaTable& isa, const Tensor& x, Count first, Count n) {
  if (n == 0) {
    const double least = x.dtype() == DType::f64 ? std::numeric_limits<double>::lowest()
                                                 : static_cast<double>(std::numeric_limits<float>::lowest());
    return {least, least};
  }
  if (x.dtype() == DType::f64) {
    const double* row = x.data<double>() + first;
    return {log_sum_exp_f64(row, n), *std::max_element(row, row + n)};
  }
  float maximum, sum;
  isa.softmax[storage_index(x)].max_and_sum(at(x, first), n, &maximum, &sum);
  return {static_cast<double>(maximum) + std::log(static_cast<double>(sum)), static_cast<double>(maximum)};
}

/// x = e^(x - lse)·factor, for n elements from `first` on.
void softmax_in_place(const IsaTable& isa, const Tensor& x, Count first, Count n, double lse, double factor) {
  if (n == 0) return;
  if (x.dtype() == DType::f64) {
    double* row = x.data<double>() + first;
    for (Count i = 0; i < n; ++i) row[i] = std::exp(row[i] - lse) * factor;
  } else {
    isa.softmax[storage_index(x)].gradient(at(x, first), n, static_cast<float>(lse),
                                           static_cast<float>(factor));
  }
}

}  // namespace

void CpuKernels::cross_entropy(const Tensor& logits, const Tensor& targets, const VocabSlice& slice,
                               std::int32_t ignore_index, const Tensor& lse, const Tensor& picked,
                               const Tensor& most) {
  const LossExtents e = check_cross_entropy("cross_entropy", logits, targets, lse, slice);
  require_vector("cross_entropy", "picked", picked, e.rows, compute_type(logits.dtype()));
  if (most) require_vector("cross_entropy", "most", most, e.rows, compute_type(logits.dtype()));
  check_targets("cross_entropy", targets, e.ids, ignore_index);
  const std::int32_t* target = targets.data<std::int32_t>();
  for_items(device_, e.rows, row_grain(e.columns), [&](Count row) {
    const bool counts = target[row] != ignore_index;
    const Count first = row * e.columns, column = target[row] - e.first;
    const bool held = counts && column >= 0 && column < e.valid;
    const RowSum sum = counts ? sum_row(isa_, logits, first, e.valid) : RowSum{0, 0};
    store_one(isa_, sum.lse, lse, row);
    if (most) store_one(isa_, sum.most, most, row);
    store_one(isa_, held ? load_one(isa_, logits, first + column) : 0, picked, row);
  });
}

void CpuKernels::cross_entropy_total(const Tensor& lse, const Tensor& picked, const Tensor& targets,
                                     std::int32_t ignore_index, const Tensor& lse_all, const Tensor& total,
                                     bool accumulate) {
  const Count parts = check_cross_entropy_total(lse, picked, targets, lse_all, total);
  double* sums = total.data<double>();
  if (!accumulate) sums[0] = sums[1] = 0;
  with_compute_type(lse.dtype(), [&](auto type) {
    using C = decltype(type);
    add_up(lse.data<C>(), picked.data<C>(), parts, targets, ignore_index, lse_all.data<C>(), sums);
  });
}

void CpuKernels::cross_entropy_backward(const Tensor& logits, const Tensor& targets, const Tensor& lse,
                                        const VocabSlice& slice, std::int32_t ignore_index,
                                        const Tensor& factor) {
  constexpr const char* name = "cross_entropy_backward";
  const LossExtents e = check_cross_entropy(name, logits, targets, lse, slice);
  require_number(name, "the factor", factor);
  check_targets(name, targets, e.ids, ignore_index);
  const std::int32_t* target = targets.data<std::int32_t>();
  const double by = scalar_value(factor);
  for_items(device_, e.rows, row_grain(e.columns), [&](Count row) {
    const bool counts = target[row] != ignore_index;
    const Count first = row * e.columns, column = target[row] - e.first, valid = counts ? e.valid : 0;
    std::memset(at(logits, first + valid), 0,
                static_cast<std::size_t>(e.columns - valid) * size_of(logits.dtype()));
    const bool held = column >= 0 && column < valid;
    const double row_lse = load_one(isa_, lse, row);
    // expm1 keeps the digits of a target whose probability is near 1.
    const double at_target = held ? std::expm1(load_one(isa_, logits, first + column) - row_lse) * by : 0;
    softmax_in_place(isa_, logits, first, valid, row_lse, by);
    if (held) store_one(isa_, at_target, logits, first + column);
  });
}

void CpuKernels::mean_squared_error(const Tensor& x, const Tensor& y, const Tensor& loss) {
  require_alike("mean_squared_error", x, {&y});
  require_vector("mean_squared_error", "loss", loss, 1, compute_type(x.dtype()));
  const Count n = x.numel();
  std::vector<double> sums(static_cast<std::size_t>((n + element_grain - 1) / element_grain));
  in_chunks(device_, n, element_grain, [&](Count begin, Count count) {
    sums[static_cast<std::size_t>(begin / element_grain)] =
        x.dtype() == DType::f64
            ? squared_difference_f64(x.data<double>() + begin, y.data<double>() + begin, count)
            : isa_.convert[storage_index(x)].squared_difference(at(x, begin), at(y, begin), count);
  });
  double total = 0;
  for (const double sum : sums) total += sum;
  const double mean = n == 0 ? 0 : total / static_cast<double>(n);
  x.dtype() == DType::f64 ? void(loss.data<double>()[0] = mean)
                          : void(loss.data<float>()[0] = static_cast<float>(mean));
}

void CpuKernels::mean_squared_error_backward(const Tensor& x, const Tensor& y, const Tensor& dloss,
                                             const Tensor& dx) {
  require_alike("mean_squared_error_backward", dx, {&x, &y});
  require_vector("mean_squared_error_backward", "dloss", dloss, 1, compute_type(dx.dtype()));
  if (dx.numel() == 0) return;
  const double scale = 2 * scalar_value(dloss) / static_cast<double>(dx.numel());
  if (dx.dtype() == DType::f64)
    return map_f64([=](double u, double v) { return (u - v) * scale; }, device_, dx, x, y);
  const auto op = isa_.elementwise[storage_index(dx)].scaled_difference;
  in_chunks(device_, dx.numel(), element_grain, [&](Count begin, Count count) {
    op(at(x, begin), at(y, begin), static_cast<float>(scale), at(dx, begin), count);
  });
}

}  // namespace sherd::tensor::cpu
