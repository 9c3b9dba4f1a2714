#pragma once

#include <functional>
#include <memory>
#include <string>

#include "autograd/gradients.h"
#include "tensor/formats/fp8.h"

// The three products of a linear layer, in the precision that its weight asks for (Parameter::fp8): of
// autograd::linear(), and of layers that exchange tensors between these parts (sharding/parallel/linear.h).
namespace sherd::autograd {

/// The result of a linear layer's product.
enum class LinearProduct : std::uint8_t { output, input_gradient, weight_gradient };

/// How the products of a linear layer run in FP8. Parameter::fp8 of the weights of one rank's layers.
struct Fp8Layer {
  tensor::Fp8Recipe recipe;
  Tensor lost;                        ///< counts of Kernels::to_fp8(), of all layers that share this
  mutable std::int64_t elements = 0;  ///< that were quantised
  /// Is given each product before it runs, with what it would be in the dtype of its tensors; may be empty.
  std::function<void(Tape&, const Parameter&, LinearProduct, const tensor::Matmul& fp8,
                     const tensor::Matmul& plain)>
      compare;
};

/// The products of the layer that has this weight.
class LinearProducts {
 public:
  LinearProducts() = default;
  /// While a text is continued (Tape::key_cache) products are not in FP8: rows would depend on those beside
  /// them.
  explicit LinearProducts(const Var& w);

  /// The input as the weight's gradient will need it: in FP8 and transposed, where the product is in FP8 and
  /// nobody else keeps the input or can make it again.
  class Input {
   public:
    Input() = default;
    explicit Input(const Var& x) : saved_(x) {}
    explicit Input(Tensor x) : saved_(std::move(x)) {}
    bool is_parameter() const { return saved_.is_parameter(); }
    Tensor get(Tape& tape) const { return saved_.get(tape); }

   private:
    friend class LinearProducts;
    Saved saved_;
    tensor::Fp8Matrix turned_;
  };
  Input save(const Var& x) const;

  /// act(x·wᵀ + b); keeps the sum where `recorded` and there is an activation. `b` may be undefined. A weight
  /// in few bits is made whole for it, unless its product reads the blocks (Matmul::stored_b).
  /// `sources`: as of linear_by_source(): no source's rows then depend on another's; empty: one.
  LinearOutput output(Tape& tape, const Tensor& x, const Var& w, const Tensor& b, Activation activation,
                      bool recorded, std::span<const std::int64_t> sources = {}) const;
  /// Adds dy·w to the gradient of an input of shape `x`.
  void input_gradient(Tape& tape, const GradRef& dx, const Shape& x, Tensor dy, const Tensor& w,
                      std::span<const std::int64_t> sources = {}) const;
  /// dy·w, alone.
  Tensor input_gradient(Tape& tape, const Tensor& dy, const Tensor& w) const;
  /// Adds dyᵀ·x to the gradient of a weight of shape `w`, now or when weight gradients are computed. Where x
  /// is a parameter, whose lease ends with the block, now.
  void weight_gradient(Tape& tape, const GradRef& dw, const Shape& w, const Tensor& dy, const Input& x) const;
  /// The same of rows from several sources, each source's by itself (write_by_source()).
  void weight_gradient_by_source(Tape& tape, const GradRef& dw, const Shape& w, const Tensor& dy,
                                 const Input& x, std::vector<std::int64_t> sources) const;

 private:
  tensor::Fp8Matrix quantized(Tape& tape, const Tensor& x, bool turned, tensor::Fp8Rule rule) const;
  // Operands, of which `weight` is made once.
  tensor::Matmul of_rows(Tape& tape, const Tensor& x, const Tensor& w, tensor::Fp8Matrix& weight) const;
  tensor::Matmul of_gradient(Tape& tape, const Tensor& dy, const Tensor& w, tensor::Fp8Matrix& weight) const;
  tensor::Matmul of_both(Tape& tape, const Tensor& dy, const Tensor& x, tensor::Fp8Matrix turned) const;
  void compare(Tape& tape, LinearProduct kind, const tensor::Matmul& fp8, const tensor::Matmul& plain) const;
  std::vector<SourceRows> runs(std::int64_t rows, std::span<const std::int64_t> sources) const;

  ParameterPtr weight_;
  std::shared_ptr<const Fp8Layer> fp8_;  ///< null: products are in the dtype of their tensors
};

}  // namespace sherd::autograd
