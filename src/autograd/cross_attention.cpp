#include "autograd/ops.h"

#include <cmath>

#include "tensor/argument_checks.h"

namespace sherd::autograd {
namespace {

struct Extents {
  std::int64_t batch, queries, keys, heads, kv_heads, dim, width;
  DType dtype;
  std::int64_t group() const { return heads / kv_heads; }
};

Extents check(const Var& q, const Var& k, const Var& v, const AttentionMask& mask) {
  const Shape &a = q.shape(), &b = k.shape(), &c = v.shape();
  require(a.rank() == 4 && b.rank() == 4 && c.rank() == 4 && a[0] == b[0] && b[0] == c[0] && b[1] == c[1] &&
              b[2] == c[2] && a[3] == b[3],
          "attention: q ", a.str(), ", k ", b.str(), " and v ", c.str(),
          " must be [batch, q_len, heads, head_dim], [batch, k_len, kv_heads, head_dim] and [batch, k_len, "
          "kv_heads, width]");
  require(b[2] > 0 && a[2] > 0 && a[2] % b[2] == 0, "attention: ", a[2], " heads cannot share ", b[2],
          " key-value heads evenly");
  require(q.dtype() == k.dtype() && k.dtype() == v.dtype(), "attention: q is ", name_of(q.dtype()), ", k ",
          name_of(k.dtype()), " and v ", name_of(v.dtype()), "; cast() them to one dtype");
  require(!mask.seen.defined() || (mask.seen.dtype() == DType::u8 && mask.seen.shape() == Shape{b[0], b[1]}),
          "attention: the mask must be uint8 [", b[0], ", ", b[1], "], a number per key");
  require(
      !mask.distances.defined() || (a[2] == b[2] && mask.distances.shape() == Shape{a[2], a[1] + b[1] - 1} &&
                                    mask.distances.dtype() == tensor::compute_type(q.dtype())),
      "attention: distances must be ", name_of(tensor::compute_type(q.dtype())), " [", a[2], ", ",
      a[1] + b[1] - 1, "], a number per head and distance, with a key head for each");
  require(mask.dropout >= 0 && mask.dropout < 1, "attention: a dropout of ", mask.dropout);
  return {a[0], a[1], b[1], a[2], b[2], a[3], c[3], q.dtype()};
}

/// [batch, rows, heads, width] as [batch, heads, rows, width], and back.
Tensor by_heads(Tape& tape, const Tensor& x) {
  const Shape& s = x.shape();
  Tensor out = tape.empty({s[0], s[2], s[1], s[3]}, x.dtype());
  tape.kernels().copy_strided(x, {s[1] * s[2] * s[3], s[3], s[2] * s[3], 1}, out);
  return out;
}

/// Scores of one key head at a time.
class KeyHeadScores {
 public:
  KeyHeadScores(const Extents& e, const AttentionMask& mask, bool training)
      : e_(e),
        seen_(mask.seen),
        distances_(mask.distances.defined() ? Saved(mask.distances) : Saved()),
        dropout_(training ? mask.dropout : 0),
        random_(mask.key),
        first_head_(mask.first_head),
        all_heads_(mask.all_heads > 0 ? mask.all_heads : e.heads) {
    args_.scale =
        mask.scale != 0 ? static_cast<double>(mask.scale) : 1 / std::sqrt(static_cast<double>(e.dim));
    args_.causal_rows = mask.causal ? e.queries : 0;
  }

  Tensor run(Tape& tape, const Tensor& q, const Tensor& k, const Tensor& v) const {
    const Tensor queries = by_heads(tape, q), keys = by_heads(tape, k), values = by_heads(tape, v);
    const Tensor out = tape.empty({e_.batch, e_.heads, e_.queries, e_.width}, q.dtype());
    const ScoreBuffers buffers(tape, e_, q.dtype());
    for (std::int64_t head = 0; head < e_.batch * e_.kv_heads; ++head) {
      probabilities(tape, head, queries, keys, buffers);
      if (dropout_ > 0) tape.kernels().dropout(buffers.chances, {}, dropout_, drops(head), buffers.chances);
      tape.kernels().matmul(
          {.a = buffers.chances, .b = of_head(values, head, e_.keys), .c = of_head(out, head, rows())});
    }
    return by_heads(tape, out);
  }

