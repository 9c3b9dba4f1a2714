#include "sharding/parallel/adapters/adapters.h"

#include <algorithm>
#include <cmath>

#include "autograd/experts.h"
#include "autograd/ops.h"
#include "sharding/parallel/collectives.h"

namespace sherd::parallel {

using autograd::SpreadRows;
using tensor::Range;
using tensor::Shape;
using tensor::Slice;

namespace {

using Cut = AdaptedLayer::Cut;

/// A target's rows of the weight, and where they lie among those of all targets.
struct TargetRows {
  Range rows;
  std::int64_t at;
  std::int64_t target;
};

std::vector<TargetRows> in_order(const AdaptedLayer& layer) {
  std::vector<TargetRows> out;
  for (std::size_t i = 0; i < layer.targets.size(); ++i)
    for (const Range& rows : layer.targets[i]) out.push_back({rows, 0, static_cast<std::int64_t>(i)});
  std::sort(out.begin(), out.end(),
            [](const TargetRows& a, const TargetRows& b) { return a.rows.begin < b.rows.begin; });
  std::int64_t at = 0;
  for (TargetRows& rows : out) rows.at = std::exchange(at, at + rows.rows.size());
  return out;
}

/// The rows of the targets that this rank has.
struct HeldRows {
  std::int64_t all = 0;      ///< rows of all targets, over all ranks
  std::int64_t outputs = 0;  ///< outputs that this rank has
  bool even = true;          ///< each rank has as many; else all hold all of them
  std::vector<Range> held;   ///< the ones among `all`
  std::vector<SpreadRows> runs;

