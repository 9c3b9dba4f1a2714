// Models that are lists of parts: the whole, and its parts on tapes of their own between which values and
// gradients are handed on, give the same bits; and the whole gives what its formula says.
#include "nn/layered_model.h"

#include <gtest/gtest.h>

#include <cmath>

#include "autograd/ops.h"
#include "nn/layers.h"
#include "support/expect_error.h"
#include "support/plain_parameters.h"

namespace sherd::nn {
namespace {

using tensor::Tensor;
using test::bytes_of;

class Layered : public ::testing::Test {
 protected:
  Layered() : model_(layers(), input, loss), parameters_(*cpu_.kernels, model_, DType::f32) {}

  static std::vector<std::shared_ptr<Layer>> layers() {
    return {std::make_shared<Linear>(4, 6), std::make_shared<Function>(autograd::tanh),
            std::make_shared<Dropout>(0.25f), std::make_shared<Linear>(6, 3)};
  }
  static Var input(Tape& tape, const tensor::Batch& batch) { return tape.input(batch.at("x")); }
  static Var loss(const Var& y, const tensor::Batch& batch) {
    return autograd::mean_squared_error(y, batch.at("y"));
  }
  std::vector<std::vector<std::byte>> gradients() const {
    std::vector<std::vector<std::byte>> out;
    for (const auto& p : parameters_.all()) out.push_back(bytes_of(p->grad));
    return out;
  }

  test::Cpu cpu_;
  SequentialModel model_;
  test::PlainParameters parameters_;
  tensor::Batch batch_{{"x", cpu_.normal({5, 4}, 1, DType::f32)}, {"y", cpu_.normal({5, 3}, 2, DType::f32)}};
};

TEST_F(Layered, ASequentialModelIsItsFormula) {
  Tape tape(*cpu_.kernels);
  tape.training = false;
  const double got = *model_(tape, batch_).value().data<float>();
  EXPECT_EQ(parameters_.all()[2]->name, "3.weight");
  const auto values = [&](int i) {
    return cpu_.values(parameters_.all()[static_cast<std::size_t>(i)]->value);
  };
  const auto x = cpu_.values(batch_.at("x")), y = cpu_.values(batch_.at("y"));
  const auto w0 = values(0), b0 = values(1), w3 = values(2), b3 = values(3);
  double sum = 0;
  for (std::size_t row = 0; row < 5; ++row)
    for (std::size_t out = 0; out < 3; ++out) {
      double value = b3[out];
      for (std::size_t mid = 0; mid < 6; ++mid) {
        double h = b0[mid];
        for (std::size_t in = 0; in < 4; ++in) h += w0[mid * 4 + in] * x[row * 4 + in];
        value += w3[out * 6 + mid] * std::tanh(h);
      }
      sum += (value - y[row * 3 + out]) * (value - y[row * 3 + out]);
    }
  EXPECT_NEAR(got, sum / 15, 1e-5);
}

TEST_F(Layered, PartsOnTapesOfTheirOwnGiveTheBitsOfOne) {
  Tape whole(*cpu_.kernels);
  whole.random = {1, 2};
  const Var loss = model_(whole, batch_);
  const auto expected_loss = bytes_of(loss.value());
  whole.backward(loss);
  const auto expected = gradients();
  parameters_.zero_grad();

  std::deque<Tape> tapes;
  std::vector<Var> in, out;
  for (std::size_t part = 0; part < model_.parts(); ++part) {
    Tape& tape = tapes.emplace_back(*cpu_.kernels);
    tape.random = {1, 2};
    in.push_back(part == 0 ? Var() : tape.variable(out.back().value()));
    out.push_back(model_.run(tape, part, part + 1, in.back(), batch_));
  }
  EXPECT_EQ(bytes_of(out.back().value()), expected_loss);
  tapes.back().backward(out.back());
  for (std::size_t part = model_.parts() - 1; part-- > 0;)
    tapes[part].backward({{out[part], in[part + 1].grad()}});
  EXPECT_EQ(gradients(), expected);
}

/// As two ranks would see it, one after the other.
class Halves final : public Stages {
 public:
  explicit Halves(std::size_t first) : first_(first) {}
  bool second = false;  ///< which half is here
  Tensor carried;

  bool has(std::size_t part) const override { return (part >= first_) == second; }
  Var cross(Tape& tape, std::size_t part, const Var& x) override {
    if (part != first_) return x;
    if (second) return tape.input(carried);
    carried = x.value();
    return {};
  }
  Tensor from_last(Tape&, const Tensor& value) override { return value; }

 private:
  std::size_t first_;
};

TEST_F(Layered, StagesCarryWhatCrossesThem) {
  Tape tape(*cpu_.kernels);
  Tape::NoGrad pause(tape);
  tape.training = false;
  const auto expected = bytes_of(model_(tape, batch_).value());
  Halves stages(2);
  model_.set_stages(&stages);
  EXPECT_FALSE(model_(tape, batch_).defined());
  EXPECT_EQ(stages.carried.shape(), (Shape{5, 6}));
  stages.second = true;
  EXPECT_EQ(bytes_of(model_(tape, {{"y", batch_.at("y")}}).value()), expected);
}

TEST(LayeredErrors, NameWhatIsMissing) {
  testing::expect_error(ErrorKind::usage, "needs layers, an input and a loss",
                        [] { SequentialModel({}, nullptr, nullptr); });
}

}  // namespace
}  // namespace sherd::nn
