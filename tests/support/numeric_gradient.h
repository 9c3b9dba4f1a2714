#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "autograd/tape.h"
#include "support/cpu_fixture.h"

namespace sherd::test {

/// The derivative of `f` by each of `values`, which it reads and which are restored: central differences of
/// fourth order, (8(f(x+h) - f(x-h)) - (f(x+2h) - f(x-2h))) / 12h, whose error of some 1e-12 leaves room
/// under a tolerance of 1e-6.
inline std::vector<double> numeric_gradient(std::span<double> values, const std::function<double()>& f) {
  std::vector<double> out;
  for (double& x : values) {
    const double at = x, h = 1e-3 * std::max(1.0, std::abs(at));
    const auto shifted = [&](double by) {
      x = at + by;
      return f();
    };
    out.push_back((8 * (shifted(h) - shifted(-h)) - (shifted(2 * h) - shifted(-2 * h))) / (12 * h));
    x = at;
  }
  return out;
}

/// Every element within `tolerance` of the largest one, and the whole within `tolerance` of its norm.
inline void expect_close_gradients(const std::vector<double>& got, const std::vector<double>& want,
                                   const std::string& what, double tolerance = 1e-6) {
  ASSERT_EQ(got.size(), want.size()) << what;
  double largest = 0, norm = 0, off = 0;
  for (const double w : want) largest = std::max(largest, std::abs(w)), norm += w * w;
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_LE(std::abs(got[i] - want[i]), tolerance * std::max(largest, 1e-3))
        << what << ", element " << i << ": " << got[i] << " where differences give " << want[i];
    off += (got[i] - want[i]) * (got[i] - want[i]);
  }
  EXPECT_LE(std::sqrt(off), tolerance * std::max(std::sqrt(norm), 1e-3)) << what;
}

/// A scalar function of some values.
using ScalarFunction = std::function<autograd::Var(autograd::Tape&, const std::vector<autograd::Var>&)>;

/// Compares the tape's gradient of `f` by every input (fp64) with central differences, without and with
/// selective recompute.
inline void expect_gradients(Cpu& cpu, std::vector<tensor::Tensor> inputs, const ScalarFunction& f,
                             double tolerance = 1e-6) {
  const auto evaluate = [&] {
    autograd::Tape tape(*cpu.kernels);
    autograd::Tape::NoGrad pause(tape);
    std::vector<autograd::Var> vars;
    for (const auto& input : inputs) vars.push_back(tape.input(input));
    return *f(tape, vars).value().data<double>();
  };
  std::vector<std::vector<double>> numeric;
  for (auto& input : inputs)
    numeric.push_back(
        numeric_gradient({input.data<double>(), static_cast<std::size_t>(input.numel())}, evaluate));
  for (const auto recompute : {Recompute::none, Recompute::selective}) {
    autograd::Tape tape(*cpu.kernels);
    tape.recompute = recompute;
    std::vector<autograd::Var> vars;
    for (const auto& input : inputs) vars.push_back(tape.variable(input));
    tape.backward(f(tape, vars));
    EXPECT_EQ(tape.size(), 0u);
    for (std::size_t i = 0; i < vars.size(); ++i) {
      ASSERT_TRUE(vars[i].grad().defined()) << "input " << i << " got no gradient";
      expect_close_gradients(cpu.values(vars[i].grad()), numeric[i], "input " + std::to_string(i), tolerance);
    }
  }
}

}  // namespace sherd::test
