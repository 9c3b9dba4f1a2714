// An operation of one's own whose backward gives a gradient of the wrong form is the one that the error
// names.
#include <gtest/gtest.h>

#include "autograd/ops.h"
#include "support/cpu_fixture.h"
#include "support/expect_error.h"

namespace sherd::autograd {
namespace {

using sherd::testing::expect_error;
using ::testing::HasSubstr;

using Give = std::function<Tensor(Tape&, const Tensor& dy)>;

/// The identity, whose backward hands on what `give` makes of the gradient.
Var own_identity(const Var& x, const Give& give) {
  return x.tape().record(x.value(), {x}, [dx = x.grad_ref(), give](Tape& t, const Tensor& dy) {
    t.accumulate(dx, give(t, dy));
  });
}

class WrongGradient : public ::testing::Test {
 protected:
  std::string error_of(const std::function<Var(Tape&)>& loss) {
    Tape tape(*cpu_.kernels);
    try {
      tape.backward(loss(tape));
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::usage);
      return error.what();
    }
    return "";
  }
  /// tanh stands before the operation, scale behind it: neither is to blame.
  std::string error_in_the_middle(const Give& give) {
    return error_of([&](Tape& tape) {
      const Var x = tape.variable(cpu_.normal({2, 3}, 1, DType::bf16));
      return loss_of(scale(own_identity(tanh(x), give), 2));
    });
  }
  Var loss_of(const Var& y) { return mean_squared_error(y, cpu_.normal(y.shape(), 9, y.dtype())); }
  static void expect_names_own(const std::string& error) {
    EXPECT_THAT(error, HasSubstr("wrong_gradient_test.cpp:"));
    EXPECT_THAT(error, HasSubstr("own_identity"));
  }
  test::Cpu cpu_;
};

TEST_F(WrongGradient, TheOperationAndBothFormsAreNamed) {
  EXPECT_EQ(error_in_the_middle([](Tape&, const Tensor& dy) { return dy; }), "");

  const std::string shape = error_in_the_middle([](Tape&, const Tensor& dy) { return dy.reshape({3, 2}); });
  expect_names_own(shape);
  EXPECT_THAT(shape, HasSubstr("a gradient of bf16 [3, 2] for a value of bf16 [2, 3]"));

  const std::string dtype =
      error_in_the_middle([this](Tape&, const Tensor& dy) { return cpu_.convert(dy, DType::f32); });
  expect_names_own(dtype);
  EXPECT_THAT(dtype, HasSubstr("a gradient of fp32 [2, 3] for a value of bf16 [2, 3]"));

  const std::string none = error_in_the_middle([](Tape&, const Tensor&) { return Tensor(); });
  expect_names_own(none);
  EXPECT_THAT(none, HasSubstr("gave an undefined gradient"));
}

TEST_F(WrongGradient, AlsoWhereAnotherGradientIsThereAlready) {
  expect_names_own(error_of([&](Tape& tape) {
    const Var x = tanh(tape.variable(cpu_.normal({2, 3}, 1, DType::f32)));
    const Var own = own_identity(x, [](Tape& t, const Tensor&) { return t.empty({1}, DType::f32); });
    return loss_of(add(own, scale(x, 2)));  // scale's gradient comes first
  }));
}

TEST_F(WrongGradient, AlsoForAParameterAndUnderFullRecompute) {
  auto weight = std::make_shared<Parameter>();
  weight->name = "layer.weight";
  weight->shape = {4, 2};
  weight->value = cpu_.normal(weight->shape, 3, DType::f32);
  weight->grad = Tensor::empty(*cpu_.device, weight->shape, DType::f32);
  const auto body = [&](Tape& tape, const std::vector<Var>& in) {
    const Give transposed = [](Tape&, const Tensor& dy) { return dy.reshape({2, 4}); };
    return linear(in[0], own_identity(tape.parameter(weight), transposed));
  };
  const Tensor x = cpu_.normal({5, 2}, 1, DType::f32);
  const auto expect_named = [](const std::string& error) {
    expect_names_own(error);
    EXPECT_THAT(error, HasSubstr("a gradient of fp32 [2, 4] for parameter 'layer.weight' of [4, 2]"));
  };
  expect_named(error_of([&](Tape& tape) { return loss_of(body(tape, {tape.variable(x)})); }));
  expect_named(error_of([&](Tape& tape) { return loss_of(tape.recompute_later({tape.variable(x)}, body)); }));
}

TEST_F(WrongGradient, AfterAFailureTheTapeBlamesNobodyForWhatItIsHandedDirectly) {
  Tape tape(*cpu_.kernels);
  const Var x = tape.variable(cpu_.normal({2}, 1, DType::f32));
  const Var own = own_identity(x, [](Tape& t, const Tensor&) { return t.empty({3}, DType::f32); });
  EXPECT_THROW(tape.backward(loss_of(own)), Error);
  expect_error(ErrorKind::usage, "accumulate() gave a gradient of fp32 [3]",
               [&] { tape.accumulate(x.grad_ref(), tape.empty({3}, DType::f32)); });
}

}  // namespace
}  // namespace sherd::autograd
