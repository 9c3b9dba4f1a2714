#pragma once

#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "autograd/ops.h"
#include "engine/engine.h"
#include "nn/layered_model.h"
#include "sharding/parallel/layout.h"
#include "support/logical_states.h"

/// A model that tensor and context ranks share, with a parameter of each kind, its collectives written out;
/// and the same in double, on one rank.
namespace sherd::test::cut {

inline constexpr std::int64_t tokens = 16, in = 6, hidden = 8, out = 3;

/// None of a meta device.
inline std::int64_t looked_at(nn::Tape& tape, std::int64_t elements) {
  return tape.device().kind() == device::Kind::meta ? 0 : elements;
}

/// All ranks' sum; the gradient passes through (Megatron-LM's g).
inline nn::Var reduce(const nn::Var& x, comm::Communicator* group) {
  if (!group) return x;
  const tensor::Tensor sum = x.tape().empty(x.shape(), x.dtype());
  x.tape().kernels().copy(x.value(), sum);
  group->all_reduce(sum).wait();
  return x.tape().record(sum, {x}, [dx = x.grad_ref()](nn::Tape& tape, tensor::Tensor dy) {
    tape.accumulate(dx, std::move(dy));
  });
}

/// All ranks' rows; each finds another part of their gradient.
inline nn::Var gather_rows(const nn::Var& x, comm::Communicator* group) {
  if (!group) return x;
  const std::int64_t rows = x.shape()[0], width = x.shape()[1];
  const tensor::Tensor all = x.tape().empty({rows * group->size(), width}, x.dtype());
  group->all_gather({{x.value(), all}}).wait();
  return x.tape().record(all, {x}, [=, dx = x.grad_ref()](nn::Tape& tape, const tensor::Tensor& dy) {
    const tensor::Tensor sum = tape.empty(dy.shape(), dy.dtype());
    tape.kernels().copy(dy, sum);
    group->all_reduce(sum).wait();
    const tensor::Tensor own = tape.empty({rows, width}, dy.dtype());
    const std::int64_t first = group->rank() * rows * width;
    tape.kernels().copy(sum.range(first, first + rows * width).reshape({rows, width}), own);
    tape.accumulate(dx, own);
  });
}

/// Each column of x times its gain. x takes no gradient.
inline nn::Var scaled(const nn::Var& x, const nn::Var& gain) {
  nn::Tape& tape = x.tape();
  const std::int64_t rows = x.shape()[0], width = x.shape()[1];
  const tensor::Tensor y = tape.empty(x.shape(), DType::f32);
  for (std::int64_t i = 0; i < looked_at(tape, rows * width); ++i)
    y.data<float>()[i] = x.value().data<float>()[i] * gain.value().data<float>()[i % width];
  return tape.record(
      y, {gain}, [=, kept = autograd::Saved(x), dg = gain.grad_ref()](nn::Tape& t, const tensor::Tensor& dy) {
        const tensor::Tensor values = kept.get(t), grad = t.empty({width}, DType::f32);
        t.kernels().fill(grad, 0);
        for (std::int64_t i = 0; i < looked_at(t, rows * width); ++i)
          grad.data<float>()[i % width] += dy.data<float>()[i] * values.data<float>()[i];
        t.accumulate(dg, grad);
      });
}

/// Elements [part, part + 1) of `parts` of dimension `axis`.
inline tensor::Slice part_of(const tensor::Shape& logical, int axis, int part, int parts) {
  tensor::Slice::Blocks blocks;
  for (const std::int64_t extent : logical.dims()) blocks.push_back({{0, extent}});
  const std::int64_t each = logical[axis] / parts;
  blocks[static_cast<std::size_t>(axis)] = {{part * each, (part + 1) * each}};
  return {logical, blocks};
}

/// gain·x: computed on 1/t of the tokens, so that the gain's gradient is partial.
class Gain : public nn::Layer {
 public:
  explicit Gain(const parallel::Layout& layout)
      : layout_(layout), weight_(declare("weight", {in}, nn::Init::uniform(0.5, 1.5))) {
    weight_->partial_gradient = layout.cuts_stream();
  }

 protected:
  nn::Var forward(nn::Tape& tape, const nn::Var& x) override {
    if (!layout_.cuts_stream()) return scaled(x, tape.parameter(weight_));
    const std::int64_t elements = x.value().numel() / layout_.tensor_size();
    const std::int64_t first = layout_.tensor_rank() * elements;
    const nn::Var own = tape.input(x.value().range(first, first + elements).reshape({elements / in, in}));
    return gather_rows(scaled(own, tape.parameter(weight_)), layout_.tensor);
  }

