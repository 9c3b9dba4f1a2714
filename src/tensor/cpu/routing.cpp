#include <cstring>

#include "tensor/cpu/loops.h"
#include "tensor/routing_row.h"

namespace sherd::tensor::cpu {
namespace {

/// out[at, at + n) = Σ_j weights[j]·rows[places[j]·width + at …), n at most stack_block.
void combine_piece(const IsaTable& isa, const Tensor& rows, const std::int32_t* places, const float* weights,
                   Count count, Count width, Count at_column, Count n, const Tensor& out, Count to) {
  const ConvertOps& ops = isa.convert[storage_index(rows)];
  float sums[stack_block] = {};
  for (Count j = 0; j < count; ++j)
    if (places[j] >= 0) ops.blend(at(rows, places[j] * width + at_column), weights[j], sums, 1.0f, n);
  ops.store(sums, at(out, to), n);
}

/// Σ x·y over lanes in a fixed order.
double dot(const float* x, const float* y, Count n) {
  constexpr Count lanes = 16;
  float sums[lanes] = {};
  Count i = 0;
  for (; i + lanes <= n; i += lanes)
    for (Count k = 0; k < lanes; ++k) sums[k] += x[i + k] * y[i + k];
  double total = 0;
  for (; i < n; ++i) total += static_cast<double>(x[i]) * y[i];
  for (const float sum : sums) total += sum;
  return total;
}

/// The gradients of one choice of a token.
struct ChoiceGradient {
  const IsaTable& isa;
  Tensor rows, dout, drows;  ///< `rows` and `drows` are undefined where no gradient asks for them
  Count width;

  float of(Count token, Count place, float weight) const {
    const ConvertOps& ops = isa.convert[storage_index(dout)];
    double product = 0;
    for (Count i = 0; i < width; i += stack_block) {
      const Count n = std::min(stack_block, width - i);
      float dy[stack_block], x[stack_block];
      ops.load(at(dout, token * width + i), dy, n);
      if (rows) {
        ops.load(at(rows, place * width + i), x, n);
        product += dot(dy, x, n);
      }
      if (!drows) continue;
      isa.elementwise[storage_f32].scale(dy, weight, x, n);
      ops.store(x, at(drows, place * width + i), n);
    }
    return static_cast<float>(product);
  }
};

}  // namespace

void CpuKernels::route(const Tensor& logits, const Tensor& bias, const Routing& routing, const Tensor& scores,
                       const Tensor& chosen, const Tensor& weights) {
  const RoutingExtents e = check_routing("route", routing, logits, chosen, weights, scores);
  if (bias) require_vector("route", "the bias", bias, e.experts, logits.dtype());
  with_compute_type(logits.dtype(), [&](auto type) {
    using C = decltype(type);
    for_items(device_, e.tokens, row_grain(8 * e.experts), [&](Count t) {
      route_row<C>({logits.data<C>() + t * e.experts, data_or_null<C>(bias), static_cast<int>(e.experts),
                    scores.data<C>() + t * e.experts, chosen.data<std::int32_t>() + t * routing.top_k,
                    weights.data<C>() + t * routing.top_k},
                   routing);
    });
  });
}

void CpuKernels::route_backward(const Tensor& logits, const Routing& routing, const Tensor& scores,
                                const Tensor& chosen, const Tensor& dweights,
                                const RouterLossGradients& losses, const Tensor& dlogits) {
  const RoutingExtents e = check_route_backward(logits, routing, scores, chosen, dweights, losses, dlogits);
  with_compute_type(logits.dtype(), [&](auto type) {
    using C = decltype(type);
    for_items(device_, e.tokens, row_grain(8 * e.experts), [&](Count t) {
      route_row_backward<C>(
          {logits.data<C>() + t * e.experts, scores.data<C>() + t * e.experts,
           chosen.data<std::int32_t>() + t * routing.top_k,
           dweights ? dweights.data<C>() + t * routing.top_k : nullptr, data_or_null<C>(losses.balance),
           static_cast<C>(losses.z), static_cast<int>(e.experts), dlogits.data<C>() + t * e.experts},
          routing);
    });
  });
}

void CpuKernels::combine_rows(const Tensor& rows, const Tensor& places, const Tensor& weights,
                              const Tensor& out) {
  const Count width = check_combine("combine_rows", rows, places, weights, out);
  const Count tokens = places.shape()[0], k = places.shape()[1];
  const std::int32_t* place = places.data<std::int32_t>();
  for_items(device_, tokens, row_grain(width * k), [&](Count t) {
    if (rows.dtype() == DType::f64) {
      double* to = out.data<double>() + t * width;
      std::fill(to, to + width, 0.0);
      for (Count j = 0; j < k; ++j)
        for (Count i = 0; place[t * k + j] >= 0 && i < width; ++i)
          to[i] += weights.data<double>()[t * k + j] * rows.data<double>()[place[t * k + j] * width + i];
      return;
    }
    for (Count i = 0; i < width; i += stack_block)
      combine_piece(isa_, rows, place + t * k, weights.data<float>() + t * k, k, width, i,
                    std::min(stack_block, width - i), out, t * width + i);
  });
}

void CpuKernels::combine_rows_backward(const Tensor& rows, const Tensor& places, const Tensor& weights,
                                       const Tensor& dout, const Tensor& drows, const Tensor& dweights) {
  const Count width = check_combine_backward(rows, places, weights, dout, drows, dweights);
  const Count tokens = places.shape()[0], k = places.shape()[1];
  const std::int32_t* place = places.data<std::int32_t>();
  const ChoiceGradient gradient{isa_, dweights ? rows : Tensor(), dout, drows, width};
  for_items(device_, tokens * k, row_grain(width), [&](Count c) {
    const Count at = place[c], t = c / k;
    if (rows.dtype() == DType::f64) {
      const double* dy = dout.data<double>() + t * width;
      double sum = 0;
      for (Count i = 0; at >= 0 && i < width; ++i) {
        sum += dy[i] * rows.data<double>()[at * width + i];
        if (drows) drows.data<double>()[at * width + i] = weights.data<double>()[c] * dy[i];
      }
      if (dweights) dweights.data<double>()[c] = sum;
      return;
    }
    const float product = at < 0 ? 0 : gradient.of(t, at, weights.data<float>()[c]);
    if (dweights) dweights.data<float>()[c] = product;
  });
}

}  // namespace sherd::tensor::cpu
