#include <cmath>
#include <vector>

#include "tensor/cpu/loops.h"
#include "tensor/cpu/attention/softmax_shares.h"
#include "tensor/extents.h"

namespace sherd::tensor::cpu {
namespace {

template <class C>
void add_sinks(Device& device, const IsaTable& isa, const SinkExtents& e, const Tensor& sinks,
               const Tensor& out, const Tensor& lse) {
  const std::vector<C> scores = all_values<C>(isa, sinks);
  in_chunks(device, e.batch * e.rows, row_grain(e.heads * e.dim), [&](Count begin, Count count) {
    std::vector<C> values(static_cast<std::size_t>(e.dim));
    for (Count row = begin; row < begin + count; ++row)
      for (Count h = 0; h < e.heads; ++h) {
        C& sum = lse.data<C>()[e.lse_of(row, h)];
        const SoftmaxShares<C> shares = shares_of(sum, scores[static_cast<std::size_t>(h)]);
        sum = shares.lse;
        const Count first = (row * e.heads + h) * e.dim;
        load_values(isa, out, first, values.data(), e.dim);
        for (C& value : values) value *= shares.old;
        store_values(isa, values.data(), out, first, e.dim);
      }
  });
}

/// -Σ over the head's rows of the sink's weight times what it takes from each.
template <class C>
double sink_gradient(const IsaTable& isa, const SinkExtents& e, C score, const Tensor& out, const Tensor& lse,
                     const Tensor& dout, Count h) {
  std::vector<C> values(static_cast<std::size_t>(e.dim)), gradients(values.size());
  double sum = 0;
  for (Count row = 0; row < e.batch * e.rows; ++row) {
    const Count first = (row * e.heads + h) * e.dim;
    load_values(isa, out, first, values.data(), e.dim);
    load_values(isa, dout, first, gradients.data(), e.dim);
    C product = 0;
    for (std::size_t d = 0; d < values.size(); ++d) product += values[d] * gradients[d];
    sum -= static_cast<double>(std::exp(score - lse.data<C>()[e.lse_of(row, h)]) * product);
  }
  return sum;
}

}  // namespace

void CpuKernels::attention_sinks(const Tensor& sinks, const Tensor& out, const Tensor& lse) {
  const SinkExtents e = check_attention_sinks("attention_sinks", sinks, out, lse);
  with_compute_type(out.dtype(),
                    [&](auto type) { add_sinks<decltype(type)>(device_, isa_, e, sinks, out, lse); });
}

void CpuKernels::attention_sinks_backward(const Tensor& sinks, const Tensor& out, const Tensor& lse,
                                          const Tensor& dout, const Tensor& dsinks, bool accumulate) {
  const SinkExtents e = check_attention_sinks_backward(sinks, out, lse, dout, dsinks);
  with_compute_type(out.dtype(), [&](auto type) {
    using C = decltype(type);
    const std::vector<C> scores = all_values<C>(isa_, sinks);
    for_items(device_, e.heads, row_grain(e.batch * e.rows * e.dim), [&](Count h) {
      const double sum = sink_gradient(isa_, e, scores[static_cast<std::size_t>(h)], out, lse, dout, h);
      if (dsinks.dtype() == DType::f64) {
        double& to = dsinks.data<double>()[h];
        to = (accumulate ? to : 0) + sum;
      } else {
        const auto value = static_cast<float>(sum);
        write_sums(isa_, &value, dsinks, h, 1, accumulate);
      }
    });
  });
}

}  // namespace sherd::tensor::cpu