 private:
  parallel::Layout layout_;
  nn::ParameterPtr weight_;
};

/// tanh(W·x + b), W and b cut by rows.
class Up : public nn::Layer {
 public:
  explicit Up(const parallel::Layout& layout) : layout_(layout) {
    const int t = layout.tensor_size(), r = layout.tensor_rank();
    weight_ = declare("weight", {hidden / t, in}, nn::Init::normal(0, 0.5));
    bias_ = declare("bias", {hidden / t}, nn::Init::uniform(-0.5, 0.5));
    if (t > 1) weight_->slice = part_of({hidden, in}, 0, r, t), bias_->slice = part_of({hidden}, 0, r, t);
  }

 protected:
  nn::Var forward(nn::Tape& tape, const nn::Var& x) override {
    const nn::Var y = layout_.tensor && !layout_.cuts_stream() ? copied(x) : x;
    return autograd::tanh(autograd::linear(y, tape.parameter(weight_), tape.parameter(bias_)));
  }

 private:
  /// Megatron-LM's f.
  nn::Var copied(const nn::Var& x) const {
    return x.tape().record(
        x.value(), {x},
        [group = layout_.tensor, dx = x.grad_ref()](nn::Tape& tape, const tensor::Tensor& dy) {
          const tensor::Tensor sum = tape.empty(dy.shape(), dy.dtype());
          tape.kernels().copy(dy, sum);
          group->all_reduce(sum).wait();
          tape.accumulate(dx, sum);
        });
  }
  parallel::Layout layout_;
  nn::ParameterPtr weight_, bias_;
};

/// W·x, W cut by columns.
class Down : public nn::Layer {
 public:
  explicit Down(const parallel::Layout& layout) : layout_(layout) {
    const int t = layout.tensor_size();
    weight_ = declare("weight", {out, hidden / t}, nn::Init::normal(0, 0.5));
    if (t > 1) weight_->slice = part_of({out, hidden}, 1, layout.tensor_rank(), t);
  }

 protected:
  nn::Var forward(nn::Tape& tape, const nn::Var& x) override {
    return reduce(autograd::linear(x, tape.parameter(weight_)), layout_.tensor);
  }

 private:
  parallel::Layout layout_;
  nn::ParameterPtr weight_;
};

/// x + b, b whole on all ranks.
class Shift : public nn::Layer {
 public:
  Shift() : bias_(declare("bias", {out}, nn::Init::uniform(-0.5, 0.5))) {}

 protected:
  nn::Var forward(nn::Tape& tape, const nn::Var& x) override {
    const nn::Var bias = tape.parameter(bias_);
    const tensor::Tensor y = tape.empty(x.shape(), DType::f32);
    for (std::int64_t i = 0; i < looked_at(tape, y.numel()); ++i)
      y.data<float>()[i] = x.value().data<float>()[i] + bias.value().data<float>()[i % out];
    return tape.record(y, {x, bias},
                       [dx = x.grad_ref(), db = bias.grad_ref()](nn::Tape& t, const tensor::Tensor& dy) {
                         const tensor::Tensor grad = t.empty({out}, DType::f32);
                         t.kernels().fill(grad, 0);
                         for (std::int64_t i = 0; i < looked_at(t, dy.numel()); ++i)
                           grad.data<float>()[i % out] += dy.data<float>()[i];
                         t.accumulate(db, grad);
                         t.accumulate(dx, dy);
                       });
  }

 private:
  nn::ParameterPtr bias_;
};

/// Four parts, each a block. The mean of squares over a sequence of which each context rank sees its part, in
/// order.
class Model : public nn::LayeredModel {
 public:
  explicit Model(const parallel::Layout& layout) : layout_(layout) {
    append("gain", std::make_shared<Gain>(layout));
    append("up", std::make_shared<Up>(layout));
    append("down", std::make_shared<Down>(layout));
    append("shift", std::make_shared<Shift>());
  }

 protected:
  nn::Var forward_part(nn::Tape& tape, std::size_t part, const nn::Var& x,
                       const tensor::Batch& batch) override {
    const nn::Var y = (*layers_[part])(tape, part == 0 ? tape.input(own(batch.at("x"))) : x);
    if (part + 1 < parts()) return y;
    const nn::Var loss = autograd::mean_squared_error(y, own(batch.at("y")));
    return layout_.context ? reduce(autograd::scale(loss, 1.0 / layout_.context_size()), layout_.context)
                           : loss;
  }

