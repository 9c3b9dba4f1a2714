#include <cmath>
#include <cstring>

#include "tensor/cpu/loops.h"
#include "tensor/extents.h"

namespace sherd::tensor::cpu {
namespace {

/// Rows whose contributions to dweight and dbias are summed one after another; the sums of such groups are
/// then added in order. Depends on the shape alone.
Count rows_per_group(Count rows) {
  return std::max<Count>(64, (rows + 255) / 256);
}

/// LayerNorm of one fp64 row; with `centre` false, RMSNorm.
void norm_row_f64(const double* x, const double* weight, const double* bias, double eps, bool centre,
                  double shift, double* y, double& mean, double& rstd, Count n) {
  double sum = 0, squares = 0;
  for (Count i = 0; i < n; ++i) sum += x[i];
  mean = centre ? sum / static_cast<double>(n) : 0;
  for (Count i = 0; i < n; ++i) squares += (x[i] - mean) * (x[i] - mean);
  rstd = 1 / std::sqrt(squares / static_cast<double>(n) + eps);
  for (Count i = 0; i < n; ++i)
    y[i] = (x[i] - mean) * rstd * (weight ? weight[i] + shift : 1) + (bias ? bias[i] : 0);
}

void norm_backward_row_f64(const double* x, const double* weight, double mean, double rstd, bool centre,
                           double shift, const double* dy, double* dx, bool onto_dx, double* dweight,
                           double* dbias, Count n) {
  double sum = 0, product = 0;
  for (Count i = 0; i < n; ++i) {
    const double normal = (x[i] - mean) * rstd, g = dy[i] * (weight ? weight[i] + shift : 1);
    if (dweight) dweight[i] += dy[i] * normal;
    if (dbias) dbias[i] += dy[i];
    sum += g, product += g * normal;
  }
  if (!dx) return;
  const double average = centre ? sum / static_cast<double>(n) : 0, slope = product / static_cast<double>(n);
  for (Count i = 0; i < n; ++i) {
    const double g = dy[i] * (weight ? weight[i] + shift : 1);
    const double value = (g - average - (x[i] - mean) * rstd * slope) * rstd;
    dx[i] = onto_dx ? dx[i] + value : value;
  }
}

/// Runs row(r, dweight_sums, dbias_sums) for every row, and reduces the sums into dweight and dbias.
template <class T, class Row>
void backward_rows(Device& device, const IsaTable& isa, Count rows, Count width, const Tensor& dweight,
                   const Tensor& dbias, bool accumulate, const Row& row) {
  const Count group = rows_per_group(rows), groups = (rows + group - 1) / group;
  const Count parts = (dweight ? 1 : 0) + (dbias ? 1 : 0);
  Tensor sums;
  if (parts > 0) sums = Tensor::empty(device, {groups, parts * width}, dtype_of<T>(), Category::workspace);
  in_chunks(device, rows, group, [&](Count begin, Count count) {
    T* mine = parts > 0 ? sums.data<T>() + begin / group * parts * width : nullptr;
    if (mine) std::memset(mine, 0, static_cast<std::size_t>(parts * width) * sizeof(T));
    T* weight_sums = dweight ? mine : nullptr;
    T* bias_sums = dbias ? mine + (parts - 1) * width : nullptr;
    for (Count r = begin; r < begin + count; ++r) row(r, weight_sums, bias_sums);
  });
  const auto join = [&](Count first, const Tensor& out) {
    if (out) sum_strided(device, isa, sums, first, parts * width, groups, out, 0, width, accumulate);
  };
  join(0, dweight);
  join((parts - 1) * width, dbias);
}

/// LayerNorm, or RMSNorm where `mean` is undefined.
void norm(Device& device, const IsaTable& isa, const Tensor& x, const Tensor& weight, const Tensor& bias,
          double eps, double shift, const Tensor& y, const Tensor& mean, const Tensor& rstd) {
  const Count rows = x.shape().rows(), width = x.shape().back();
  if (x.numel() == 0) return;
  for_items(device, rows, row_grain(width), [&](Count r) {
    if (x.dtype() == DType::f64) {
      double none = 0;
      norm_row_f64(x.data<double>() + r * width, data_or_null<double>(weight), data_or_null<double>(bias),
                   eps, mean.defined(), shift, y.data<double>() + r * width,
                   mean ? mean.data<double>()[r] : none, rstd.data<double>()[r], width);
      return;
    }
    const NormOps& ops = isa.norm[storage_index(x)];
    const void *from = at(x, r * width), *gain = at_or_null(weight, 0);
    float* to_rstd = rstd.data<float>() + r;
    if (mean)
      ops.layer_norm(from, gain, at_or_null(bias, 0), static_cast<float>(eps), at(y, r * width),
                     mean.data<float>() + r, to_rstd, width);
    else
      ops.rms_norm(from, gain, static_cast<float>(shift), static_cast<float>(eps), at(y, r * width), to_rstd,
                   width);
  });
}

void norm_backward(Device& device, const IsaTable& isa, const Tensor& x, const Tensor& weight,
                   const Tensor& mean, const Tensor& rstd, const Tensor& dy, const Tensor& dx,
                   const Tensor& dweight, const Tensor& dbias, bool accumulate, bool onto_dx, double shift) {
  const Count rows = x.shape().rows(), width = x.shape().back();
  if (x.dtype() == DType::f64)
    return backward_rows<double>(
        device, isa, rows, width, dweight, dbias, accumulate,
        [&](Count r, double* weight_sums, double* bias_sums) {
          norm_backward_row_f64(
              x.data<double>() + r * width, data_or_null<double>(weight), mean ? mean.data<double>()[r] : 0,
              rstd.data<double>()[r], mean.defined(), shift, dy.data<double>() + r * width,
              dx ? dx.data<double>() + r * width : nullptr, onto_dx, weight_sums, bias_sums, width);
        });
  const NormOps& ops = isa.norm[storage_index(x)];
  backward_rows<float>(device, isa, rows, width, dweight, dbias, accumulate,
                       [&](Count r, float* weight_sums, float* bias_sums) {
                         const void *from = at(x, r * width), *gain = at_or_null(weight, 0),
                                    *slope = at(dy, r * width);
                         void* to = at_or_null(dx, r * width);
                         const float inverse = rstd.data<float>()[r];
                         if (mean)
                           ops.layer_norm_backward(from, gain, mean.data<float>()[r], inverse, slope, to,
                                                   onto_dx, weight_sums, bias_sums, width);
                         else
                           ops.rms_norm_backward(from, gain, static_cast<float>(shift), inverse, slope, to,
                                                 onto_dx, weight_sums, width);
                       });
}

}  // namespace

std::size_t norm_backward_workspace(const Tensor& x, const Tensor& dweight, const Tensor& dbias) {
  const Count rows = x.shape().rows(), group = rows_per_group(rows), groups = (rows + group - 1) / group;
  const Count parts = (dweight ? 1 : 0) + (dbias ? 1 : 0);
  return static_cast<std::size_t>(groups * parts * x.shape().back()) * size_of(compute_type(x.dtype()));
}

void CpuKernels::layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps,
                            const Tensor& y, const Tensor& mean, const Tensor& rstd) {
  check_norm("layer_norm", x, weight, bias, rstd);
  require_alike("layer_norm", y, {&x});
  require_vector("layer_norm", "mean", mean, x.shape().rows(), compute_type(x.dtype()));
  norm(device_, isa_, x, weight, bias, eps, 0, y, mean, rstd);
}

