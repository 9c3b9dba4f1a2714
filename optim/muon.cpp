#include "optim/muon.h"

#include <algorithm>
#include <atomic>
#include <cmath>

#include "optim/cuda/dispatch.h"

namespace sherd::optim {

using device::Category;
using tensor::Tensor;

namespace {

/// fp32 directions before they are rounded: as many as stay in a core's cache; as are made in a GPU's memory.
constexpr std::int64_t muon_piece = 2048, muon_piece_on_gpu = std::int64_t{1} << 20;

/// Elements [begin, end) with `to` in the place of the parameter and `sums` in that of the master.
SpanUpdate part_of(const SpanUpdate& span, std::int64_t begin, std::int64_t end, void* to, DType dtype,
                   float* sums) {
  SpanUpdate out = part_of(span, begin, end - begin);
  void* const mine = static_cast<std::byte*>(to) + begin * static_cast<std::int64_t>(size_of(dtype));
  out.master = dtype == DType::f32 ? static_cast<float*>(mine) : sums;
  out.low = nullptr;
  out.param = dtype == DType::f32 ? nullptr : mine, out.param_dtype = dtype;
  out.moments[1] = nullptr;
  return out;
}

}  // namespace

DType direction_dtype(DType parameters) {
  return parameters == DType::f32 ? DType::f32 : DType::bf16;
}

bool directions(const SpanUpdate& span, const Hyper& hyper, std::int64_t step, void* to, DType dtype,
                Arena& arena) {
  std::atomic<bool> finite = true;
  arena.parallel_for(span.n, 16 * muon_piece, [&](std::int64_t begin, std::int64_t end) {
    alignas(64) float sums[muon_piece] = {};
    for (std::int64_t at = begin; at < end; at += muon_piece)
      if (!update(part_of(span, at, std::min(at + muon_piece, end), to, dtype, sums), hyper, step, arena))
        finite.store(false, std::memory_order_relaxed);
  });
  return finite.load();
}

void directions(const SpanUpdate& span, const Hyper& hyper, std::int64_t step, void* to, DType dtype,
                device::Device& device, FiniteCheck& check) {
  if (!on_gpu(device, span.grad)) {
    if (!directions(span, hyper, step, to, dtype, device.arena())) check.fail();
    return;
  }
  const std::int64_t most = dtype == DType::f32 ? span.n : std::min(span.n, muon_piece_on_gpu);
  Tensor sums;
  if (dtype != DType::f32) sums = Tensor::empty(device, {most}, DType::f32, Category::workspace);
  for (std::int64_t at = 0; at < span.n; at += most) {
    const SpanUpdate part =
        part_of(span, at, std::min(at + most, span.n), to, dtype, sums ? sums.data<float>() : nullptr);
    update(std::span(&part, 1), hyper, step, device, check);
  }
}

void charge_directions(device::Device& device, std::int64_t elements, DType dtype) {
  if (dtype == DType::f32) return;
  Tensor::empty(device, {std::min(elements, muon_piece_on_gpu)}, DType::f32, Category::workspace);
}

namespace {

const config::MuonOptions& muon_of(const Hyper& hyper) {
  return hyper.as<config::MuonOptions>();
}

/// X is kept multiplied by this root of c, which makes the factor of (X·Xᵀ)² one.
double root_of(const Hyper& hyper) {
  const double c = muon_of(hyper).ns_coefficients[2];
  return c > 0 ? std::pow(c, 0.25) : 1;
}

/// The memory of one orthogonalize(): a second X, and squares A and B.
struct Iteration {
  Iteration(const Tensor& x, const Hyper& hyper, tensor::Kernels& kernels)
      : kernels(kernels),
        wide(x.shape()[0] <= x.shape()[1]),
        rows(std::min(x.shape()[0], x.shape()[1])),
        b_over_root(muon_of(hyper).ns_coefficients[1] / std::pow(root_of(hyper), 2)),
        squared(muon_of(hyper).ns_coefficients[2] > 0) {
    const auto room = [&](const tensor::Shape& shape, DType dtype) {
      return Tensor::empty(kernels.device(), shape, dtype, Category::workspace);
    };
    next = room(x.shape(), x.dtype());
    gram = room({rows, rows}, x.dtype());
    sums = room({rows, rows}, DType::f32);
    poly = x.dtype() == DType::f32 ? sums : room({rows, rows}, x.dtype());
    factor = room({1}, DType::f32), diagonal = room({1}, DType::f32);
    kernels.fill(factor, b_over_root);
    kernels.fill(diagonal, muon_of(hyper).ns_coefficients[0]);
  }

