// Values of one dtype among operations of another: what input() and cast() convert, and what losses compare.
#include <gtest/gtest.h>

#include "autograd/ops.h"
#include "support/cpu_fixture.h"
#include "support/expect_error.h"

namespace sherd::autograd {
namespace {

using sherd::testing::expect_error;
using test::bytes_of;

class Cast : public ::testing::Test {
 protected:
  Tensor of(const std::vector<float>& values, DType dtype = DType::f32) {
    const Shape shape{static_cast<std::int64_t>(values.size())};
    return cpu_.convert(Tensor::of<float>(*cpu_.device, shape, values), dtype);
  }
  test::Cpu cpu_;
};

TEST_F(Cast, InputsTakeTheTapesDtypeUnlessTheyAreIntegers) {
  Tape tape(*cpu_.kernels);
  const Tensor x = of({1.0f, 0.3333333f, -2.5f}), ids = cpu_.ids({4}, 1, 9);
  EXPECT_EQ(tape.input(x).dtype(), DType::f32) << "a tape without a dtype leaves inputs alone";
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32, DType::f64}) {
    tape.input_dtype = dtype;
    const Var in = tape.input(x);
    EXPECT_EQ(in.dtype(), dtype);
    EXPECT_EQ(bytes_of(in.value()), bytes_of(cpu_.convert(x, dtype)));
    EXPECT_EQ(tape.input(ids).dtype(), DType::i32);
  }
  tape.input_dtype = DType::f32;
  EXPECT_EQ(tape.input(x).value().raw(), x.raw()) << "nothing to convert, nothing copied";
}

TEST_F(Cast, OutputsOfOperationsKeepTheirDtype) {
  Tape tape(*cpu_.kernels);
  tape.input_dtype = DType::bf16;
  const Var loss = mean_squared_error(tape.input(of({1, 2})), of({3, 4}, DType::bf16));
  EXPECT_EQ(loss.dtype(), DType::f32);
}

TEST_F(Cast, TheGradientComesBackInTheInputsDtype) {
  for (const auto recompute : {Recompute::none, Recompute::selective}) {
    Tape tape(*cpu_.kernels);
    tape.recompute = recompute;
    const Var x = tape.variable(of({1, -2, 0.5, 4}, DType::bf16));
    const Var wide = cast(x, DType::f32);
    EXPECT_EQ(wide.dtype(), DType::f32);
    EXPECT_EQ(cpu_.values(wide.value()), (std::vector<double>{1, -2, 0.5, 4}));
    // L = mean((x² - 1)²): dL/dx = (x² - 1)·x for four elements, all exact in bf16.
    tape.backward(mean_squared_error(multiply(wide, wide), of({1, 1, 1, 1})));
    EXPECT_EQ(x.grad().dtype(), DType::bf16);
    EXPECT_EQ(cpu_.values(x.grad()), (std::vector<double>{0, -6, -0.375, 60}));
  }
}

TEST_F(Cast, ToTheSameDtypeIsTheValueItself) {
  Tape tape(*cpu_.kernels);
  const Var x = tape.variable(of({1, 2}));
  EXPECT_EQ(cast(x, DType::f32).value().raw(), x.value().raw());
  EXPECT_EQ(tape.size(), 0u);
  expect_error(ErrorKind::usage, "cast: int32 to fp32",
               [&] { cast(tape.input(cpu_.ids({2}, 1, 5)), DType::f32); });
}

TEST_F(Cast, ALossComparesANarrowPredictionWithAWideTarget) {
  const float third = 1.0f / 3;  // which neither bf16 nor fp16 holds
  for (const DType dtype : {DType::bf16, DType::f16}) {
    Tape tape(*cpu_.kernels);
    const Var x = tape.variable(of({1, 2}, dtype));
    const Var loss = mean_squared_error(x, of({third, 2.5f}));
    const double a = 1 - static_cast<double>(third), b = -0.5;
    EXPECT_NEAR(cpu_.values(loss.value())[0], (a * a + b * b) / 2, 1e-7);
    tape.backward(loss);  // 2(x - y)/n, rounded once
    EXPECT_EQ(bytes_of(x.grad()), bytes_of(of({static_cast<float>(a), -0.5f}, dtype)));
  }
}

TEST_F(Cast, ALossTakesTargetsOfAnyDtype) {
  Tape tape(*cpu_.kernels);
  const Var wide = tape.variable(of({1, 2}));
  for (const DType dtype : {DType::bf16, DType::f16, DType::f64})
    EXPECT_EQ(cpu_.values(mean_squared_error(wide, of({0, 4}, dtype)).value())[0], 2.5);
  const Tensor whole = Tensor::of<std::int32_t>(*cpu_.device, {2}, std::vector<std::int32_t>{0, 4});
  EXPECT_EQ(cpu_.values(mean_squared_error(wide, whole).value())[0], 2.5);
}

}  // namespace
}  // namespace sherd::autograd