void CpuKernels::layer_norm_backward(const Tensor& x, const Tensor& weight, const Tensor& mean,
                                     const Tensor& rstd, const Tensor& dy, const Tensor& dx,
                                     const Tensor& dweight, const Tensor& dbias, bool accumulate,
                                     bool onto_dx) {
  constexpr const char* name = "layer_norm_backward";
  check_norm_backward(name, x, weight, rstd, dy, dx, dweight, dbias);
  require_vector(name, "mean", mean, x.shape().rows(), compute_type(x.dtype()));
  norm_backward(device_, isa_, x, weight, mean, rstd, dy, dx, dweight, dbias, accumulate, onto_dx, 0);
}

void CpuKernels::rms_norm(const Tensor& x, const Tensor& weight, double eps, const Tensor& y,
                          const Tensor& rstd, double shift) {
  check_norm("rms_norm", x, weight, {}, rstd);
  require_alike("rms_norm", y, {&x});
  norm(device_, isa_, x, weight, {}, eps, shift, y, {}, rstd);
}

void CpuKernels::rms_norm_backward(const Tensor& x, const Tensor& weight, const Tensor& rstd,
                                   const Tensor& dy, const Tensor& dx, const Tensor& dweight, bool accumulate,
                                   bool onto_dx, double shift) {
  check_norm_backward("rms_norm_backward", x, weight, rstd, dy, dx, dweight, {});
  norm_backward(device_, isa_, x, weight, {}, rstd, dy, dx, dweight, {}, accumulate, onto_dx, shift);
}

}  // namespace sherd::tensor::cpu