  /// X ← (a + b·A + c·A²)·X with A = X·Xᵀ, or X·(…) with A = Xᵀ·X where X is tall. The sum in fp32, rounded
  /// once.
  void operator()(const Tensor& x, const Tensor& to) {
    kernels.matmul({.a = x, .b = x, .c = gram, .trans_a = !wide, .trans_b = wide});
    kernels.add_scaled(gram, factor, sums, false);
    if (squared) kernels.matmul({.a = gram, .b = gram, .c = sums, .accumulate = true});
    kernels.copy_rows({diagonal, 0, 0}, {sums, 0, rows + 1}, rows, 1, true);
    if (poly.raw() != sums.raw()) kernels.copy(sums, poly);
    if (wide)
      kernels.matmul({.a = poly, .b = x, .c = to});
    else
      kernels.matmul({.a = x, .b = poly, .c = to});
  }

  tensor::Kernels& kernels;
  bool wide;
  std::int64_t rows;
  double b_over_root;
  bool squared;
  Tensor next, gram, sums, poly, factor, diagonal;
};

}  // namespace

void orthogonalize(const Tensor& x, const Hyper& hyper, tensor::Kernels& kernels) {
  require(x.shape().rank() == 2, "orthogonalize: a matrix is asked for, not ", x.shape().str());
  if (x.numel() == 0) return;
  tensor::ExactSum squares;
  kernels.sum_of_squares(x, squares);
  kernels.scale(x, root_of(hyper) / std::max(std::sqrt(squares.value()), muon_of(hyper).ns_eps), x);
  Iteration iterate(x, hyper, kernels);
  Tensor from = x, to = iterate.next;
  for (std::int64_t step = 0; step < muon_of(hyper).ns_steps; ++step, std::swap(from, to)) iterate(from, to);
  if (from.raw() != x.raw()) kernels.copy(from, x);
}

double orthogonalize_flops(std::int64_t rows, std::int64_t columns, const Hyper& hyper) {
  const double small = static_cast<double>(std::min(rows, columns)),
               large = static_cast<double>(std::max(rows, columns));
  return static_cast<double>(muon_of(hyper).ns_steps) *
         (4 * small * small * large + 2 * small * small * small);
}

double step_scale(const Hyper& hyper, std::int64_t rows, std::int64_t columns) {
  const double r = static_cast<double>(rows), c = static_cast<double>(columns);
  const auto of_shape = [&] {
    switch (muon_of(hyper).adjust_lr_fn) {
      case config::MuonScale::original:
        return std::sqrt(std::max(1.0, r / c));
      case config::MuonScale::match_rms_adamw:
        return 0.2 * std::sqrt(std::max(r, c));
      case config::MuonScale::spectral_unclamped:
        break;
    }
    return std::sqrt(r / c);
  };
  return of_shape() / root_of(hyper);
}

Hyper step_rule(const Hyper& muon) {
  Hyper out = config::default_rule(config::OptimizerType::sgd);
  out.lr = muon.lr, out.weight_decay = muon.weight_decay;
  return out;
}

Hyper beside_muon(const Hyper& muon) {
  Hyper out = config::default_rule(config::OptimizerType::adamw);
  const config::MuonOptions& own = muon_of(muon);
  out.lr = own.adam_lr.value_or(muon.lr), out.weight_decay = muon.weight_decay;
  static_cast<config::Moments&>(out.as<config::AdamOptions>()) = own;
  return out;
}

}  // namespace sherd::optim
