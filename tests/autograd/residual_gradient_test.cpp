// A norm in a residual branch: its gradient goes onto the one that the branch around it has left.
#include <gtest/gtest.h>

#include "autograd/ops.h"
#include "support/cpu_fixture.h"

namespace sherd::autograd {
namespace {

using test::bytes_of;

class ResidualGradient : public ::testing::TestWithParam<std::tuple<DType, bool>> {
 protected:
  ResidualGradient() {
    weight_->name = "weight", offset_->name = "offset";
    for (const ParameterPtr& p : {weight_, offset_}) {
      p->shape = {40};
      p->value = cpu_.normal({40}, p == weight_ ? 2 : 3, dtype_);
      p->grad = Tensor::empty(*cpu_.device, {40}, dtype_);
    }
  }
  Var norm(Tape& tape, const Var& x) {
    return layer_ ? layer_norm(x, tape.parameter(weight_), tape.parameter(offset_))
                  : rms_norm(x, tape.parameter(weight_));
  }
  /// The gradient that a norm's backward gives to its input by itself.
  Tensor apart(const Tensor& dy) {
    const DType compute = dtype_ == DType::f64 ? DType::f64 : DType::f32;
    const Tensor dx = Tensor::empty(*cpu_.device, dy.shape(), dtype_),
                 mean = Tensor::empty(*cpu_.device, {dy.shape().rows()}, compute),
                 rstd = Tensor::empty(*cpu_.device, {dy.shape().rows()}, compute);
    if (layer_) {
      kernels_.layer_norm(input_, weight_->value, {}, 1e-5, dx, mean, rstd);
      kernels_.layer_norm_backward(input_, weight_->value, mean, rstd, dy, dx, {}, {}, false);
    } else {
      kernels_.rms_norm(input_, weight_->value, 1e-5, dx, rstd);
      kernels_.rms_norm_backward(input_, weight_->value, rstd, dy, dx, {}, false);
    }
    return dx;
  }
  Tensor sum(const Tensor& a, const Tensor& b) {
    Tensor out = Tensor::empty(*cpu_.device, a.shape(), a.dtype());
    kernels_.add(a, b, out);
    return out;
  }

  DType dtype_ = std::get<0>(GetParam());
  bool layer_ = std::get<1>(GetParam());
  test::Cpu cpu_;
  tensor::Kernels& kernels_ = *cpu_.kernels;
  ParameterPtr weight_ = std::make_shared<Parameter>(), offset_ = std::make_shared<Parameter>();
  Tensor input_ = cpu_.normal({9, 40}, 1, dtype_), target_ = cpu_.normal({9, 40}, 4, dtype_);
};
INSTANTIATE_TEST_SUITE_P(All, ResidualGradient,
                         ::testing::Combine(::testing::Values(DType::f32, DType::bf16, DType::f16,
                                                              DType::f64),
                                            ::testing::Bool()));

TEST_P(ResidualGradient, HasTheBitsOfTheSumOfBoth) {
  Tape tape(kernels_);
  const Var x = tape.variable(input_);
  const Var y = add(x, scale(norm(tape, x), 0.5));
  Var loss = mean_squared_error(y, target_);
  tape.backward(loss);

  Tape other(kernels_);
  const Var end = other.variable(y.value());
  other.backward(mean_squared_error(end, target_));
  const Tensor dy = end.grad(), half = Tensor::empty(*cpu_.device, dy.shape(), dtype_);
  kernels_.scale(dy, 0.5, half);
  EXPECT_EQ(bytes_of(x.grad()), bytes_of(sum(dy, apart(half))));
}

TEST_P(ResidualGradient, IsLeftAsItIsWhereSomebodyElseHoldsIt) {
  const Tensor dy = cpu_.normal({9, 40}, 5, dtype_);
  const std::vector<std::byte> before = bytes_of(dy);
  Tape tape(kernels_);
  const Var x = tape.variable(input_);
  const Var y = add(x, norm(tape, x));
  tape.backward({{y, dy}});
  EXPECT_EQ(bytes_of(dy), before);
  EXPECT_EQ(bytes_of(x.grad()), bytes_of(sum(dy, apart(dy))));
}

/// The second norm adds to what the first one left, without memory of its own.
TEST_P(ResidualGradient, GathersOverNormsInPlace) {
  const Tensor dy = cpu_.normal({9, 40}, 5, dtype_), dz = cpu_.normal({9, 40}, 6, dtype_);
  Tape tape(kernels_);
  const Var x = tape.variable(input_), first = norm(tape, x), second = norm(tape, x);
  device::Ledger& ledger = cpu_.device->ledger();
  ledger.reset_peaks();
  const std::uint64_t before = ledger.current(device::Tier::device, device::Category::activations);
  tape.backward({{first, dy}, {second, dz}});
  EXPECT_LT(ledger.peak(device::Tier::device, device::Category::activations),
            before + input_.bytes() * 3 / 2);
  EXPECT_EQ(bytes_of(x.grad()), bytes_of(sum(apart(dz), apart(dy))));
}

TEST_P(ResidualGradient, OfAParameterGoesThere) {
  const Tensor dy = cpu_.normal({9, 40}, 5, dtype_), dz = cpu_.normal({9, 40}, 6, dtype_);
  const auto own = std::make_shared<Parameter>();
  own->name = "own", own->shape = input_.shape(), own->value = input_;
  own->grad = Tensor::empty(*cpu_.device, input_.shape(), dtype_);
  Tape tape(kernels_);
  const Var x = tape.parameter(own), first = norm(tape, x), second = norm(tape, x);
  tape.backward({{first, dy}, {second, dz}});
  EXPECT_EQ(bytes_of(own->grad), bytes_of(sum(apart(dz), apart(dy))));
}

}  // namespace
}  // namespace sherd::autograd
