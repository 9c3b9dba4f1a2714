#pragma once

#include <memory>
#include <vector>

#include "base/random.h"
#include "device/device.h"
#include "tensor/kernels.h"

namespace sherd::test {

/// A CPU of two compute threads and its kernels.
struct Cpu {
  explicit Cpu(int threads = 2)
      : device(device::make_cpu_device(threads)), kernels(tensor::make_kernels(*device)) {}

  /// Standard normal values times `scale` plus `mean`, a function of `seed` and the index.
  tensor::Tensor normal(const tensor::Shape& shape, std::uint64_t seed, DType dtype = DType::f64,
                        double scale = 1.0, double mean = 0.0) {
    std::vector<double> values(static_cast<std::size_t>(shape.numel()));
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = mean + scale * normal_at({seed, 77}, i);
    return convert(tensor::Tensor::of<double>(*device, shape, values), dtype);
  }

  /// Values of [0, limit).
  tensor::Tensor ids(const tensor::Shape& shape, std::uint64_t seed, std::int32_t limit) {
    std::vector<std::int32_t> values(static_cast<std::size_t>(shape.numel()));
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = static_cast<std::int32_t>(philox({seed, 78}, i)[0] % static_cast<std::uint32_t>(limit));
    return tensor::Tensor::of<std::int32_t>(*device, shape, values);
  }

  /// A copy, in another dtype where it differs.
  tensor::Tensor convert(const tensor::Tensor& x, DType dtype) {
    tensor::Tensor out = tensor::Tensor::empty(*device, x.shape(), dtype);
    kernels->copy(x, out);
    return out;
  }

  std::vector<double> values(const tensor::Tensor& x) {
    const tensor::Tensor wide = convert(x, DType::f64);
    return {wide.data<double>(), wide.data<double>() + wide.numel()};
  }

  std::shared_ptr<device::Device> device;
  std::unique_ptr<tensor::Kernels> kernels;
};

/// The tensor's memory, for comparisons to the bit.
inline std::vector<std::byte> bytes_of(const tensor::Tensor& x) {
  return {x.raw(), x.raw() + x.bytes()};
}

}  // namespace sherd::test
