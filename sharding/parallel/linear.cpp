#include "sharding/parallel/linear.h"

#include <cmath>

#include "autograd/linear_products.h"
#include "autograd/ops.h"
#include "sharding/parallel/exchanges.h"

namespace sherd::parallel {

using autograd::GradRef;
using autograd::LinearProducts;
using autograd::Saved;
using nn::Init;
using nn::ParameterPtr;
using tensor::Activation;
using tensor::Shape;

namespace {

/// The distribution from which nn::Linear draws weights and biases, by the logical number of inputs.
Init default_init(std::int64_t in) {
  const double bound = 1.0 / std::sqrt(static_cast<double>(in));
  return Init::uniform(-bound, bound);
}

/// Where a layer exchanges, and how its calls are named.
struct LayerExchange {
  Communicator* group;
  bool rows_cut;
  std::string name;

  LayerExchange(const Layout& layout, const nn::Module& module, const char* otherwise)
      : group(layout.tensor),
        rows_cut(layout.cuts_stream()),
        name(module.path().empty() ? otherwise : module.path()) {}
  /// A call that runs beside this rank's work, or at once.
  comm::CallOptions call(const char* what, bool async) const {
    return {.label = cat(name, " ", what), .async = async};
  }
};

void check_rows(const LayerExchange& exchange, const Shape& x) {
  require(
      !exchange.rows_cut || x.rank() >= 3, exchange.name,
      ": sequence parallelism cuts the rows of [batch, rows, features], and ", x.str(),
      " has no sequences: where all tensor ranks have all rows of a batch, set "
      "parallel.sequence_parallel to false, or layout.sequence_parallel in the copy that this layer gets; "
      "tokens of one sequence are [1, rows, features]");
}

/// Backward of a column-parallel layer. Keeps the rank's own rows of the input alone.
struct ColumnBackward {
  LayerExchange exchange;
  LinearProducts products;
  LinearProducts::Input x;
  Saved w;
  Tensor pre;
  Activation activation;
  GradRef dx, dw, db;
  Shape w_shape;

  /// The input, whole: gathered again beside what comes first.
  Exchange begin_input(Tape& tape) const {
    if (!dw || !exchange.rows_cut) return {};
    return begin_all_gather(tape.kernels(), *exchange.group, x.get(tape), row_dim,
                            exchange.call("input again", true));
  }
  /// The gradient that this rank's columns give, on its way into the sum.
  Exchange begin_sum(Tape& tape, const Tensor& dy) const {
    if (!dx) return {};
    const Tensor part = products.input_gradient(tape, dy, w.get(tape));
    const comm::CallOptions call = exchange.call("input gradient", true);
    return exchange.rows_cut ? begin_reduce_scatter(tape.kernels(), *exchange.group, part, row_dim, call)
                             : begin_all_reduce(*exchange.group, part, call);
  }

  void operator()(Tape& tape, Tensor dy) {
    dy = autograd::pre_activation_gradient(tape, activation, pre, std::move(dy));
    pre = {};
    Exchange input = begin_input(tape);
    autograd::bias_gradient(tape, db, dy);
    Exchange sum = begin_sum(tape, dy);
    if (dw && exchange.rows_cut) x = LinearProducts::Input(input.wait());
    products.weight_gradient(tape, dw, w_shape, dy, x);
    x = {};
    if (dx) tape.accumulate(dx, sum.wait());
  }
};

Var column_linear(const Var& x, const Var& w, const Var& b, Activation activation,
                  const LayerExchange& exchange) {
  Tape& tape = x.tape();
  autograd::check_linear(x.shape(), w.shape());
  check_rows(exchange, x.shape());
  const bool recorded = tape.recording() && (x.requires_grad() || w.requires_grad() || b.requires_grad());
  Tensor whole = x.value();
  if (exchange.rows_cut)
    whole = begin_all_gather(tape.kernels(), *exchange.group, whole, row_dim, exchange.call("input", false))
                .wait();
  const LinearProducts products(w);
  autograd::LinearOutput made =
      products.output(tape, whole, w, b.defined() ? b.value() : Tensor(), activation, recorded);
  whole = {};
  if (!recorded) return tape.record(std::move(made.out), {x, w, b}, nullptr);
  autograd::RemakeFn remake = autograd::remake_linear_output(made.pre, activation);
  // Under sequence parallelism the rank's own rows are kept, in whatever they are exchanged.
  const auto input = [&] { return exchange.rows_cut ? LinearProducts::Input(x) : products.save(x); };
  ColumnBackward backward{.exchange = exchange,
                          .products = products,
                          .x = w.requires_grad() ? input() : LinearProducts::Input(),
                          .w = x.requires_grad() ? Saved(w) : Saved(),
                          .pre = std::move(made.pre),
                          .activation = activation,
                          .dx = x.grad_ref(),
                          .dw = w.grad_ref(),
                          .db = b.grad_ref(),
                          .w_shape = w.shape()};
  return tape.record(std::move(made.out), {x, w, b}, std::move(backward), std::move(remake));
}

/// Backward of a row-parallel layer.
struct RowBackward {
  LayerExchange exchange;
  LinearProducts products;
  LinearProducts::Input x;
  Saved w;
  GradRef dx, dw, db;
  Shape x_shape, w_shape;