  /// How the parameter's rows become the outputs, in `blocks` blocks of columns.
  autograd::RowSpread spread(std::int64_t blocks) const {
    if (blocks == 1 && even && runs.size() == 1 && runs[0].count == outputs) return {};  // as they are
    return {runs, outputs, blocks};
  }
  void append(const SpreadRows& run) {
    SpreadRows* last = runs.empty() ? nullptr : &runs.back();
    const bool joins = last && last->column == run.column && last->to + last->count == run.to &&
                       last->from + last->count == run.from;
    if (joins)
      last->count += run.count;
    else
      runs.push_back(run);
  }
};

/// Whether tensor ranks, of which each has the part of each block that this one's `own` is, have as many of
/// the targets' rows.
bool shares_evenly(const std::vector<Range>& own, const std::vector<TargetRows>& targets,
                   const AdaptedLayer& layer, const Layout& layout) {
  const auto rows_of = [&](int rank) {
    std::int64_t rows = 0;
    for (const Range& range : own)
      for (const TargetRows& target : targets) {
        const std::int64_t begin = range.begin + (rank - layout.tensor_rank()) * range.size();
        rows += std::max<std::int64_t>(
            0, std::min(begin + range.size(), target.rows.end) - std::max(begin, target.rows.begin));
      }
    return rows;
  };
  if (layer.cut == Cut::inputs) return true;
  for (int rank = 1; rank < layout.tensor_size(); ++rank)
    if (rows_of(rank) != rows_of(0)) return false;
  return true;
}

HeldRows held_rows(const AdaptedLayer& layer, const std::string& what, const Layout& layout) {
  HeldRows out;
  std::vector<Range> own{{0, layer.out}};
  if (layer.cut == Cut::outputs) own = tensor_slice(what, {layer.out}, 0, layout, layer.blocks).blocks()[0];
  for (const Range& range : own) out.outputs += range.size();
  const std::vector<TargetRows> targets = in_order(layer);
  out.even = shares_evenly(own, targets, layer, layout);
  std::int64_t from = 0;
  for (const TargetRows& target : targets) {
    out.all += target.rows.size();
    std::int64_t local = 0;
    for (const Range& range : own) {
      const std::int64_t begin = std::max(range.begin, target.rows.begin),
                         count = std::min(range.end, target.rows.end) - begin;
      if (count > 0) {
        const std::int64_t first = target.at + begin - target.rows.begin;
        out.held.push_back({first, first + count});
        if (!out.even) from = first;
        out.append({from, local + begin - range.begin, count, target.target});
        from += count;
      }
      local += range.size();
    }
  }
  if (!out.even) out.held = {{0, out.all}};
  return out;
}

/// The targets by their rows among those of all, as each is published; of one target alone nothing.
autograd::Packing packing_of(const AdaptedLayer& layer) {
  autograd::Packing out;
  if (layer.targets.size() == 1) return out;
  out.tensors.resize(layer.targets.size());
  for (const TargetRows& target : in_order(layer))
    out.tensors[static_cast<std::size_t>(target.target)].push_back(
        {target.at, target.at + target.rows.size()});
  return out;
}

std::string described(const char* what, const AdaptedLayer& layer) {
  return cat(what, " of a linear layer from ", layer.in, " to ", layer.out, " features");
}

}  // namespace

void LinearAdapter::attach(const nn::ParameterPtr&, const nn::ParameterPtr&) {}

Var LinearAdapter::input(Tape&, const Var& x) {
  return x;
}

Var LinearAdapter::output(Tape&, const Var&, const Var& y, const std::vector<std::int64_t>&) {
  return y;
}

Lora::Lora(AdaptedLayer layer, const LoraOptions& options, const Layout& layout)
    : layer_(std::move(layer)),
      options_(options),
      layout_(layout),
      dropout_(add("dropout", std::make_shared<nn::Dropout>(options.dropout))) {
  require(options.rank > 0 && !layer_.targets.empty(), "LoRA needs a rank, and targets");
  require(!layer_.in_expert || (options.dropout == 0 && !options.dora), "in experts LoRA is as it was first");
  const std::string what = described("LoRA", layer_);
  const std::int64_t r = options.rank, targets = std::ssize(layer_.targets);
  const bool by_inputs = layer_.cut == Cut::inputs;
  const Slice a = by_inputs ? tensor_slice(what, {targets * r, layer_.in}, 1, layout)
                            : Slice::whole({targets * r, layer_.in});
  const double bound = 1.0 / std::sqrt(static_cast<double>(layer_.in));
  const nn::Init drawn =
      options.gaussian ? nn::Init::normal(0, 1.0 / static_cast<double>(r)) : nn::Init::uniform(-bound, bound);
  set_slice(a_ = declare("lora_A", a.shape(), drawn), a);
  const HeldRows rows = held_rows(layer_, what, layout);
  const Slice b({rows.all, r}, {rows.held, {{0, r}}});
  set_slice(b_ = declare("lora_B", b.shape(), nn::Init::zeros()), b);
  (by_inputs ? b_ : a_)->partial_gradient = layout.cuts_stream() && !layer_.in_expert;
  if (!rows.even) b_->partial_gradient = true;
  for (std::int64_t i = 0; targets > 1 && i < targets; ++i)
    a_->packing.tensors.push_back({{i * r, (i + 1) * r}});
  b_->packing = packing_of(layer_);
  rows_ = rows.spread(targets);
  held_out_ = rows.outputs;
  if (!options.dora) return;
  set_slice(magnitude_ = declare("magnitude", {b.shape()[0]}, nn::Init::ones(), {.decay = false}),
            Slice({rows.all}, {rows.held}));
  magnitude_->partial_gradient = b_->partial_gradient;
  magnitude_->packing = b_->packing;
}

void Lora::attach(const nn::ParameterPtr& weight, const nn::ParameterPtr& bias) {
  if (magnitude_) weight_ = weight, bias_ = bias;
}

/// The result of the first product, on its way to where the second one is computed.
Var Lora::exchanged(const Var& x) const {
  comm::Communicator* group = layout_.tensor;
  const std::string label = cat(path(), " low-rank rows");
  const bool cuts_rows = layout_.cuts_stream() && !layer_.in_expert;
  if (layer_.cut == Cut::outputs)
    return cuts_rows ? all_gather(x, row_dim, group, label) : copy_to(x, group, label);
  return cuts_rows ? reduce_scatter(x, row_dim, group, label) : all_reduce(x, group, label);
}

/// Which elements of the layer's whole input this rank has.
Slice Lora::elements(const Shape& x) const {
  if (layer_.cut == Cut::outputs) return layout_.stream_slice(x);
  Layout inner = layout_;
  inner.tensor = nullptr;
  const Slice rows = inner.stream_slice(x);
  Slice::Blocks blocks = rows.blocks();
  blocks[2] = a_->logical_slice().blocks()[1];
  return {{rows.logical()[0], rows.logical()[1], layer_.in}, std::move(blocks)};
}

Var Lora::output(Tape& tape, const Var& x, const Var& y, const std::vector<std::int64_t>& sources) {
  const bool drops = options_.dropout > 0 && tape.training;
  // In an expert all tensor ranks compute this alike, and their parts are summed later: so rank 0 alone adds
  // it, to its output where ranks cut the inputs, else to x's gradient.
  const bool adds = !layer_.in_expert || layout_.tensor_rank() == 0;
  const bool by_outputs = layer_.cut == Cut::outputs;
  const Var in = drops                 ? dropout_->apply(tape, x, elements(x.shape()))
                 : adds || !by_outputs ? x
                                       : tape.input(x.value());
  const Var a = tape.parameter(a_), b = tape.parameter(b_);
  const Var low =
      exchanged(sources.empty() ? autograd::linear(in, a)
                                : autograd::linear_by_source(in, a, {}, tensor::Activation::none, sources));
  const Var sum =
      autograd::linear_onto(y, autograd::scale(low, options_.scale), b, rows_, sources, adds || by_outputs);
  return magnitude_ ? with_magnitudes(tape, sum, b) : sum;
}

/// 1 over the norm of each row of W + scale·B·A, [outputs of this rank], fp32.
Var Lora::inverse_norms(Tape& tape, const Var& of_targets) const {
  tensor::Kernels& kernels = tape.kernels();
  const Tape::NoGrad constants(tape);
  const Var b = autograd::spread(of_targets, rows_, 0);
  const tensor::Tensor w = tape.parameter(weight_).value(), a = tape.parameter(a_).value();
  const std::int64_t in = w.shape()[1];
  const tensor::Tensor sum = tape.empty(w.shape(), w.dtype()), unused = tape.empty(w.shape(), w.dtype()),
                       scaled = tape.empty(b.shape(), b.value().dtype()),
                       inverse = tape.empty({held_out_}, DType::f32);
  kernels.copy(w, sum);
  kernels.scale(b.value(), options_.scale, scaled);
  kernels.matmul({.a = scaled, .b = a, .c = sum, .accumulate = true});
  constexpr double least = 1e-30;  // of a row of zeros
  kernels.rms_norm(sum, {}, least, unused, inverse);
  const Var roots = tape.input(inverse);  // 1/√(mean of squares)
  const bool shared = layer_.cut == Cut::inputs && layout_.tensor_size() > 1;
  if (!shared) return autograd::scale(roots, 1 / std::sqrt(static_cast<double>(in)));
  const Var own = autograd::exp(autograd::scale(autograd::log(roots), -2));
  const Var squares = all_reduce(autograd::scale(own, static_cast<double>(in)), layout_.tensor,
                                 cat(path(), " squares of rows"));
  return autograd::exp(autograd::scale(autograd::log(squares), -0.5));
}

/// y, of which the rows of targets come to have their magnitudes; the bias stays what it is.
Var Lora::with_magnitudes(Tape& tape, const Var& y, const Var& b) const {
  const std::int64_t held = magnitude_->shape.numel();
  const DType dtype = y.value().dtype();
  autograd::RowSpread place = rows_;
  place.blocks = 1;
  for (SpreadRows& run : place.runs) run.column = 0;
  const auto of_outputs = [&](const Var& of_rows) {
    return autograd::reshape(autograd::spread(autograd::reshape(of_rows, {held, 1}), place, 0), {held_out_});
  };
  tensor::Tensor ones = tape.empty({held}, dtype), every = tape.empty({held_out_}, dtype);
  tape.kernels().fill(ones, 1), tape.kernels().fill(every, 1);
  const Var inverse = autograd::cast(inverse_norms(tape, b), dtype);
  // Outputs that are no target's have the factor 1.
  const Var elsewhere = autograd::subtract(tape.input(every), of_outputs(tape.input(ones)));
  const Var factors =
      autograd::add(autograd::multiply(of_outputs(tape.parameter(magnitude_)), inverse), elsewhere);
  const Var out = autograd::scale_columns(y, factors);
  if (!bias_) return out;
  const Var rest = autograd::subtract(tape.input(every), factors);
  return autograd::add(out, autograd::multiply(tape.parameter(bias_), rest));
}

Ia3::Ia3(AdaptedLayer layer, bool of_inputs, const Layout& layout) : of_inputs_(of_inputs) {
  const std::string what = described("IA³", layer);
  HeldRows rows = held_rows(layer, what, layout);
  Slice factors({rows.all}, {rows.held});
  if (of_inputs)
    factors = layer.cut == Cut::inputs ? tensor_slice(what, {layer.in}, 0, layout) : Slice::whole({layer.in});
  set_slice(factors_ = declare("ia3", factors.shape(), nn::Init::ones(), {.decay = false}), factors);
  if (!of_inputs) factors_->packing = packing_of(layer);
  // The factors of the stream all ranks have, and each sees its part of the stream.
  const bool on_stream = (layer.cut == Cut::inputs) != of_inputs;
  factors_->partial_gradient = on_stream ? layout.cuts_stream() : !of_inputs && !rows.even;
  // One column of factors, whichever target they are of.
  for (SpreadRows& run : rows.runs) run.column = 0;
  rows_ = rows.spread(1);
}

Var Ia3::input(Tape& tape, const Var& x) {
  return of_inputs_ ? autograd::scale_columns(x, tape.parameter(factors_)) : x;
}

Var Ia3::output(Tape& tape, const Var&, const Var& y, const std::vector<std::int64_t>&) {
  if (of_inputs_) return y;
  Var factors = tape.parameter(factors_);
  if (!rows_.as_it_is()) {
    const Var column = autograd::reshape(factors, {factors.shape().numel(), 1});
    factors = autograd::reshape(autograd::spread(column, rows_, 1), {rows_.rows});
  }
  return autograd::scale_columns(y, factors);
}

}  // namespace sherd::parallel
