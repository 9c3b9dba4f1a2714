#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

#include "support/expect_error.h"
#include "support/gpu/lazy_cuda.h"
#include "tensor/tensor.h"

namespace sherd::tensor {
namespace {

using device::Tier;
using sherd::testing::LazyCudaDevice;
using ::testing::ElementsAre;

std::vector<float> floats(const Tensor& x) {
  return {x.data<float>(), x.data<float>() + x.numel()};
}

TEST(HostCopies, go_there_and_back_in_order) {
  LazyCudaDevice device;
  std::vector<float> values{1, 2, 3};
  const Tensor there = Tensor::of<float>(device, {3}, values);
  values = {7, 7, 7};  // may be reused at once
  const Tensor back = to_host(device, there);
  EXPECT_THAT(floats(back), ElementsAre(1, 2, 3));
  EXPECT_NE(back.raw(), there.raw());
  EXPECT_EQ(device.ledger().current(Tier::host, Category::workspace), 3 * sizeof(float));
}

TEST(HostCopies, do_not_overwrite_what_an_earlier_copy_still_reads) {
  LazyCudaDevice device;
  std::vector<Tensor> there;
  for (int i = 0; i < 5; ++i) {
    const std::vector<float> values(100, static_cast<float>(i));
    there.push_back(Tensor::of<float>(device, {100}, values));
  }
  for (int i = 0; i < 5; ++i) EXPECT_EQ(floats(to_host(device, there[static_cast<std::size_t>(i)]))[99], i);
}

TEST(HostCopies, see_what_kernels_did_before) {
  LazyCudaDevice device;
  const Tensor x = Tensor::zeros(device, {2}, DType::f32);
  device.submit(device.compute_stream(), [at = x.data<float>()] { at[1] = 5; });
  EXPECT_EQ(read_scalar(device, x.range(1, 2)), 5);
  EXPECT_EQ(read_scalar(device, x.range(0, 1)), 0);
}

TEST(HostCopies, are_the_tensor_itself_on_cpus) {
  const auto device = device::make_cpu_device(1);
  const Tensor x = Tensor::of<float>(*device, {1}, std::vector<float>{4});
  EXPECT_EQ(to_host(*device, x).raw(), x.raw());
  EXPECT_EQ(read_scalar(*device, x), 4);
}

TEST(ReadScalar, takes_one_floating_number) {
  const auto device = device::make_cpu_device(1);
  EXPECT_EQ(read_scalar(*device, Tensor::of<bf16>(*device, {1}, std::vector<bf16>{bf16(2.5f)})), 2.5);
  EXPECT_EQ(read_scalar(*device, Tensor::of<double>(*device, {}, std::vector<double>{1e-300})), 1e-300);
  sherd::testing::expect_error(ErrorKind::usage, "one number was expected", [&] {
    read_scalar(*device, Tensor::of<float>(*device, {2}, std::vector<float>{1, 2}));
  });
  sherd::testing::expect_error(ErrorKind::usage, "no floating number", [&] {
    read_scalar(*device, Tensor::of<std::int32_t>(*device, {1}, std::vector<std::int32_t>{1}));
  });
}

}  // namespace
}  // namespace sherd::tensor
