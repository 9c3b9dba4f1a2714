// Which products in FP8 a card has: it is asked when its kernels are made. And what a graph of them depends
// on.
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <vector>

#include "support/expect_error.h"
#include "support/gpu/gpu.h"
#include "tensor/kernels.h"

namespace sherd::tensor {
namespace {

/// The emulated cards' compute capability while it lives.
class Capability {
 public:
  explicit Capability(const char* which) { setenv("SHERD_EMULATED_GPU_CAPABILITY", which, 1); }
  ~Capability() { unsetenv("SHERD_EMULATED_GPU_CAPABILITY"); }
};

TEST(Fp8OnACard, IsWhatItsComputeCapabilityHas) {
  SHERD_NEEDS_GPU();
  if (!test::on_emulated_gpu()) GTEST_SKIP() << "a real card has one compute capability";
  for (const char* capability : {"80", "89", "90", "100"}) {
    SCOPED_TRACE(capability);
    const Capability card(capability);
    const auto gpu = test::first_gpu_or_skip();
    const auto kernels = make_kernels(*gpu);
    for (const Fp8Recipe& recipe : fp8_recipes()) {
      const Fp8Matrix a = empty_fp8(*gpu, recipe.input, 16, 16), b = empty_fp8(*gpu, recipe.weight, 16, 16);
      kernels->to_fp8(Tensor::zeros(*gpu, {16, 16}, DType::bf16), false, a, {});
      kernels->to_fp8(Tensor::zeros(*gpu, {16, 16}, DType::bf16), false, b, {});
      const Tensor c = Tensor::empty(*gpu, {16, 16}, DType::bf16);
      const auto multiply = [&] { kernels->matmul({.c = c, .fp8_a = a, .fp8_b = b}); };
      const int number = std::atoi(capability);
      if (number == 90 || (number >= 89 && recipe.name == "current")) {
        kernels->require_fp8(recipe);
        multiply();
        gpu->synchronize();
      } else {
        sherd::testing::expect_error(ErrorKind::config, "needs a GPU of compute capability",
                                     [&] { kernels->require_fp8(recipe); });
        sherd::testing::expect_error(ErrorKind::config, "this product in FP8 needs a GPU", multiply);
      }
    }
  }
}

/// A sequence with quantising and a product, on a device with or without graphs.
class Fp8Sequence {
 public:
  explicit Fp8Sequence(bool graphs)
      : device_(device::make_cuda_device({.ordinal = device::cuda_status().gpus.front().ordinal,
                                          .timeout_seconds = 60,
                                          .graphs = graphs})),
        kernels_(make_kernels(*device_)) {
    for (int i = 0; i < 2; ++i) {
      x_[i] = Tensor::empty(*device_, {16, 48}, DType::bf16);
      kernels_->fill_normal(x_[i], {7, static_cast<std::uint64_t>(i)}, 0, 0, 1);
      a_[i] = empty_fp8(*device_, {}, 16, 48), b_[i] = empty_fp8(*device_, {}, 16, 48);
      kernels_->to_fp8(x_[i], false, b_[i], {});
      kernels_->fill(b_[i].scales, i + 1), kernels_->fill(a_[i].scales, i + 3);
    }
    c_ = Tensor::zeros(*device_, {16, 16}, DType::f32);
    device_->end_sequence();
  }
  Kernels& kernels() { return *kernels_; }

  struct Variant {
    int x = 0, codes = 0, scales = 0, left_scales = 0;
    bool transposed = false;
  };
  void run(const Variant& v) {
    const Fp8Matrix made = empty_fp8(*device_, {}, 16, 48);
    kernels_->to_fp8(v.transposed ? x_[v.x].reshape({48, 16}) : x_[v.x], v.transposed, made, {});
    Fp8Matrix a = made, b = b_[v.codes];
    a.scales = a_[v.left_scales].scales, b.scales = b_[v.scales].scales;
    kernels_->matmul({.c = c_, .fp8_a = a, .fp8_b = b});
    device_->end_sequence();
  }
  std::vector<float> result() {
    const Tensor here = to_host(*device_, c_);
    return {here.data<float>(), here.data<float>() + here.numel()};
  }
  std::uint64_t launches() const { return device_->graph_counts().launches; }

 private:
  std::shared_ptr<device::Accelerator> device_;
  std::unique_ptr<Kernels> kernels_;
  Tensor x_[2], c_;
  Fp8Matrix a_[2], b_[2];
};

TEST(Fp8OnACard, AGraphRunsWithTheScalesOfItsCall) {
  SHERD_NEEDS_GPU();
  Fp8Sequence graphs(true), plain(false);
  try {
    plain.kernels().require_fp8(fp8_recipes().front());
  } catch (const Error& error) {
    GTEST_SKIP() << error.what();
  }
  using V = Fp8Sequence::Variant;
  const V first{};
  for (const V& other :
       {V{.x = 1}, V{.codes = 1}, V{.scales = 1}, V{.left_scales = 1}, V{.transposed = true}})
    for (const V& each : {first, first, first, other, first, other, other}) {
      graphs.run(each), plain.run(each);
      ASSERT_EQ(graphs.result(), plain.result());
    }
  EXPECT_GE(graphs.launches(), 4u);
}

}  // namespace
}  // namespace sherd::tensor
