// Products of linear layers in FP8: whose rows share scales.
#include "autograd/linear_products.h"

#include <gtest/gtest.h>

#include "autograd/experts.h"

namespace sherd::autograd {
namespace {

using tensor::Shape;

struct LinearInFp8 : ::testing::Test {
  LinearInFp8() {
    weight->shape = {16, 16};
    weight->value = filled({16, 16}, 0.5f);
    weight->grad = Tensor::empty(*device, {16, 16}, DType::bf16);
  }
  Tensor filled(const Shape& shape, float value) {
    Tensor out = Tensor::empty(*device, shape, DType::bf16);
    kernels->fill(out, value);
    return out;
  }
  void recipe(int index) {
    auto layer = std::make_shared<Fp8Layer>();
    layer->recipe = tensor::fp8_recipes()[static_cast<std::size_t>(index)];
    weight->fp8 = layer;
  }
  std::shared_ptr<device::Device> device = device::make_cpu_device(1);
  std::unique_ptr<tensor::Kernels> kernels = tensor::make_kernels(*device);
  ParameterPtr weight = std::make_shared<Parameter>();
};

/// Rows of one source that are far smaller than another's: of one scale for both nothing of them would be
/// left.
TEST_F(LinearInFp8, NoSourcesScalesDependOnAnothersRows) {
  for (const int index : {0, 1, 2}) {
    recipe(index);
    Tape tape(*kernels);
    Tensor rows = filled({5, 16}, 1);
    kernels->fill(rows.rows(3, 5), 0x1p-30);
    const Var x = tape.variable(rows);
    weight->grad_written = false;
    const Var y = linear_by_source(x, tape.parameter(weight), {}, Activation::none, {3, 2});
    for (std::int64_t i = 0; i < y.value().numel(); ++i)
      ASSERT_EQ(static_cast<float>(y.value().data<bf16>()[i]), i < 3 * 16 ? 8.0f : 0x1p-27f)
          << index << ": " << i;
    // Gradients differ likewise.
    Tensor dy = filled({5, 16}, 2);
    kernels->fill(dy.rows(3, 5), 0x1p-40);
    tape.backward({{y, dy}});
    for (std::int64_t i = 0; i < x.grad().numel(); ++i)
      ASSERT_EQ(static_cast<float>(x.grad().data<bf16>()[i]), i < 3 * 16 ? 16.0f : 0x1p-37f)
          << index << ": " << i;
  }
}

}  // namespace
}  // namespace sherd::autograd
