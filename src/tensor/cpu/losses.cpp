#include <cmath>
#include <cstring>
#include <vector>

#include "tensor/cpu/loops.h"
#include "tensor/extents.h"

namespace sherd::tensor::cpu {
namespace {

/// The targets that take part, after checking all of them.
Count count_targets(const char* kernel, const Tensor& targets, Count valid, std::int32_t ignore_index) {
  const std::int32_t* target = targets.data<std::int32_t>();
  Count counted = 0;
  for (Count i = 0; i < targets.numel(); ++i) {
    if (target[i] == ignore_index) continue;
    if (target[i] < 0 || target[i] >= valid) [[unlikely]]
      fail(ErrorKind::data, kernel, ": target id ", target[i], " at position ", i, " of ",
           targets.shape().str(), " is outside the vocabulary of ", valid,
           ". Prepare the data with the model's tokenizer, raise the model's ",
           "vocabulary size, or mark positions that do not count with ", ignore_index);
    ++counted;
  }
  return counted;
}

double log_sum_exp_f64(const double* row, Count n) {
  double maximum = row[0], sum = 0;
  for (Count i = 1; i < n; ++i) maximum = std::max(maximum, row[i]);
  if (std::isinf(maximum)) return maximum;
  for (Count i = 0; i < n; ++i) sum += std::exp(row[i] - maximum);
  return maximum + std::log(sum);
}

void gradient_row_f64(double* row, Count n, Count target, double lse, double factor) {
  const double at_target = std::expm1(row[target] - lse) * factor;
  for (Count i = 0; i < n; ++i) row[i] = std::exp(row[i] - lse) * factor;
  row[target] = at_target;
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

/// One element of any of the three storage types, through the conversions that the loops use.
float load_one(const IsaTable& isa, const Tensor& x, Count element) {
  float value;
  isa.convert[storage_index(x)].load(at(x, element), &value, 1);
  return value;
}

/// The one element of a tensor of a compute type.
double number_in(const Tensor& x) {
  return x.dtype() == DType::f64 ? x.data<double>()[0] : static_cast<double>(x.data<float>()[0]);
}

}  // namespace

void CpuKernels::cross_entropy(const Tensor& logits, const Tensor& targets, std::int64_t valid,
                               std::int32_t ignore_index, const Tensor& loss, const Tensor& lse) {
  const Count columns = check_cross_entropy("cross_entropy", logits, targets, lse, valid);
  require_vector("cross_entropy", "loss", loss, 1, compute_type(logits.dtype()));
  const Count counted = count_targets("cross_entropy", targets, columns, ignore_index);
  const Count vocab = logits.shape().back(), rows = logits.shape().rows();
  const std::int32_t* target = targets.data<std::int32_t>();
  const bool f64 = logits.dtype() == DType::f64;
  in_chunks(device_, rows, row_grain(vocab), [&](Count begin, Count count) {
    for (Count r = begin; r < begin + count; ++r) {
      if (f64) {
        lse.data<double>()[r] = log_sum_exp_f64(logits.data<double>() + r * vocab, columns);
      } else if (target[r] == ignore_index) {
        lse.data<float>()[r] = 0;
      } else {
        float maximum, sum;
        isa_.softmax[storage_index(logits)].max_and_sum(at(logits, r * vocab), columns, &maximum, &sum);
        lse.data<float>()[r] =
            static_cast<float>(static_cast<double>(maximum) + std::log(static_cast<double>(sum)));
      }
    }
  });
  double total = 0;
  for (Count r = 0; r < rows; ++r) {
    if (target[r] == ignore_index) continue;
    const Count element = r * vocab + target[r];
    total += f64 ? lse.data<double>()[r] - logits.data<double>()[element]
                 : static_cast<double>(lse.data<float>()[r]) -
                       static_cast<double>(load_one(isa_, logits, element));
  }
  const double mean = counted == 0 ? 0 : total / static_cast<double>(counted);
  f64 ? void(loss.data<double>()[0] = mean) : void(loss.data<float>()[0] = static_cast<float>(mean));
}

void CpuKernels::cross_entropy_backward(const Tensor& logits, const Tensor& targets, const Tensor& lse,
                                        std::int64_t valid, std::int32_t ignore_index, const Tensor& dloss) {
  constexpr const char* name = "cross_entropy_backward";
  const Count columns = check_cross_entropy(name, logits, targets, lse, valid);
  require_vector(name, "dloss", dloss, 1, compute_type(logits.dtype()));
  const Count counted = count_targets(name, targets, columns, ignore_index);
  const Count vocab = logits.shape().back(), rows = logits.shape().rows();
  const std::int32_t* target = targets.data<std::int32_t>();
  const double scale = counted == 0 ? 0 : number_in(dloss) / static_cast<double>(counted);
  const std::size_t size = size_of(logits.dtype());
  in_chunks(device_, rows, row_grain(vocab), [&](Count begin, Count count) {
    for (Count r = begin; r < begin + count; ++r) {
      const bool ignored = target[r] == ignore_index;
      const Count from = ignored ? 0 : columns, element = r * vocab + target[r];
      std::memset(at(logits, r * vocab + from), 0, static_cast<std::size_t>(vocab - from) * size);
      if (ignored) continue;
      if (logits.dtype() == DType::f64) {
        gradient_row_f64(logits.data<double>() + r * vocab, columns, target[r], lse.data<double>()[r], scale);
        continue;
      }
      const float row_lse = lse.data<float>()[r];
      // expm1 keeps the digits of a target whose probability is near 1.
      const double distance =
          static_cast<double>(load_one(isa_, logits, element)) - static_cast<double>(row_lse);
      const float at_target = static_cast<float>(std::expm1(distance) * scale);
      isa_.softmax[storage_index(logits)].gradient(at(logits, r * vocab), columns, row_lse,
                                                   static_cast<float>(scale));
      isa_.convert[storage_index(logits)].store(&at_target, at(logits, element), 1);
    }
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
  const double scale = 2 * number_in(dloss) / static_cast<double>(dx.numel());
  if (dx.dtype() == DType::f64)
    return map_f64(
        device_, dx, [=](double u, double v) { return (u - v) * scale; }, x, y);
  const auto op = isa_.elementwise[storage_index(dx)].scaled_difference;
  in_chunks(device_, dx.numel(), element_grain, [&](Count begin, Count count) {
    op(at(x, begin), at(y, begin), static_cast<float>(scale), at(dx, begin), count);
  });
}

}  // namespace sherd::tensor::cpu
