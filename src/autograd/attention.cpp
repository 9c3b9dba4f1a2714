#include "autograd/attention.h"

#include "autograd/gradients.h"
#include "autograd/key_cache.h"

namespace sherd::autograd {
namespace {

void check(const char* name, const Shape& qkv, const tensor::Attention& geometry) {
  require(geometry.heads > 0 && geometry.kv_heads > 0 && geometry.heads % geometry.kv_heads == 0, name, ": ",
          geometry.heads, " heads cannot share ", geometry.kv_heads, " key-value heads evenly");
  const std::int64_t parts = geometry.heads + 2 * geometry.kv_heads;
  require(qkv.rank() == 3 && qkv[2] % parts == 0, name, ": packed qkv of shape ", qkv.str(),
          " must be [batch, seq, width] with a width that ", parts, " heads share evenly");
}

struct Result {
  Tensor out, lse;
};

/// Attention of one call, over whole sequences or document by document.
struct Call {
  tensor::Attention geometry;
  std::shared_ptr<const Documents> documents;

  Result run(Tape& tape, const Tensor& qkv) const {
    const Shape& shape = qkv.shape();
    const DType compute = qkv.dtype() == DType::f64 ? DType::f64 : DType::f32;
    const Result result{
        tape.empty(shape.with_back(geometry.heads * geometry.head_dim(shape[2])), qkv.dtype()),
        tape.empty({shape[0], geometry.heads, shape[1]}, compute)};
    for_each_part(shape, [&](const tensor::Attention& own, const auto& part) {
      tape.kernels().attention(part.rows(qkv), own, part.rows(result.out), part.numbers(result.lse));
    });
    return result;
  }

  void differentiate(Tape& tape, const Tensor& qkv, const Result& result, const Tensor& dy,
                     const Tensor& grad) const {
    for_each_part(qkv.shape(), [&](const tensor::Attention& own, const auto& part) {
      tape.kernels().attention_backward(part.rows(qkv), own, part.rows(result.out), part.numbers(result.lse),
                                        part.rows(dy), part.rows(grad));
    });
  }

 private:
  /// Rows [begin, end) of all sequences.
  struct Part {
    std::int64_t begin, end, batch;
    int heads;

    Tensor rows(const Tensor& x) const {
      const std::int64_t width = x.shape().back();
      return x.range(begin * width, end * width).reshape({batch, (end - begin) / batch, width});
    }
    Tensor numbers(const Tensor& lse) const {
      return lse.range(begin * heads, end * heads).reshape({batch, heads, (end - begin) / batch});
    }
  };

  template <class Visit>
  void for_each_part(const Shape& shape, Visit&& visit) const {
    const std::int64_t seq = shape[1];
    if (!documents) return visit(geometry, Part{0, shape[0] * seq, shape[0], geometry.heads});
    for (std::size_t i = 0; i + 1 < documents->size(); ++i) {
      const std::int64_t begin = (*documents)[i], end = (*documents)[i + 1];
      if (begin == end) continue;
      // Dropout draws what it would draw for these scores of the whole sequence.
      tensor::Attention own = geometry;
      own.lengths_vary = true;
      if (own.scores.heads == 0) own.scores.heads = own.heads;
      if (own.scores.seq == 0) own.scores.seq = seq;
      own.scores.query += begin % seq, own.scores.key += begin % seq;
      own.key = own.key.at(static_cast<std::uint64_t>(begin / seq));
      visit(own, Part{begin, end, 1, geometry.heads});
    }
  }
};

void check_documents(const Shape& qkv, const Documents& documents) {
  require(documents.size() >= 2 && documents.front() == 0 && documents.back() == qkv[0] * qkv[1],
          "attention: ", documents.size(), " bounds of documents do not go from 0 to ", qkv[0] * qkv[1],
          " rows");
  for (std::size_t i = 0; i + 1 < documents.size(); ++i)
    require(documents[i] <= documents[i + 1] && (documents[i] == documents[i + 1] ||
                                                 documents[i] / qkv[1] == (documents[i + 1] - 1) / qkv[1]),
            "attention: a document of the rows ", documents[i], " to ", documents[i + 1],
            " is not within a sequence of ", qkv[1]);
}

}  // namespace

Var rotary(const Var& qkv, const tensor::Attention& geometry, const tensor::Rotary& angles) {
  check("rotary", qkv.shape(), geometry);
  Tape& tape = qkv.tape();
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

Var attention(const Var& qkv, tensor::Attention geometry, std::shared_ptr<const Documents> documents) {
  check("attention", qkv.shape(), geometry);
  if (documents) check_documents(qkv.shape(), *documents);
  Tape& tape = qkv.tape();
  if (!tape.training) geometry.dropout = 0.0f;
  if (tape.key_cache) return tape.record(tape.key_cache->attend(tape, qkv.value(), geometry), {qkv}, nullptr);
  const Call call{geometry, std::move(documents)};
  auto [out, lse] = call.run(tape, qkv.value());
  if (!tape.recording()) return tape.record(std::move(out), {qkv}, nullptr);
  // Backward reads the result, which may be dropped and made again like anybody else's input.
  auto own = std::make_shared<Saved>();
  auto backward = [own, kept = Saved(qkv), lse = std::move(lse), dx = qkv.grad_ref(), call](
                      Tape& t, const Tensor& dy) {
    const Tensor input = kept.get(t);
    Tensor grad = t.empty(input.shape(), input.dtype());
    call.differentiate(t, input, {own->get(t), lse}, dy, grad);
    t.accumulate(dx, std::move(grad));
  };
  Var result = tape.record(std::move(out), {qkv}, std::move(backward),
                           [kept = Saved(qkv), call](Tape& t) { return call.run(t, kept.get(t)).out; });
  *own = Saved(result);
  return result;
}

}  // namespace sherd::autograd
