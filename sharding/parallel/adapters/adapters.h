#pragma once

#include <memory>
#include <string>
#include <vector>

#include "autograd/ops.h"
#include "nn/layers.h"
#include "sharding/parallel/layout.h"

// Adapters of linear layers: few parameters that are trained beside weights that stay as they are.
//
// A weight may pack several published ones (queries, keys and values; gate and up), of which some have an
// adapter. Adapters are cut over tensor ranks as their layer is: what belongs to outputs that ranks share out
// lies with them, likewise of inputs. Where that gives them unequal parts, as with queries, keys and values
// of fewer key-value heads than ranks (exchange_heads()), all ranks hold what belongs to outputs, and each
// finds the part of its gradient that its own outputs give.
namespace sherd::parallel {

using autograd::Tape;
using autograd::Var;

/// A part that stands between a linear layer and those around it. Runs under the layer's lease.
class LinearAdapter : public nn::Module {
 public:
  /// Is told the layer's parameters; `bias` is null where there is none.
  virtual void attach(const nn::ParameterPtr& weight, const nn::ParameterPtr& bias);
  /// Makes what the layer takes in place of x.
  virtual Var input(Tape& tape, const Var& x);
  /// Makes what the layer gives in place of y, x·wᵀ + b, before an activation. Takes y's memory. `sources`:
  /// of the rows of an expert's x (autograd::linear_by_source()); empty: one.
  virtual Var output(Tape& tape, const Var& x, const Var& y, const std::vector<std::int64_t>& sources);
};

/// A layer that has an adapter, and which rows of its weight.
struct AdaptedLayer {
  /// Whose dimension is cut over tensor ranks.
  enum class Cut : std::uint8_t { outputs, inputs };
  Cut cut;
  std::int64_t in, out;
  std::vector<std::int64_t> blocks = {};  ///< blocks of outputs, as ColumnLinear's; empty: one
  bool in_expert = false;  ///< tensor ranks have the same rows, and each gives a part of their sum
  /// For each published weight that has an adapter its (logical) rows, ascending, apart from all others'.
  std::vector<std::vector<tensor::Range>> targets = {};
};

struct LoraOptions {
  std::int64_t rank = 8;
  double scale = 1;       ///< alpha/rank, or alpha/√rank
  float dropout = 0;      ///< chance to drop an element of the input, the same for all targets
  bool dora = false;      ///< rows of the sum have magnitudes
  bool gaussian = false;  ///< A is normal(0, 1/rank) at first
};

/// y + scale·dropout(x)·Aᵀ·Bᵀ for each target (Hu et al. 2021, "LoRA: Low-rank adaptation of large language
/// models"). Parameters: "lora_A", logical [targets·rank, in], one target's behind the other's, at first
/// uniform in ±1/√in; "lora_B", logical [rows of all targets, rank], in the order of the weight's rows, at
/// first zero.
///
/// With `dora` W + scale·B·A stands in W's place, its rows divided by their norms and multiplied by
/// "magnitude", logical [rows of all targets]; gradients take the norms for constants (Liu et al. 2024,
/// "DoRA", §4.3). The bias is added behind. Magnitudes are to be given: they begin as the weights' norms, not
/// as they are drawn.
///
/// Tensor ranks exchange rows of targets·rank elements: once per pass and direction; those that share out a
/// layer's inputs the squares of its rows, too. There is neither dropout nor `dora` in experts.
class Lora : public LinearAdapter {
 public:
  void attach(const nn::ParameterPtr& weight, const nn::ParameterPtr& bias) override;
  Lora(AdaptedLayer layer, const LoraOptions& options, const Layout& layout);
  Var output(Tape& tape, const Var& x, const Var& y, const std::vector<std::int64_t>& sources) override;

 private:
  Var exchanged(const Var& x) const;
  Var inverse_norms(Tape& tape, const Var& b) const;
  Var with_magnitudes(Tape& tape, const Var& y, const Var& b) const;
  tensor::Slice elements(const tensor::Shape& x) const;

  AdaptedLayer layer_;
  LoraOptions options_;
  Layout layout_;
  nn::ParameterPtr a_, b_;
  nn::ParameterPtr magnitude_, weight_, bias_;  ///< null without `dora`; the last two are the layer's
  std::shared_ptr<nn::Dropout> dropout_;
  autograd::RowSpread rows_;   ///< how B's rows become the outputs of this rank
  std::int64_t held_out_ = 0;  ///< outputs of this rank
};

/// Factors for a layer's outputs, or for its inputs (Liu et al. 2022, "Few-shot parameter-efficient
/// fine-tuning is better and cheaper than in-context learning"). Parameter: "ia3", logical [rows of all
/// targets], or [in], at first one.
class Ia3 : public LinearAdapter {
 public:
  Ia3(AdaptedLayer layer, bool of_inputs, const Layout& layout);
  Var input(Tape& tape, const Var& x) override;
  Var output(Tape& tape, const Var& x, const Var& y, const std::vector<std::int64_t>& sources) override;

 private:
  bool of_inputs_;
  nn::ParameterPtr factors_;
  autograd::RowSpread rows_;  ///< as Lora's, in one column
};

}  // namespace sherd::parallel
