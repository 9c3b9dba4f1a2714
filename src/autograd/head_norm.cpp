#include <array>

#include "autograd/gradients.h"
#include "autograd/ops.h"
#include "tensor/argument_checks.h"

namespace sherd::autograd {
namespace {

/// Where the heads of one kind lie in packed rows: for each key-value head, `count` heads from column `first`
/// of its group on.
struct HeadColumns {
  std::int64_t groups, stride;  ///< groups of a row; elements from one to the next
  std::int64_t first, count, dim;

  std::int64_t width() const { return count * dim; }
};

enum HeadKind : std::uint8_t { queries, keys, values };

HeadColumns columns_of(const tensor::Attention& geometry, std::int64_t width, HeadKind kind) {
  const std::int64_t dim = geometry.head_dim(width), each = geometry.heads / geometry.kv_heads;
  const std::int64_t first = kind == queries ? 0 : each + (kind == values ? 1 : 0);
  return {geometry.kv_heads, (each + 2) * dim, first * dim, kind == queries ? each : 1, dim};
}

void copy_heads(Tape& tape, const HeadColumns& at, const Tensor& packed, const Tensor& heads, bool out_of) {
  const tensor::StridedRows in_packed{packed, at.first, at.stride}, apart{heads, 0, at.width()};
  tape.kernels().copy_rows(out_of ? in_packed : apart, out_of ? apart : in_packed,
                           packed.shape().rows() * at.groups, at.width());
}

/// The heads of a kind in rows of `width`: one for each head of a token, or one for all of a token's.
Tensor take_heads(Tape& tape, const HeadColumns& at, const Tensor& packed, std::int64_t width) {
  const std::int64_t elements = packed.shape().rows() * at.groups * at.width();
  Tensor heads = tape.empty({elements / width, width}, packed.dtype());
  copy_heads(tape, at, packed, heads, true);
  return heads;
}

void copy_values(Tape& tape, const tensor::Attention& geometry, const Tensor& from, const Tensor& to) {
  const HeadColumns at = columns_of(geometry, from.shape().back(), values);
  tape.kernels().copy_rows({from, at.first, at.stride}, {to, at.first, at.stride},
                           from.shape().rows() * at.groups, at.width());
}

struct Normed {
  Tensor out;
  std::array<Tensor, 2> rstd;
};

Normed run(Tape& tape, const Tensor& qkv, const std::array<Tensor, 2>& gains,
           const tensor::Attention& geometry, double eps, double shift) {
  Normed result{tape.empty(qkv.shape(), qkv.dtype()), {}};
  const DType compute = tensor::compute_type(qkv.dtype());
  for (const HeadKind kind : {queries, keys}) {
    const HeadColumns at = columns_of(geometry, qkv.shape().back(), kind);
    const Tensor heads = take_heads(tape, at, qkv, gains[kind].numel());
    result.rstd[kind] = tape.empty({heads.shape().rows()}, compute);
    const Tensor normed = tape.empty(heads.shape(), heads.dtype());
    tape.kernels().rms_norm(heads, gains[kind], eps, normed, result.rstd[kind], shift);
    copy_heads(tape, at, result.out, normed, false);
  }
  copy_values(tape, geometry, qkv, result.out);
  return result;
}

struct Backward {
  Saved qkv;
  std::array<Saved, 2> gains;
  std::array<Tensor, 2> rstd;
  GradRef dqkv;
  std::array<GradRef, 2> dgains;
  tensor::Attention geometry;
  double shift;

  void operator()(Tape& tape, const Tensor& dy) const {
    const Tensor input = qkv.get(tape);
    Tensor grad = tape.empty(input.shape(), input.dtype());
    for (const HeadKind kind : {queries, keys}) {
      const HeadColumns at = columns_of(geometry, input.shape().back(), kind);
      const Tensor gain = gains[kind].get(tape), x = take_heads(tape, at, input, gain.numel()),
                   dheads = take_heads(tape, at, dy, gain.numel());
      const Tensor dx = tape.empty(x.shape(), x.dtype());
      const auto differentiate = [&](const Tensor& dgain, bool add) {
        tape.kernels().rms_norm_backward(x, gain, rstd[kind], dheads, dx, dgain, add, false, shift);
      };
      if (dgains[kind])
        write_kernel_grad(tape, dgains[kind], gain.shape(), gain.dtype(), differentiate);
      else
        differentiate(Tensor(), false);
      copy_heads(tape, at, grad, dx, false);
    }
    copy_values(tape, geometry, dy, grad);
    tape.accumulate(dqkv, std::move(grad));
  }
};

}  // namespace

Var head_norm(const Var& qkv, const Var& query_gain, const Var& key_gain, const tensor::Attention& geometry,
              double eps, double shift) {
  const Shape& shape = qkv.shape();
  const std::int64_t parts = geometry.heads + 2 * geometry.kv_heads;
  require(shape.rank() >= 1 && shape.back() % parts == 0, "head_norm: packed qkv of shape ", shape.str(),
          " is not that of ", parts, " heads");
  const std::int64_t dim = shape.back() / parts;
  for (const auto& [gain, heads] : {std::pair(&query_gain, geometry.heads), {&key_gain, geometry.kv_heads}})
    require(gain->shape() == Shape{dim} || gain->shape() == Shape{heads * dim}, "head_norm: a gain of shape ",
            gain->shape().str(), " for ", heads, " heads of ", dim, " elements");
  Tape& tape = qkv.tape();
  Normed made = run(tape, qkv.value(), {query_gain.value(), key_gain.value()}, geometry, eps, shift);
  Backward backward{qkv,
                    {query_gain, key_gain},
                    made.rstd,
                    qkv.grad_ref(),
                    {query_gain.grad_ref(), key_gain.grad_ref()},
                    geometry,
                    shift};
  auto remake = [kept = Saved(qkv), gains = std::array{Saved(query_gain), Saved(key_gain)}, geometry, eps,
                 shift](Tape& t) {
    return run(t, kept.get(t), {gains[0].get(t), gains[1].get(t)}, geometry, eps, shift).out;
  };
  return tape.record(std::move(made.out), {qkv, query_gain, key_gain}, std::move(backward),
                     std::move(remake));
}

}  // namespace sherd::autograd