 private:
  void append(const std::string& name, const std::shared_ptr<nn::Layer>& layer) {
    layer->mark_block();
    layers_.push_back(add(name, layer));
    append_part({layer});
  }
  tensor::Tensor own(const tensor::Tensor& whole) const {
    const std::int64_t elements = whole.numel() / layout_.context_size(),
                       first = layout_.context_rank() * elements;
    return whole.range(first, first + elements)
        .reshape({whole.shape()[0] / layout_.context_size(), whole.shape()[1]});
  }

  parallel::Layout layout_;
  std::vector<std::shared_ptr<nn::Layer>> layers_;
};

using Values = std::vector<double>;

/// The values of one micro-batch of a data rank.
inline Values sample(std::int64_t width, int step, int micro, int data_rank, std::uint64_t what) {
  Values values(static_cast<std::size_t>(tokens * width));
  const RandomKey key{what, static_cast<std::uint64_t>(step * 100 + micro * 10 + data_rank)};
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(normal_at(key, i));
  return values;
}

inline tensor::Batch batch(device::Device& device, int step, int micro, int data_rank) {
  const auto tensor_of = [&](std::int64_t width, std::uint64_t what) {
    const Values values = sample(width, step, micro, data_rank, what);
    return tensor::Tensor::of<float>(device, {tokens, width},
                                     std::vector<float>(values.begin(), values.end()));
  };
  return {{"x", tensor_of(in, 1)}, {"y", tensor_of(out, 2)}};
}

/// Whole weights by name, in double.
using Weights = std::map<std::string, Values>;

inline Weights weights_of(const LogicalStates& states) {
  Weights weights;
  for (const auto& [name, bytes] : states) {
    if (!name.starts_with("fp32.")) continue;
    const auto* begin = reinterpret_cast<const float*>(bytes.data());
    weights[name.substr(5)] = Values(begin, begin + bytes.size() / sizeof(float));
  }
  return weights;
}

/// The loss of one micro-batch; adds its gradients to `sums`.
inline double loss_of(const Weights& weights, int step, int micro, int data_rank, Weights& sums) {
  const Values x = sample(in, step, micro, data_rank, 1), target = sample(out, step, micro, data_rank, 2);
  const Values &gain = weights.at("gain.weight"), &up = weights.at("up.weight"),
               &up_bias = weights.at("up.bias"), &down = weights.at("down.weight"),
               &down_bias = weights.at("shift.bias");
  for (const auto& [name, values] : weights) sums[name].resize(values.size());
  double loss = 0;
  for (std::size_t token = 0; token < tokens; ++token) {
    Values h(hidden), dh(hidden);
    for (std::size_t j = 0; j < hidden; ++j) {
      double sum = up_bias[j];
      for (std::size_t i = 0; i < in; ++i) sum += up[j * in + i] * gain[i] * x[token * in + i];
      h[j] = std::tanh(sum);
    }
    for (std::size_t o = 0; o < out; ++o) {
      double y = down_bias[o];
      for (std::size_t j = 0; j < hidden; ++j) y += down[o * hidden + j] * h[j];
      const double error = y - target[token * out + o], dy = 2 * error / (tokens * out);
      loss += error * error / (tokens * out);
      sums["shift.bias"][o] += dy;
      for (std::size_t j = 0; j < hidden; ++j)
        sums["down.weight"][o * hidden + j] += dy * h[j], dh[j] += dy * down[o * hidden + j];
    }
    for (std::size_t j = 0; j < hidden; ++j) {
      const double d = dh[j] * (1 - h[j] * h[j]);
      sums["up.bias"][j] += d;
      for (std::size_t i = 0; i < in; ++i) {
        sums["up.weight"][j * in + i] += d * gain[i] * x[token * in + i];
        sums["gain.weight"][i] += d * up[j * in + i] * x[token * in + i];
      }
    }
  }
  return loss;
}

struct Step {
  double loss, norm;
};

/// One step of plain SGD over all data ranks' micro-batches, with gradients clipped to `clipping` (0: not).
inline Step train_step(Weights& weights, int step, int data_ranks, int micro_batches, double lr,
                       double clipping) {
  Weights sums;
  double loss = 0, squares = 0;
  for (int micro = 0; micro < micro_batches; ++micro)
    for (int rank = 0; rank < data_ranks; ++rank) loss += loss_of(weights, step, micro, rank, sums);
  const double count = data_ranks * micro_batches;
  for (const auto& [name, values] : sums)
    for (const double value : values) squares += value / count * value / count;
  const double norm = std::sqrt(squares),
               factor = clipping > 0 ? std::min(1.0, clipping / (norm + 1e-6)) : 1.0;
  for (auto& [name, values] : weights)
    for (std::size_t i = 0; i < values.size(); ++i) values[i] -= lr * factor * sums.at(name)[i] / count;
  return {loss / count, norm};
}

}  // namespace sherd::test::cut
