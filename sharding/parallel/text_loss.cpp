#include "sharding/parallel/text_loss.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "comm/gather.h"
#include "sharding/parallel/vocab_head.h"

namespace sherd::parallel {
namespace {

using TextLossFunction = std::function<double(const nn::TextScores&, nn::TextGradients&)>;

/// The parts of the scores of all rows, [parts, rows].
struct Parts {
  Tensor lse, logit;
};

/// A copy in fp64 that the processor reads.
std::vector<double> on_processor(Tape& tape, const Tensor& x) {
  const Tensor here = tape.on_host(x, DType::f64);
  return {here.data<double>(), here.data<double>() + here.numel()};
}

/// The forward pass over the vocabulary's scores, by chunks of rows.
class TextPass {
 public:
  TextPass(Tape& tape, HeadCall head, const VocabHead& of) : tape_(tape), head_(std::move(head)), of_(of) {
    const Shape shape{head_.layout.tensor_size(), head_.rows()};
    parts_ = {tape.empty(shape, head_.compute()), tape.empty(shape, head_.compute())};
    lse_ = tape.empty({head_.rows()}, head_.compute());
    total_ = tape.empty({2}, DType::f64);
    tape.kernels().fill(total_, 0);
  }

  /// Calls then(logits, begin, end) for chunks of `step` rows of x, once lse() has theirs.
  template <class Then>
  void run(const Tensor& x, std::int64_t step, Then&& then) {
    for (std::int64_t begin = 0; begin < head_.rows(); begin += step) {
      const std::int64_t end = std::min(head_.rows(), begin + step);
      const Tensor logits = make_logits(tape_, head_, x.rows(begin, end), of_);
      find(logits, begin, end);
      then(logits, begin, end);
    }
  }

  const HeadCall& head() const { return head_; }
  /// The log-sum-exps over the whole vocabulary.
  const Tensor& lse() const { return lse_; }

  nn::TextScores scores(const std::vector<TextRows>& rows, std::int64_t texts) const {
    nn::TextScores out;
    out.log_prob.resize(static_cast<std::size_t>(texts)), out.weighted.resize(out.log_prob.size());
    out.targets.resize(out.log_prob.size());
    if (tape_.device().kind() == device::Kind::meta) return out;  // nothing can be read
    const std::int64_t n = head_.rows(), parts = head_.layout.tensor_size();
    const std::vector<double> lse = on_processor(tape_, parts_.lse),
                              logit = on_processor(tape_, parts_.logit);
    const Tensor labels = tensor::to_host(tape_.device(), head_.labels);
    for (const TextRows& run : rows) {
      const auto text = static_cast<std::size_t>(run.text);
      for (std::int64_t i = run.begin; i < run.end; ++i) {
        if (labels.data<std::int32_t>()[i] == no_label) continue;
        const double found = log_probability(lse.data() + i, logit.data() + i, parts, n);
        out.log_prob[text] += found, out.weighted[text] += run.weight * found;
        ++out.targets[text];
      }
    }
    if (alone(head_.layout.context)) return out;
    for (std::vector<double>* sums : {&out.log_prob, &out.weighted})
      comm::reduce_values(*head_.layout.context, tape_.device(), std::span(*sums), "the loss of texts");
    std::vector<double> counts(out.targets.begin(), out.targets.end());
    comm::reduce_values(*head_.layout.context, tape_.device(), std::span(counts), "the targets of texts");
    std::transform(counts.begin(), counts.end(), out.targets.begin(),
                   [](double count) { return static_cast<std::int64_t>(count); });
    return out;
  }

 private:
  void find(const Tensor& logits, std::int64_t begin, std::int64_t end) {
    const int parts = head_.layout.tensor_size(), mine = head_.layout.tensor_rank();
    const Tensor labels = head_.labels.range(begin, end);
    if (parts == 1) {
      const Tensor lse = parts_.lse.reshape({head_.rows()}).range(begin, end),
                   logit = parts_.logit.reshape({head_.rows()}).range(begin, end);
      tape_.kernels().cross_entropy(logits, labels, head_.slice, no_label, lse, logit, {});
      tape_.kernels().copy(lse, lse_.range(begin, end));
      return;
    }
    const Shape shape{parts, end - begin};
    const Tensor lse = tape_.empty(shape, head_.compute()), logit = tape_.empty(shape, head_.compute());
    const Tensor own_lse = lse.rows(mine, mine + 1), own_logit = logit.rows(mine, mine + 1);
    tape_.kernels().cross_entropy(logits, labels, head_.slice, no_label, own_lse, own_logit, {});
    head_.layout.tensor
        ->all_gather({{own_lse, lse}, {own_logit, logit}}, {.label = "the loss: parts of the vocabulary"})
        .wait();
    tape_.kernels().cross_entropy_total(lse, logit, labels, no_label, lse_.range(begin, end), total_, true);
    const std::int64_t n = head_.rows();
    tape_.kernels().copy_rows({lse, 0, end - begin}, {parts_.lse, begin, n}, parts, end - begin);
    tape_.kernels().copy_rows({logit, 0, end - begin}, {parts_.logit, begin, n}, parts, end - begin);
  }

