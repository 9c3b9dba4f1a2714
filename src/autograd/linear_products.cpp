#include "autograd/linear_products.h"

#include "autograd/key_cache.h"

namespace sherd::autograd {
namespace {

/// x in two extents.
Tensor as_rows(const Tensor& x) {
  return x.reshape({x.shape().rows(), x.shape().back()});
}

}  // namespace

LinearProducts::LinearProducts(const Var& w) : weight_(w.parameter()) {
  if (weight_ && !w.tape().key_cache) fp8_ = weight_->fp8;
}

tensor::Fp8Matrix LinearProducts::quantized(Tape& tape, const Tensor& x, bool turned,
                                            tensor::Fp8Rule rule) const {
  const std::int64_t rows = x.shape().rows(), cols = x.shape().back();
  tensor::Fp8Matrix out =
      turned ? empty_fp8(tape.device(), rule, cols, rows) : empty_fp8(tape.device(), rule, rows, cols);
  tape.kernels().to_fp8(x, turned, out, fp8_->lost);
  fp8_->elements += x.numel();
  return out;
}

tensor::Matmul LinearProducts::of_rows(Tape& tape, const Tensor& x, const Tensor& w,
                                       tensor::Fp8Matrix& weight) const {
  if (!fp8_) return {.a = x, .b = w, .trans_b = true};
  if (!weight) weight = quantized(tape, w, false, fp8_->recipe.weight);
  tensor::Matmul made{.fp8_a = quantized(tape, x, false, fp8_->recipe.input), .fp8_b = weight};
  compare(tape, LinearProduct::output, made, {.a = x, .b = w, .trans_b = true});
  return made;
}

tensor::Matmul LinearProducts::of_gradient(Tape& tape, const Tensor& dy, const Tensor& w,
                                           tensor::Fp8Matrix& weight) const {
  if (!fp8_) return {.a = dy, .b = w};
  if (!weight) weight = quantized(tape, w, true, fp8_->recipe.weight);
  tensor::Matmul made{.fp8_a = quantized(tape, dy, false, fp8_->recipe.gradient), .fp8_b = weight};
  compare(tape, LinearProduct::input_gradient, made, {.a = dy, .b = w});
  return made;
}

tensor::Matmul LinearProducts::of_both(Tape& tape, const Tensor& dy, const Tensor& x,
                                       tensor::Fp8Matrix turned) const {
  if (!fp8_) return {.a = dy, .b = x, .trans_a = true};
  if (!turned) turned = quantized(tape, x, true, fp8_->recipe.input);
  tensor::Matmul made{.fp8_a = quantized(tape, dy, true, fp8_->recipe.gradient), .fp8_b = std::move(turned)};
  if (x) compare(tape, LinearProduct::weight_gradient, made, {.a = dy, .b = x, .trans_a = true});
  return made;
}

void LinearProducts::compare(Tape& tape, LinearProduct kind, const tensor::Matmul& fp8,
                             const tensor::Matmul& plain) const {
  if (fp8_->compare) fp8_->compare(tape, *weight_, kind, fp8, plain);
}

/// The rows whose operands may share scales: all, but for one scale a tensor with several sources.
std::vector<SourceRows> LinearProducts::runs(std::int64_t rows, std::span<const std::int64_t> sources) const {
  const bool apart = fp8_ && fp8_->recipe.input.scaling == tensor::Fp8Scaling::tensor && sources.size() > 1;
  if (!apart) return {{0, rows}};
  std::vector<SourceRows> out;
  std::int64_t begin = 0;
  for (const std::int64_t count : sources) {
    if (count > 0) out.push_back({begin, begin + count});
    begin += count;
  }
  return out;
}

LinearProducts::Input LinearProducts::save(const Var& x) const {
  Input out;
  // A report wants the values themselves.
  const bool kept = !fp8_ || fp8_->compare || x.kept_by_others();
  if (kept)
    out.saved_ = Saved(x);
  else
    out.turned_ = quantized(x.tape(), x.value(), true, fp8_->recipe.input);
  return out;
}

LinearOutput LinearProducts::output(Tape& tape, const Tensor& x, const Var& w, const Tensor& b,
                                    Activation activation, bool recorded,
                                    std::span<const std::int64_t> sources) const {
  if (tape.watch_linear && weight_) tape.watch_linear(*weight_, x);
  LinearOutput made;
  made.out = tape.empty(x.shape().with_back(w.shape()[0]), x.dtype());
  if (recorded && activation != Activation::none) made.pre = tape.empty(made.out.shape(), x.dtype());
  const std::vector<SourceRows> all = runs(x.shape().rows(), sources);
  const bool few_rows = tape.key_cache && tape.key_cache->one_row_each();
  const StoredValue* blocks = few_rows && tape.kernels().multiplies_stored() ? w.stored() : nullptr;
  tensor::Fp8Matrix weight;
  for (const SourceRows& rows : all) {
    const auto part = [&](const Tensor& of) {
      return all.size() == 1 || !of ? of : as_rows(of).rows(rows.begin, rows.end);
    };
    tensor::Matmul product =
        blocks ? tensor::Matmul{.a = part(x),
                                .trans_b = true,
                                .stored_b = {blocks->blocks, weight_->stored_as, w.shape()[0], w.shape()[1]}}
               : of_rows(tape, part(x), w.value(), weight);
    product.c = part(made.out), product.pre_activation = part(made.pre);
    product.bias = b, product.activation = activation;
    product.few_rows = few_rows;
    tape.kernels().matmul(product);
  }
  return made;
}

Tensor LinearProducts::input_gradient(Tape& tape, const Tensor& dy, const Tensor& w) const {
  Tensor out = tape.empty(dy.shape().with_back(w.shape()[1]), dy.dtype());
  tensor::Fp8Matrix weight;
  tensor::Matmul product = of_gradient(tape, dy, w, weight);
  product.c = out;
  tape.kernels().matmul(product);
  return out;
}

void LinearProducts::input_gradient(Tape& tape, const GradRef& dx, const Shape& x, Tensor dy, const Tensor& w,
                                    std::span<const std::int64_t> sources) const {
  if (!dx) return;
  const std::vector<SourceRows> all = runs(dy.shape().rows(), sources);
  tensor::Fp8Matrix weight;
  if (all.size() == 1) {
    const DType dtype = dy.dtype();
    tensor::Matmul product = of_gradient(tape, dy, w, weight);
    dy = {};
    return write_product(tape, dx, x, dtype, std::move(product));
  }
  Tensor out = tape.empty(x, dy.dtype());
  for (const SourceRows& rows : all) {
    tensor::Matmul product = of_gradient(tape, as_rows(dy).rows(rows.begin, rows.end), w, weight);
    product.c = as_rows(out).rows(rows.begin, rows.end);
    tape.kernels().matmul(product);
  }
  tape.accumulate(dx, std::move(out));
}

void LinearProducts::weight_gradient(Tape& tape, const GradRef& dw, const Shape& w, const Tensor& dy,
                                     const Input& x) const {
  if (!dw) return;
  const Tensor input = x.saved_.defined() ? x.get(tape) : Tensor();
  const auto compute = [dw, w, dtype = dy.dtype(), product = of_both(tape, dy, input, x.turned_)](Tape& t) {
    write_product(t, dw, w, dtype, product);
  };
  if (x.is_parameter() && !fp8_)
    compute(tape);
  else
    tape.weight_gradient(dw, compute);
}

void LinearProducts::weight_gradient_by_source(Tape& tape, const GradRef& dw, const Shape& w,
                                               const Tensor& dy, const Input& x,
                                               std::vector<std::int64_t> sources) const {
  if (!dw) return;
  tape.weight_gradient(dw, [*this, dw, w, dy, input = x.get(tape), sources = std::move(sources)](Tape& t) {
    write_by_source(t, dw, w, dy.dtype(), sources, true,
                    [&](const SourceRows& rows, const Tensor& to, bool add, std::optional<DType> fold) {
                      tensor::Matmul product =
                          of_both(t, dy.rows(rows.begin, rows.end), input.rows(rows.begin, rows.end), {});
                      product.c = to, product.accumulate = add, product.fold = fold;
                      t.kernels().matmul(product);
                    });
  });
}

}  // namespace sherd::autograd
