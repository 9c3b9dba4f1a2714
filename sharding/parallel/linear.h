#pragma once

#include <memory>
#include <vector>

#include "nn/layers.h"
#include "sharding/parallel/adapters/adapters.h"
#include "sharding/parallel/layout.h"

// Linear layers that the tensor-parallel ranks of a layout share (Shoeybi et al. 2019, "Megatron-LM"; with
// sequence parallelism, Korthikanti et al. 2022). A column-parallel layer leads from the stream to the inner
// part, a row-parallel one back (see Layout): what lies between them is cut by features, and exchanges
// nothing. On one rank each is nn::Linear, to the bit.
//
// Parameters have nn::Linear's names, logical shapes and initial values; each rank declares its slice.
namespace sherd::parallel {

using autograd::Tape;
using autograd::Var;

/// The parameters of a column- or row-parallel layer, and its adapter.
class ParallelLinear : public nn::Layer {
 public:
  const nn::ParameterPtr& weight() const { return weight_; }
  const nn::ParameterPtr& bias() const { return bias_; }  ///< null without one
  /// Has `adapter` stand around the layer, as its part "adapter"; null: none does.
  void set_adapter(std::shared_ptr<LinearAdapter> adapter);
  LinearAdapter* adapter() const { return adapter_.get(); }  ///< null: none

 protected:
  explicit ParallelLinear(const Layout& layout) : layout_(layout) {}

  Layout layout_;
  nn::ParameterPtr weight_, bias_;
  std::shared_ptr<LinearAdapter> adapter_;
};

/// act(x·weightᵀ + bias), whose outputs are cut over the ranks: rank r computes the r-th part of each of
/// `blocks`. x: the stream, [..., rows, in]; the result: [..., inner rows, out/ranks].
///
/// Parameters: "weight", logical [out, in], and "bias", logical [out], both cut by outputs. Under sequence
/// parallelism x, [batch, rows, in] at least (rows of a batch without sequences are an Error{usage}: they
/// would count once per rank), is all-gathered over rows, in backward too instead of being kept, and its
/// gradient is reduce-scattered; otherwise all ranks have the same x, whose gradient is all-reduced. That sum
/// runs while the weight's gradient is computed.
class ColumnLinear : public ParallelLinear {
 public:
  /// `blocks` add up to `out`, and are cut each by itself, as gate and up are, {f, f}; by default there is
  /// one. A tied weight must be of the same slice. Throws Error{config} for a block that the ranks do not
  /// divide.
  ColumnLinear(std::int64_t in, std::int64_t out, const Layout& layout, nn::LinearOptions options = {},
               std::vector<std::int64_t> blocks = {});

 protected:
  Var forward(Tape& tape, const Var& x) override;

 private:
  tensor::Activation activation_;
};

/// x·weightᵀ + bias, whose inputs are cut over the ranks as a column-parallel layer gives them. x: [...,
/// inner rows, in/ranks]; the result: the stream, [..., rows, out].
///
/// Parameters: "weight", logical [out, in], cut by inputs; "bias" [out], which all ranks have and add once,
/// to the sum. Under sequence parallelism the sum is reduce-scattered over rows, its gradient all-gathered,
/// and the bias's gradient partial; otherwise the sum is all-reduced.
class RowLinear : public ParallelLinear {
 public:
  /// Throws Error{config} for inputs that the ranks do not divide, Error{usage} for options that it does not
  /// take: an activation, a tied weight.
  RowLinear(std::int64_t in, std::int64_t out, const Layout& layout, nn::LinearOptions options = {});

 protected:
  Var forward(Tape& tape, const Var& x) override;
};

/// `module`, whose parameters all ranks have and apply to the stream, as norms do: where that is cut, each
/// rank finds a part of their gradients.
template <class M>
std::shared_ptr<M> on_stream(std::shared_ptr<M> module, const Layout& layout) {
  if (layout.cuts_stream())
    for (const nn::ParameterPtr& parameter : module->parameters()) parameter->partial_gradient = true;
  return module;
}

}  // namespace sherd::parallel