  /// Gradients of q, k, v and distances.
  std::array<Tensor, 4> differentiate(Tape& tape, const Tensor& q, const Tensor& k, const Tensor& v,
                                      const Tensor& dout) const {
    const Tensor queries = by_heads(tape, q), keys = by_heads(tape, k), values = by_heads(tape, v),
                 slopes = by_heads(tape, dout);
    const auto alike = [&](const Tensor& x) { return tape.empty(x.shape(), x.dtype()); };
    const Tensor dq = alike(queries), dk = alike(keys), dv = alike(values);
    const ScoreBuffers buffers(tape, e_, q.dtype());
    const Tensor &chances = buffers.chances,
                 scores = buffers.apart ? buffers.scores : tape.empty(chances.shape(), chances.dtype()),
                 kept = dropout_ > 0 ? tape.empty(chances.shape(), chances.dtype()) : chances;
    DistanceSums distances(tape, e_, distances_.defined());
    tensor::Kernels& kernels = tape.kernels();
    for (std::int64_t head = 0; head < e_.batch * e_.kv_heads; ++head) {
      const Tensor slope = of_head(slopes, head, rows()), query = of_head(queries, head, rows()),
                   key = of_head(keys, head, e_.keys), value = of_head(values, head, e_.keys);
      const tensor::Softmax args = probabilities(tape, head, queries, keys, buffers);
      if (dropout_ > 0) kernels.dropout(chances, {}, dropout_, drops(head), kept);
      kernels.matmul({.a = kept, .b = slope, .c = of_head(dv, head, e_.keys), .trans_a = true});
      kernels.matmul({.a = slope, .b = value, .c = scores, .trans_b = true});
      if (dropout_ > 0) kernels.dropout_backward(scores, dropout_, drops(head), scores);
      kernels.softmax_backward(chances, scores, args, chances);
      distances.add(tape, head % e_.heads, chances, args.scale);
      kernels.matmul({.a = chances, .b = key, .c = of_head(dq, head, rows())});
      kernels.matmul({.a = chances, .b = query, .c = of_head(dk, head, e_.keys), .trans_a = true});
    }
    return {by_heads(tape, dq), by_heads(tape, dk), by_heads(tape, dv), distances.sums};
  }

 private:
  /// Scores in the compute type, and their softmax in the inputs' dtype, which may be the same memory.
  struct ScoreBuffers {
    bool apart;
    Tensor scores, chances;
    ScoreBuffers(Tape& tape, const Extents& e, DType dtype) : apart(size_of(dtype) == 2) {
      const Shape shape{e.group() * e.queries, e.keys};
      scores = tape.empty(shape, apart ? DType::f32 : dtype);
      chances = apart ? tape.empty(shape, dtype) : scores;
    }
  };

  /// Sums of scores' gradients by distance, of all sequences.
  struct DistanceSums {
    std::int64_t rows, columns, all;
    Tensor sums, skewed;
    DistanceSums(Tape& tape, const Extents& e, bool wanted)
        : rows(e.queries), columns(e.keys), all(rows + columns - 1) {
      if (!wanted) return;
      sums = tape.empty({e.heads, all}, tensor::compute_type(e.dtype));
      skewed = tape.empty({rows, all}, sums.dtype());
      tape.kernels().fill(sums, 0), tape.kernels().fill(skewed, 0);
    }
    /// Each row moves a place to the left of the one before, so that distances lie in columns.
    void add(Tape& tape, std::int64_t head, const Tensor& slopes, double scale) const {
      if (!sums) return;
      tape.kernels().copy_rows({slopes, 0, columns}, {skewed, rows - 1, all - 1}, rows, columns);
      tape.kernels().sum_axis(skewed, {1, rows, all}, 1 / scale, sums.range(head * all, (head + 1) * all),
                              true);
    }
  };

  std::int64_t rows() const { return e_.group() * e_.queries; }
  /// The random numbers that dropout draws for the scores of a key head, numbered among those of all heads.
  tensor::RandomElements drops(std::int64_t head) const {
    const std::int64_t batch = head / e_.kv_heads, first = head % e_.kv_heads * e_.group() + first_head_;
    return {random_, static_cast<std::uint64_t>((batch * all_heads_ + first) * e_.queries * e_.keys)};
  }
  /// A key head's part of [batch, heads, rows, width], as a matrix.
  static Tensor of_head(const Tensor& x, std::int64_t head, std::int64_t rows) {
    const std::int64_t width = x.shape().back();
    return x.range(head * rows * width, (head + 1) * rows * width).reshape({rows, width});
  }