  Tape& tape_;
  HeadCall head_;
  const VocabHead& of_;
  Parts parts_;
  Tensor lse_, total_;
};

/// d loss by the cross-entropy of each run's rows, which is minus the sum of their log-probabilities.
RowFactors factors_of(Tape& tape, const std::vector<TextRows>& rows, const nn::TextGradients& gradients) {
  RowFactors out{{}, tape.empty({1}, DType::f64)};
  tape.kernels().fill(out.divisor, 1);
  for (const TextRows& run : rows) {
    const auto text = static_cast<std::size_t>(run.text);
    out.runs.push_back(
        {run.begin, run.end, -(gradients.log_prob[text] + run.weight * gradients.weighted[text])});
  }
  return out;
}

/// Backward where x's gradient was computed at once, times chunk_factor, and is the only one.
struct ScaledBackward {
  HeadCall head;
  GradRef dx_ref;
  Tensor dx;
  RowFactors factors;

  void operator()(Tape& tape, const Tensor& dy) {
    for (const RowFactor& run : factors.runs) {
      if (run.begin == run.end) continue;
      const Tensor rows = dx.rows(run.begin, run.end);
      tape.kernels().add_scaled(rows, gradient_factor(tape, dy, factors.divisor, run.factor / chunk_factor),
                                rows, false);
    }
    Exchange sum = begin_stream_gradient(tape.kernels(), head, dx);
    dx = {};
    tape.accumulate(dx_ref, sum.wait());
  }
};

/// Backward that makes the logits again, chunk by chunk.
struct ChunkedBackward {
  HeadCall head;
  VocabHead of;
  HeadGradients want;
  Saved x;
  Tensor lse;
  RowFactors factors;

  void operator()(Tape& tape, const Tensor& dy) {
    tensor::Kernels& kernels = tape.kernels();
    const Tensor rows = inner_rows(kernels, head, x.get(tape));
    x = {};
    const auto room = [&](const GradRef& wanted, const Shape& shape, DType dtype) {
      return wanted ? tape.empty(shape, dtype) : Tensor();
    };
    Tensor dx = room(want.x, rows.shape(), head.dtype), dw = room(want.weight, head.w_shape, head.compute()),
           db = room(want.bias, {head.w_shape[0]}, head.compute()),
           drows = room(want.trained.rows, want.trained.shape, head.compute());
    if (drows) kernels.fill(drows, 0);
    const std::int64_t step = head.chunk_rows();
    for (std::int64_t begin = 0; begin < head.rows(); begin += step) {
      const std::int64_t end = std::min(head.rows(), begin + step);
      const Tensor part = rows.rows(begin, end), logits = make_logits(tape, head, part, of);
      differentiate(tape, head, logits, head.labels.range(begin, end), lse.range(begin, end), factors, dy,
                    begin);
      if (db) kernels.sum_rows(logits, db, begin > 0);
      const std::vector<Tensor> columns = take_columns(tape, of.trained.runs, logits);
      if (dx) {
        kernels.matmul({.a = logits, .b = of.weight.value(), .c = dx.rows(begin, end)});
        if (!columns.empty())
          want.trained.add_to(kernels, of.trained.rows.value(), columns, dx.rows(begin, end));
      }
      if (drows) want.trained.write(kernels, columns, part, drows, true);
      if (dw) kernels.matmul({.a = logits, .b = part, .c = dw, .trans_a = true, .accumulate = begin > 0});
    }
    Exchange sum = dx ? begin_stream_gradient(kernels, head, dx) : Exchange();
    dx = {};
    give(tape, want.weight, head.w_shape, dw);
    give(tape, want.bias, {head.w_shape[0]}, db);
    give(tape, want.trained.rows, want.trained.shape, drows);
    if (want.x) tape.accumulate(want.x, sum.wait());
  }