  void operator()(Tape& tape, Tensor dy) {
    const bool gathers = exchange.rows_cut && (dx || dw);
    Exchange whole = gathers ? begin_all_gather(tape.kernels(), *exchange.group, dy, row_dim,
                                                exchange.call("output gradient", true))
                             : Exchange();
    autograd::bias_gradient(tape, db, dy);
    if (gathers) dy = whole.wait();
    products.weight_gradient(tape, dw, w_shape, dy, x);
    x = {};
    if (dx) products.input_gradient(tape, dx, x_shape, std::move(dy), w.get(tape));
  }
};

/// x + b, in place: each row is a sequence of one position.
void add_bias(Tape& tape, const Tensor& x, const Tensor& b) {
  const Tensor rows = x.reshape({x.shape().rows(), 1, b.numel()});
  tape.kernels().add_positions(rows, b.reshape({1, b.numel()}), rows);
}

Var row_linear(const Var& x, const Var& w, const Var& b, const LayerExchange& exchange) {
  Tape& tape = x.tape();
  autograd::check_linear(x.shape(), w.shape());
  check_rows(exchange, x.shape());
  const LinearProducts products(w);
  Tensor out = products.output(tape, x.value(), w, {}, Activation::none, false).out;
  const comm::CallOptions call = exchange.call("output", false);
  out = exchange.rows_cut ? begin_reduce_scatter(tape.kernels(), *exchange.group, out, row_dim, call).wait()
                          : begin_all_reduce(*exchange.group, out, call).wait();
  if (b.defined()) add_bias(tape, out, b.value());
  const bool recorded = tape.recording() && w.requires_grad();
  RowBackward backward{.exchange = exchange,
                       .products = products,
                       .x = recorded ? products.save(x) : LinearProducts::Input(),
                       .w = x.requires_grad() ? Saved(w) : Saved(),
                       .dx = x.grad_ref(),
                       .dw = w.grad_ref(),
                       .db = b.grad_ref(),
                       .x_shape = x.shape(),
                       .w_shape = w.shape()};
  return tape.record(std::move(out), {x, w, b}, std::move(backward));
}

Var bias_of(Tape& tape, const ParameterPtr& bias) {
  return bias ? tape.parameter(bias) : Var();
}

}  // namespace

ColumnLinear::ColumnLinear(std::int64_t in, std::int64_t out, const Layout& layout, nn::LinearOptions options,
                           std::vector<std::int64_t> blocks)
    : ParallelLinear(layout), activation_(options.activation) {
  require(in > 0 && out > 0, "a linear layer from ", in, " to ", out, " features");
  const std::string what = cat("a column-parallel linear layer from ", in, " to ", out, " features");
  const tensor::Slice held = tensor_slice(what, {out, in}, 0, layout, blocks);
  if (options.tied) {
    require(options.tied->logical_slice() == held, what, " holds ", held.str(), ", which a weight of ",
            options.tied->logical_slice().str(), " cannot serve");
    weight_ = share("weight", options.tied);
  } else {
    set_slice(weight_ = declare("weight", held.shape(), options.init.value_or(default_init(in))), held);
    weight_->packing = options.packing;
    weight_->in_linear = options.fp8;
  }
  if (!options.bias) return;
  const tensor::Slice bias = tensor_slice(what, {out}, 0, layout, blocks);
  const Init init = options.init ? Init::zeros() : default_init(in);
  set_slice(bias_ = declare("bias", bias.shape(), init, {.decay = false}), bias);
  bias_->packing = std::move(options.packing);
}

void ParallelLinear::set_adapter(std::shared_ptr<LinearAdapter> adapter) {
  if (!adapter) return;
  adapter->attach(weight_, bias_);
  adapter_ = add("adapter", std::move(adapter));
}

Var ColumnLinear::forward(Tape& tape, const Var& x) {
  const Var w = tape.parameter(weight_), b = bias_of(tape, bias_);
  const auto base = [&](const Var& in, Activation activation) {
    return alone(layout_.tensor)
               ? autograd::linear(in, w, b, activation)
               : column_linear(in, w, b, activation, LayerExchange(layout_, *this, "column-parallel linear"));
  };
  if (!adapter_ || tape.without_adapters) return base(x, activation_);
  const Var in = adapter_->input(tape, x);
  const Var y = adapter_->output(tape, in, base(in, Activation::none), {});
  return activation_ == Activation::none ? y : autograd::activation(y, activation_);
}

RowLinear::RowLinear(std::int64_t in, std::int64_t out, const Layout& layout, nn::LinearOptions options)
    : ParallelLinear(layout) {
  require(in > 0 && out > 0, "a linear layer from ", in, " to ", out, " features");
  const std::string what = cat("a row-parallel linear layer from ", in, " to ", out, " features");
  require(options.activation == Activation::none && !options.tied, what,
          " takes neither an activation, which would come before the sum, nor a tied weight");
  const tensor::Slice held = tensor_slice(what, {out, in}, 1, layout);
  set_slice(weight_ = declare("weight", held.shape(), options.init.value_or(default_init(in))), held);
  weight_->packing = options.packing;
  weight_->in_linear = options.fp8;
  if (!options.bias) return;
  bias_ = declare("bias", {out}, options.init ? Init::zeros() : default_init(in), {.decay = false});
  bias_->packing = std::move(options.packing);
  bias_->partial_gradient = layout.cuts_stream();
}

Var RowLinear::forward(Tape& tape, const Var& x) {
  const Var w = tape.parameter(weight_), b = bias_of(tape, bias_);
  const auto base = [&](const Var& in) {
    return alone(layout_.tensor) ? autograd::linear(in, w, b)
                                 : row_linear(in, w, b, LayerExchange(layout_, *this, "row-parallel linear"));
  };
  if (!adapter_ || tape.without_adapters) return base(x);
  const Var in = adapter_->input(tape, x);
  return adapter_->output(tape, in, base(in), {});
}

}  // namespace sherd::parallel