  tensor::Softmax probabilities(Tape& tape, std::int64_t head, const Tensor& queries, const Tensor& keys,
                                const ScoreBuffers& buffers) const {
    tape.kernels().matmul({.a = of_head(queries, head, rows()),
                           .b = of_head(keys, head, e_.keys),
                           .c = buffers.scores,
                           .trans_b = true});
    tensor::Softmax args = args_;
    const std::int64_t row = head / e_.kv_heads;
    if (seen_.defined()) args.seen = seen_.range(row * e_.keys, (row + 1) * e_.keys);
    if (distances_.defined()) {
      const std::int64_t all = e_.queries + e_.keys - 1, own = head % e_.heads;
      args.distances = distances_.get(tape).range(own * all, (own + 1) * all);
    }
    tape.kernels().softmax(buffers.scores, args, buffers.chances);
    return args;
  }

  Extents e_;
  tensor::Softmax args_;
  Tensor seen_;
  Saved distances_;
  float dropout_;
  RandomKey random_;
  std::int64_t first_head_, all_heads_;
};

/// By the kernels of packed projections.
Var packed(const Var& q, const Var& k, const Var& v, const AttentionMask& mask, const Extents& e) {
  const Shape of_queries{e.batch, e.queries, e.kv_heads, e.group() * e.dim},
      of_keys{e.batch, e.keys, e.kv_heads, e.dim};
  const Var qkv = concat({reshape(q, of_queries), reshape(k, of_keys), reshape(v, of_keys)}, 3);
  tensor::Attention geometry;
  geometry.heads = static_cast<int>(e.heads), geometry.kv_heads = static_cast<int>(e.kv_heads);
  geometry.causal = mask.causal, geometry.scale = mask.scale;
  const Var out = attention(reshape(qkv, {e.batch, e.queries, (e.heads + 2 * e.kv_heads) * e.dim}), geometry);
  return reshape(out, q.shape());
}

}  // namespace

Tensor seen_by_length(Tape& tape, const Tensor& lengths, std::int64_t keys) {
  require(lengths.dtype() == DType::i32, "seen_by_length: lengths must be int32, not ",
          name_of(lengths.dtype()));
  const std::int64_t batch = lengths.numel();
  std::vector<std::uint8_t> seen(static_cast<std::size_t>(batch * keys));
  if (tape.device().kind() != device::Kind::meta) {
    const Tensor here = tensor::to_host(tape.device(), lengths);
    for (std::int64_t b = 0; b < batch; ++b) {
      const std::int32_t length = here.data<std::int32_t>()[b];
      if (length < 0 || length > keys)
        fail(ErrorKind::data, "seen_by_length: length ", length, " of row ", b, " is not one of up to ", keys,
             " keys");
      std::fill_n(seen.begin() + b * keys, length, std::uint8_t{1});
    }
  }
  return Tensor::of<std::uint8_t>(tape.device(), {batch, keys}, seen);
}

Var attention(const Var& q, const Var& k, const Var& v, const AttentionMask& mask) {
  Tape& tape = q.tape();
  const Extents e = check(q, k, v, mask);
  if (e.queries == e.keys && e.dim == e.width && !mask.seen.defined() && !mask.distances.defined() &&
      mask.dropout == 0 && !tape.key_cache && e.keys > 0)
    return packed(q, k, v, mask, e);
  const KeyHeadScores scores(e, mask, tape.training);
  auto backward = [scores, kept = std::array{Saved(q), Saved(k), Saved(v)},
                   refs = std::array{q.grad_ref(), k.grad_ref(), v.grad_ref(), mask.distances.grad_ref()}](
                      Tape& t, const Tensor& dy) {
    auto grads = scores.differentiate(t, kept[0].get(t), kept[1].get(t), kept[2].get(t), dy);
    for (std::size_t i = 0; i < grads.size(); ++i)
      if (refs[i]) t.accumulate(refs[i], std::move(grads[i]));
  };
  auto remake = [scores, kept = std::array{Saved(q), Saved(k), Saved(v)}](Tape& t) {
    return scores.run(t, kept[0].get(t), kept[1].get(t), kept[2].get(t));
  };
  return tape.record(scores.run(tape, q.value(), k.value(), v.value()),
                     mask.distances.defined() ? std::vector{q, k, v, mask.distances} : std::vector{q, k, v},
                     std::move(backward), std::move(remake));
}

}  // namespace sherd::autograd