  void give(Tape& tape, const GradRef& ref, const Shape& shape, const Tensor& gradient) const {
    if (!ref) return;
    const Tensor one = tape.empty({1}, DType::f64);
    tape.kernels().fill(one, 1);
    tape.write_grad(ref, shape, head.dtype,
                    [&](const Tensor& to, bool add) { tape.kernels().add_scaled(gradient, one, to, add); });
  }
};

/// The loss as a value of the tape, and its derivatives.
Tensor found_loss(Tape& tape, DType dtype, const TextLossFunction& loss, const nn::TextScores& scores,
                  nn::TextGradients& gradients) {
  gradients.log_prob.assign(scores.log_prob.size(), 0), gradients.weighted.assign(scores.log_prob.size(), 0);
  const Tensor out = tape.empty({1}, dtype);
  tape.kernels().fill(out, loss(scores, gradients));
  return out;
}

}  // namespace

double log_probability(const double* lse, const double* logit, std::int64_t parts, std::int64_t stride) {
  double top = lse[0], sum = 0, own = 0;
  for (std::int64_t p = 0; p < parts; ++p) top = std::max(top, lse[p * stride]), own += logit[p * stride];
  for (std::int64_t p = 0; p < parts; ++p) sum += std::exp(lse[p * stride] - top);
  if (!std::isfinite(top) || !std::isfinite(sum) || !std::isfinite(own))
    fail(ErrorKind::numerics,
         "the model gives a token no finite score: its weights are not finite, or its dtype is too narrow");
  return own - (top + std::log(sum));
}

nn::TextScores vocab_text_scores(const Var& x, const VocabHead& of, const Tensor& labels,
                                 const std::vector<TextRows>& rows, std::int64_t texts,
                                 const Layout& layout) {
  TextPass pass(x.tape(), checked_head(x, of, labels, layout), of);
  const HeadCall& head = pass.head();
  pass.run(inner_rows(x.tape().kernels(), head, x.value()),
           head.keeps_logits() ? head.rows() : head.chunk_rows(),
           [](const Tensor&, std::int64_t, std::int64_t) {});
  return pass.scores(rows, texts);
}

Var vocab_text_loss(const Var& x, const VocabHead& of, const Tensor& labels,
                    const std::vector<TextRows>& rows, std::int64_t texts, const TextLossFunction& loss,
                    const Layout& layout) {
  Tape& tape = x.tape();
  TextPass pass(tape, checked_head(x, of, labels, layout), of);
  const HeadCall& head = pass.head();
  HeadGradients want(x, of);
  const bool keeps = want.recorded && head.keeps_logits();
  const bool at_once = want.recorded && !keeps && want.x && !want.weight && !want.bias && !want.trained.rows;
  Tensor kept, dx = at_once ? tape.empty({head.rows(), head.w_shape[1]}, head.dtype) : Tensor();
  const Tensor one = tape.empty({1}, DType::f64);
  tape.kernels().fill(one, 1);
  pass.run(inner_rows(tape.kernels(), head, x.value()), head.keeps_logits() ? head.rows() : head.chunk_rows(),
           [&](const Tensor& logits, std::int64_t begin, std::int64_t end) {
             if (keeps) kept = logits;
             if (!at_once) return;
             differentiate(tape, head, logits, head.labels.range(begin, end), pass.lse().range(begin, end),
                           {{{0, end - begin, chunk_factor}}, one}, one);
             tape.kernels().matmul({.a = logits, .b = of.weight.value(), .c = dx.rows(begin, end)});
           });
  nn::TextGradients gradients;
  Tensor value = found_loss(tape, head.compute(), loss, pass.scores(rows, texts), gradients);
  autograd::BackwardFn backward;
  if (want.recorded) {
    RowFactors factors = factors_of(tape, rows, gradients);
    if (keeps)
      backward = WholeBackward(head, x, of, std::move(want), kept, pass.lse(), std::move(factors));
    else if (at_once)
      backward = ScaledBackward{head, want.x, dx, std::move(factors)};
    else
      backward = ChunkedBackward{head, of, std::move(want), Saved(x), pass.lse(), std::move(factors)};
  }
  return tape.record(std::move(value), {x, of.weight, of.bias, of.trained.rows}, std::move(backward));
}

Var score_loss(const Var& scores, const TextLossFunction& loss) {
  Tape& tape = scores.tape();
  const std::int64_t texts = scores.shape()[0], columns = scores.shape()[1];
  nn::TextScores found;
  found.targets.resize(static_cast<std::size_t>(texts)), found.log_prob.resize(found.targets.size());
  if (tape.device().kind() != device::Kind::meta) {
    const std::vector<double> all = on_processor(tape, scores.value());
    for (std::int64_t i = 0; i < texts; ++i)
      found.log_prob[static_cast<std::size_t>(i)] = all[static_cast<std::size_t>(i * columns)];
  }
  found.weighted = found.log_prob;
  nn::TextGradients gradients;
  Tensor value = found_loss(tape, tensor::compute_type(scores.dtype()), loss, found, gradients);
  return tape.record(
      std::move(value), {scores},
      [ref = scores.grad_ref(), shape = scores.shape(), dtype = scores.dtype(),
       gradients = std::move(gradients)](Tape& t, const Tensor& dy) {
        std::vector<double> values(static_cast<std::size_t>(shape.numel()), 0.0);
        for (std::size_t i = 0; i < gradients.log_prob.size(); ++i)
          values[i * static_cast<std::size_t>(shape[1])] = gradients.log_prob[i] + gradients.weighted[i];
        const Tensor wide = Tensor::of<double>(t.device(), shape, values), out = t.empty(shape, dtype);
        const Tensor factor = t.empty({1}, DType::f64);
        t.kernels().copy(dy, factor);
        t.kernels().add_scaled(wide, factor, out, false);
        t.accumulate(ref, out);
      });
}

}  // namespace sherd::parallel
