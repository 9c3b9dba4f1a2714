#include "sharding/parallel/attention.h"

#include <algorithm>
#include <memory>
#include <string>

#include "autograd/gradients.h"
#include "base/text/excerpt.h"
#include "sharding/parallel/collectives.h"
#include "sharding/parallel/exchanges.h"
#include "sharding/parallel/ring.h"
#include "tensor/extents.h"

namespace sherd::parallel {

using autograd::Saved;
using autograd::Tape;
using tensor::Shape;

namespace {

// ---- heads over tensor ranks ----

bool shares_heads(const tensor::Attention& whole, int ranks) {
  return whole.heads % ranks == 0 && (whole.kv_heads % ranks == 0 || ranks % whole.kv_heads == 0);
}

/// The query heads of a rank within the packed columns of all heads, and the key and value that they need.
struct RankColumns {
  std::int64_t queries, query_width, keys, key_width;
};

RankColumns columns_of(const tensor::Attention& whole, int ranks, int rank, std::int64_t head_dim) {
  const int group = whole.heads / whole.kv_heads, own = whole.heads / ranks;
  const int first = rank * own, shared = first / group;  // query head, and the key-value head that it needs
  const std::int64_t begin = shared * std::int64_t{group + 2} * head_dim;
  return {begin + first % group * head_dim, own * head_dim, begin + group * head_dim, 2 * head_dim};
}

/// Copies between rows of all heads and rows of one rank's.
void copy_columns(tensor::Kernels& kernels, const RankColumns& at, const Tensor& all, const Tensor& own,
                  bool to_own) {
  const std::int64_t rows = all.shape().rows(), stride = all.shape().back(), own_stride = own.shape().back();
  const auto copy = [&](std::int64_t in_all, std::int64_t in_own, std::int64_t width) {
    const tensor::StridedRows whole{all, in_all, stride}, part{own, in_own, own_stride};
    kernels.copy_rows(to_own ? whole : part, to_own ? part : whole, rows, width);
  };
  copy(at.queries, 0, at.query_width);
  copy(at.keys, at.query_width, at.key_width);
}

// ---- tokens over context ranks ----

Var ring(const Var& qkv, const tensor::Attention& geometry, comm::Communicator& ranks, const Var& sinks) {
  Tape& tape = qkv.tape();
  RingResult result = ring_attention(tape.kernels(), ranks, qkv.value(), geometry,
                                     sinks.defined() ? sinks.value() : Tensor());
  if (!tape.recording()) return tape.record(std::move(result.out), {qkv, sinks}, nullptr);
  auto own = std::make_shared<Saved>();  // the result: backward reads it
  const Saved kept_sinks = sinks.defined() ? Saved(sinks) : Saved();
  auto backward = [own, kept = Saved(qkv), kept_sinks, lse = result.lse, dx = qkv.grad_ref(),
                   dsinks = sinks.grad_ref(), geometry, &ranks](Tape& t, const Tensor& dy) {
    const Tensor input = kept.get(t);
    const RingResult made{own->get(t), lse};
    if (dsinks) {
      const Tensor given = kept_sinks.get(t);
      autograd::write_kernel_grad(t, dsinks, given.shape(), given.dtype(), [&](const Tensor& to, bool add) {
        ring_sinks_backward(t.kernels(), ranks, input, geometry, given, made, dy, to, add);
      });
    }
    if (dx) t.accumulate(dx, ring_attention_backward(t.kernels(), ranks, input, geometry, made, dy));
  };
  Var out = tape.record(std::move(result.out), {qkv, sinks}, std::move(backward),
                        [kept = Saved(qkv), kept_sinks, geometry, &ranks](Tape& t) {
                          return ring_attention(t.kernels(), ranks, kept.get(t), geometry,
                                                kept_sinks.defined() ? kept_sinks.get(t) : Tensor())
                              .out;
                        });
  *own = Saved(out);
  return out;
}

constexpr int tokens = 1, columns = 2;  // dimensions of [batch, tokens, columns]

void check_ulysses(const tensor::Attention& own, int ranks) {
  if (own.kv_heads % ranks != 0)
    fail(ErrorKind::config, "Ulysses: ", ranks, " context ranks cannot share ",
         counted(own.kv_heads, "key-value head"),
         " of a tensor rank evenly: take parallel.context_method \"ring\", which works with "
         "any number, or a parallel.context that divides them");
}

Var ulysses(const Var& qkv, tensor::Attention geometry, comm::Communicator& ranks, const Var& sinks) {
  const int size = ranks.size();
  check_ulysses(geometry, size);
  geometry.heads /= size, geometry.kv_heads /= size;
  const std::int64_t first = std::int64_t{ranks.rank()} * geometry.heads;
  geometry.scores.head += first;
  const Var whole = all_to_all(qkv, columns, tokens, &ranks, "Ulysses: queries, keys and values");
  const Var own_sinks = sinks.defined() ? autograd::slice(sinks, 0, first, first + geometry.heads) : Var();
  const Var out = autograd::attention(whole, geometry, own_sinks);
  const comm::CallOptions there{.label = "Ulysses: attention"}, back{.label = "Ulysses: attention gradient"};
  const auto to_tokens = [&ranks, there](Tape& t, const Tensor& x) {
    return all_to_all(t.kernels(), ranks, x, tokens, columns, there);
  };
  Tape& tape = qkv.tape();
  return tape.record(
      to_tokens(tape, out.value()), {out},
      [dx = out.grad_ref(), &ranks, back](Tape& t, const Tensor& dy) {
        t.accumulate(dx, all_to_all(t.kernels(), ranks, dy, columns, tokens, back));
      },
      [kept = Saved(out), to_tokens](Tape& t) { return to_tokens(t, kept.get(t)); });
}

}  // namespace

tensor::Attention rank_heads(tensor::Attention whole, const Layout& layout) {
  const int ranks = layout.tensor_size();
  require(whole.heads > 0 && whole.kv_heads > 0 && whole.heads % whole.kv_heads == 0,
          counted(whole.heads, "head"), " cannot share ", counted(whole.kv_heads, "key-value head"),
          " evenly");
  if (!shares_heads(whole, ranks)) {
    std::string would_do;
    for (int n = 1; n <= whole.heads; ++n)
      if (shares_heads(whole, n)) would_do += cat(would_do.empty() ? "" : ", ", n);
    fail(ErrorKind::config, ranks, " tensor ranks cannot share ", counted(whole.heads, "head"), " with ",
         counted(whole.kv_heads, "key-value head"), " evenly: parallel.tensor may be ", would_do);
  }
  whole.heads /= ranks;
  whole.kv_heads = std::max(1, whole.kv_heads / ranks);
  if (layout.context_method == ContextMethod::ulysses) check_ulysses(whole, layout.context_size());
  return whole;
}

Var exchange_heads(const Var& qkv, const tensor::Attention& whole, const Layout& layout) {
  const int ranks = layout.tensor_size();
  const tensor::Attention own = rank_heads(whole, layout);
  if (ranks <= whole.kv_heads) return qkv;
  const Var all = all_gather(qkv, columns, layout.tensor, "queries, keys and values of all heads");
  const std::int64_t width = all.shape().back(), parts = whole.heads + 2 * whole.kv_heads;
  require(width % parts == 0, "exchange_heads: ", width, " columns, ", qkv.shape().back(), " of each of ",
          ranks, " tensor ranks, are not those of ", parts, " heads");
  const std::int64_t head_dim = width / parts;
  const RankColumns at = columns_of(whole, ranks, layout.tensor_rank(), head_dim);
  const Shape& shape = all.shape();
  Tape& tape = qkv.tape();
  Tensor out = tape.empty(shape.with_back((own.heads + 2) * head_dim), all.dtype());
  copy_columns(tape.kernels(), at, all.value(), out, true);
  return tape.record(std::move(out), {all}, [dx = all.grad_ref(), at, shape](Tape& t, const Tensor& dy) {
    Tensor grad = t.empty(shape, dy.dtype());
    t.kernels().fill(grad, 0);
    copy_columns(t.kernels(), at, grad, dy, false);
    t.accumulate(dx, std::move(grad));
  });
}

Var attention(const Var& qkv, tensor::Attention geometry, const Layout& layout, const Var& sinks) {
  const tensor::AttentionExtents e = attention_extents("attention", qkv.value(), geometry);
  geometry.scores = {.heads = layout.tensor_size() * e.heads,
                     .seq = layout.context_size() * e.seq,
                     .head = layout.tensor_rank() * e.heads};
  if (qkv.tape().documents) geometry.documents = qkv.tape().documents;
  if (layout.context_size() == 1) return autograd::attention(qkv, geometry, sinks);
  if (geometry.documents)
    fail(ErrorKind::config,
         "context ranks hold parts of sequences, and do not keep documents apart: set data.packing "
         "to \"stream\", or parallel.context to 1");
  if (!qkv.tape().training) geometry.dropout = 0;
  if (layout.context_method == ContextMethod::ring) return ring(qkv, geometry, *layout.context, sinks);
  return ulysses(qkv, geometry, *layout.context, sinks);
}

}  // namespace sherd::parallel
