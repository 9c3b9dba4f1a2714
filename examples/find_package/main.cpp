// Multiplies two matrices on an installed Sherd's CPU device.
#include <sherd/base/version.h>
#include <sherd/tensor/kernels.h>
#include <sherd/tensor/tensor.h>

#include <iostream>
#include <vector>

int main() {
  using sherd::tensor::Shape;
  using sherd::tensor::Tensor;
  const auto device = sherd::device::make_cpu_device(2);
  const auto kernels = sherd::tensor::make_kernels(*device);

  const std::vector<float> a{1, 2, 3, 4}, b{5, 6, 7, 8};
  sherd::tensor::Matmul product;
  product.a = Tensor::of<float>(*device, Shape{2, 2}, a);
  product.b = Tensor::of<float>(*device, Shape{2, 2}, b);
  product.c = Tensor::empty(*device, Shape{2, 2}, sherd::DType::f32);
  kernels->matmul(product);

  const float* c = product.c.data<float>();
  std::cout << "Sherd " << sherd::version() << ": [[" << c[0] << ", " << c[1] << "], [" << c[2] << ", " << c[3] << "]]\n";
  return c[0] == 19 && c[3] == 50 ? 0 : 1;
}
