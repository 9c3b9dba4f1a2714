#include "autograd/ops.h"

#include <numeric>

#include "autograd/gradients.h"
#include "autograd/key_cache.h"
#include "tensor/argument_checks.h"

namespace sherd::autograd {
namespace {

void check(const char* name, const Shape& qkv, const tensor::Attention& geometry) {
  require(geometry.heads > 0 && geometry.kv_heads > 0 && geometry.heads % geometry.kv_heads == 0, name, ": ",
          geometry.heads, " heads cannot share ", geometry.kv_heads, " key-value heads evenly");
  const std::int64_t parts = geometry.heads + 2 * geometry.kv_heads;
  require(qkv.rank() == 3 && qkv[2] % parts == 0, name, ": packed qkv of shape ", qkv.str(),
          " must be [batch, seq, width] with a width that ", parts, " heads share evenly");
}

struct AttentionResult {
  Tensor out, lse;
};

AttentionResult attend(Tape& tape, const Tensor& qkv, const tensor::Attention& geometry,
                       const Tensor& sinks) {
  const Shape& shape = qkv.shape();
  AttentionResult result{
      tape.empty(shape.with_back(geometry.heads * geometry.head_dim(shape[2])), qkv.dtype()),
      tape.empty({shape[0], geometry.heads, shape[1]}, tensor::compute_type(qkv.dtype()))};
  tape.kernels().attention(qkv, geometry, result.out, result.lse);
  if (sinks) tape.kernels().attention_sinks(sinks, result.out, result.lse);
  return result;
}

/// Each row's position within its document, of the documents of a pass.
Tensor positions_of_documents(Tape& tape) {
  const Documents& bounds = *tape.documents;
  std::vector<std::int64_t> what{2};  // the kind of shared value
  what.insert(what.end(), bounds.begin(), bounds.end());
  return tape.shared_value(what, [&] {
    std::vector<std::int32_t> positions(static_cast<std::size_t>(bounds.back()));
    for (std::size_t d = 0; d + 1 < bounds.size(); ++d)
      std::iota(positions.begin() + bounds[d], positions.begin() + bounds[d + 1], 0);
    return Tensor::of<std::int32_t>(tape.device(), {bounds.back()}, positions);
  });
}

}  // namespace

Var rotary(const Var& qkv, tensor::Attention geometry, const tensor::Rotary& angles) {
  check("rotary", qkv.shape(), geometry);
  Tape& tape = qkv.tape();
  if (tape.documents && !tape.key_cache) geometry.row_positions = positions_of_documents(tape);
  Tensor out = tape.empty(qkv.shape(), qkv.dtype());
  for (const SameStart& part : by_start(tape, qkv.shape()[0], geometry.positions)) {
    tensor::Attention there = geometry;
    there.positions = part.positions;
    tape.kernels().rotary(qkv.value().rows(part.begin, part.end), there, angles, false,
                          out.rows(part.begin, part.end));
  }
  return tape.record(std::move(out), {qkv},
                     [dx = qkv.grad_ref(), geometry, angles](Tape& t, const Tensor& dy) {
                       Tensor grad = reuse_or_empty(t, dy);
                       t.kernels().rotary(dy, geometry, angles, true, grad);
                       t.accumulate(dx, std::move(grad));
                     });
}

Var attention(const Var& qkv, tensor::Attention geometry, const Var& sinks) {
  check("attention", qkv.shape(), geometry);
  Tape& tape = qkv.tape();
  if (!tape.training) geometry.dropout = 0.0f;
  const Tensor scores = sinks.defined() ? sinks.value() : Tensor();
  if (tape.key_cache)
    return tape.record(tape.key_cache->attend(tape, qkv.value(), geometry, scores), {qkv, sinks}, nullptr);
  auto [out, lse] = attend(tape, qkv.value(), geometry, scores);
  if (!tape.recording()) return tape.record(std::move(out), {qkv, sinks}, nullptr);
  // Backward reads the result, which may be dropped and made again like anybody else's input.
  auto own = std::make_shared<Saved>();
  const Saved kept_sinks = sinks.defined() ? Saved(sinks) : Saved();
  auto backward = [own, kept = Saved(qkv), kept_sinks, lse = std::move(lse), dx = qkv.grad_ref(),
                   dsinks = sinks.grad_ref(), geometry](Tape& t, const Tensor& dy) {
    const Tensor input = kept.get(t), result = own->get(t);
    if (dsinks) {
      const Tensor given = kept_sinks.get(t);
      write_kernel_grad(t, dsinks, given.shape(), given.dtype(), [&](const Tensor& to, bool add) {
        t.kernels().attention_sinks_backward(given, result, lse, dy, to, add);
      });
    }
    if (!dx) return;
    Tensor grad = t.empty(input.shape(), input.dtype());
    t.kernels().attention_backward(input, geometry, result, lse, dy, grad);
    t.accumulate(dx, std::move(grad));
  };
  Var result = tape.record(std::move(out), {qkv, sinks}, std::move(backward),
                           [kept = Saved(qkv), kept_sinks, geometry](Tape& t) {
                             const Tensor given = kept_sinks.defined() ? kept_sinks.get(t) : Tensor();
                             return attend(t, kept.get(t), geometry, given).out;
                           });
  *own = Saved(result);
  return result;
}

}  // namespace sherd::autograd
