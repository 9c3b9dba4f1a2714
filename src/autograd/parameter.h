#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/choices.h"
#include "tensor/slice.h"
#include "tensor/tensor.h"

namespace sherd::autograd {

/// How a parameter's first value is drawn: a function of seed, name and logical index alone.
struct Init {
  enum class Kind : std::uint8_t { constant, normal, uniform };
  Kind kind = Kind::constant;
  double a = 0;  ///< the constant, the mean, or the lower bound
  double b = 0;  ///< –, the standard deviation, or the upper bound
  static Init zeros() { return {}; }
  static Init ones() { return {Kind::constant, 1, 0}; }
  static Init constant(double value) { return {Kind::constant, value, 0}; }
  static Init normal(double mean, double std) { return {Kind::normal, mean, std}; }
  static Init uniform(double low, double high) { return {Kind::uniform, low, high}; }
};

/// Where a parameter's gradients are summed over micro-batches, for operations that fold theirs into the sum
/// themselves (write_folded_grad()), past Parameter::grad.
struct GradientSum {
  tensor::Tensor to;  ///< undefined: gradients only go to Parameter::grad
  DType rounding = DType::f32;
  bool onto = false;    ///< it holds earlier micro-batches' sum
  bool folded = false;  ///< this micro-batch's gradient is in it, and nothing is in Parameter::grad
};

/// The tensors that a parameter is made of, as people know them and as they are published.
struct Packing {
  /// Each as ranges of logical indices of the first dimension, in ascending order: Q, K and V of a projection
  /// that packs them. Together they are all indices up to a last one; those behind are padding, which nothing
  /// reads. Empty: it is one tensor, without padding.
  std::vector<std::vector<tensor::Range>> tensors;
  /// Whether the tensors are published as one (GPT-2's c_attn), whose norm is taken as a whole. Optimizers of
  /// whole matrices (Muon) take each by itself.
  bool published_as_one = false;
};

struct Fp8Layer;  // autograd/linear_products.h

/// A parameter's values in few bits (tensor/formats/stored_format.h).
struct StoredValue {
  tensor::Tensor blocks;     ///< uint8
  DType dtype = DType::f32;  ///< of the values that are made of the blocks
};

/// One trainable or frozen tensor of a model, declared by a module and stored by whoever shards it.
///
/// Modules share one Parameter to tie weights. `value` is defined only while somebody holds a lease on the
/// parameter's unit (sharding/units/unit.h), of one that is kept in few bits `in_blocks` is in its place, and
/// Var::value() makes it for as long as somebody reads; `grad` only while the unit collects gradients.
/// Touched by the owning rank's thread alone, but for `stored`.
struct Parameter {
  std::string name;     ///< full dotted path, given by Module::assign_names
  tensor::Shape shape;  ///< shape that this rank's layers compute with
  /// Which part of the logical tensor that is, where model-parallel ranks hold one each; not set: all of it.
  /// Initial values and checkpoints go by logical indices.
  std::optional<tensor::Slice> slice;
  Init init;
  bool trainable = true;
  StoredFormat stored_as = StoredFormat::compute;  ///< how it is kept where it is not trainable
  bool decay = true;  ///< weight decay applies (modules switch it off for biases and norms)
  /// Whether tensor-parallel ranks, which hold the same value, each find a part of the gradient, which is
  /// their sum: so it is with norms and biases under sequence parallelism. Otherwise ranks with the same
  /// value find the same gradient.
  bool partial_gradient = false;

  Packing packing;

  /// The weight of a linear layer whose products may run in FP8: neither a head's nor a router's.
  bool in_linear = false;
  std::shared_ptr<const Fp8Layer> fp8;  ///< how its layer's products run in FP8; null: they do not

  /// A weight of which each four neighbours in a row have two that are −0, and stay so
  /// (tensor/formats/pruned.h). Rows are cut between such fours only.
  bool pruned = false;

  bool is_table = false;  ///< rows that tokens or positions look up
  int expert_rank = -1;   ///< which of the ranks that share out experts has it; −1: every rank

  tensor::Tensor value;
  StoredValue in_blocks;  ///< in the format stored_as
  tensor::Tensor grad;
  bool grad_written = false;  ///< grad holds a sum already; further contributions accumulate
  GradientSum grad_sum;
  /// The number of sources whose gradients the pass sums apart, each rounded alone (linear_by_source()): the
  /// first one's goes to `grad`, the others' to `source_grads`, unless all go to `grad_sum` one by one.
  int grad_sources = 1;
  std::vector<tensor::Tensor> source_grads;
  bool sources_written = false;      ///< each source's gradient is; else `grad` holds the sum over sources
  std::atomic<bool> stored = false;  ///< somebody shards it; from any thread (sharding/sharded_model.h)

  std::int64_t numel() const { return shape.numel(); }
  tensor::Slice logical_slice() const { return slice ? *slice : tensor::Slice::whole(shape); }
};
using ParameterPtr = std::shared_ptr<Parameter>;

}  // namespace sherd::autograd
