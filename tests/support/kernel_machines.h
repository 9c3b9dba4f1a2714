#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/cpu_isa.h"
#include "base/random.h"
#include "tensor/cpu/cpu_kernels.h"

namespace sherd::test {

using tensor::Shape;
using tensor::Tensor;

inline constexpr DType floating_dtypes[] = {DType::f32, DType::bf16, DType::f16, DType::f64};

/// CPU kernels for one instruction set and number of threads.
struct Machine {
  Machine(CpuIsa which, int threads)
      : isa(which), device(device::make_cpu_device(threads)), kernels(*device, which) {}

  std::string name() const { return cat(name_of(isa), " with ", device->arena().threads(), " threads"); }

  Tensor empty(const Shape& shape, DType dtype) { return Tensor::empty(*device, shape, dtype); }

  /// Rounds to `dtype` by base/dtype.h, not by the kernels under test.
  Tensor of(const Shape& shape, DType dtype, const std::vector<double>& values) {
    Tensor out = empty(shape, dtype);
    EXPECT_EQ(static_cast<std::size_t>(shape.numel()), values.size());
    for (std::size_t i = 0; i < values.size(); ++i) {
      switch (dtype) {
        case DType::f32:
          out.data<float>()[i] = static_cast<float>(values[i]);
          break;
        case DType::bf16:
          out.data<bf16>()[i] = bf16(static_cast<float>(values[i]));
          break;
        case DType::f16:
          out.data<f16>()[i] = f16(static_cast<float>(values[i]));
          break;
        default:
          out.data<double>()[i] = values[i];
      }
    }
    return out;
  }
  Tensor ids(const Shape& shape, const std::vector<std::int32_t>& values) {
    return Tensor::of<std::int32_t>(*device, shape, values);
  }

  CpuIsa isa;
  std::shared_ptr<device::Device> device;
  tensor::cpu::CpuKernels kernels;
};

/// A machine for every instruction set this processor and DNNL_MAX_CPU_ISA allow, with one thread and with
/// three.
inline std::vector<std::unique_ptr<Machine>> all_machines() {
  std::vector<std::unique_ptr<Machine>> out;
  for (int isa = 0; isa <= static_cast<int>(cpu_isa()); ++isa)
    for (const int threads : {1, 3})
      out.push_back(std::make_unique<Machine>(static_cast<CpuIsa>(isa), threads));
  return out;
}

inline std::vector<double> values_of(const Tensor& x) {
  std::vector<double> out(static_cast<std::size_t>(x.numel()));
  for (std::size_t i = 0; i < out.size(); ++i) {
    switch (x.dtype()) {
      case DType::f32:
        out[i] = static_cast<double>(x.data<float>()[i]);
        break;
      case DType::bf16:
        out[i] = static_cast<double>(static_cast<float>(x.data<bf16>()[i]));
        break;
      case DType::f16:
        out[i] = static_cast<double>(static_cast<float>(x.data<f16>()[i]));
        break;
      default:
        out[i] = x.data<double>()[i];
    }
  }
  return out;
}

/// The double rounded to what `dtype` holds.
inline double rounded(double value, DType dtype) {
  switch (dtype) {
    case DType::f32:
      return static_cast<double>(static_cast<float>(value));
    case DType::bf16:
      return static_cast<double>(static_cast<float>(bf16(static_cast<float>(value))));
    case DType::f16:
      return static_cast<double>(static_cast<float>(f16(static_cast<float>(value))));
    default:
      return value;
  }
}

inline std::vector<double> normals(std::int64_t n, std::uint64_t stream, double scale = 1) {
  std::vector<double> out(static_cast<std::size_t>(n));
  for (std::size_t i = 0; i < out.size(); ++i)
    out[i] = scale * static_cast<double>(normal_at({11, stream}, i));
  return out;
}

/// As normals(), each already a value of `dtype`, so that references start from what the kernels see.
inline std::vector<double> normals_in(DType dtype, std::int64_t n, std::uint64_t stream, double scale = 1) {
  std::vector<double> out = normals(n, stream, scale);
  for (double& value : out) value = rounded(value, dtype);
  return out;
}

/// The largest relative error of rounding once.
inline double roundoff(DType dtype) {
  switch (dtype) {
    case DType::bf16:
      return 0x1p-8;
    case DType::f16:
      return 0x1p-11;
    case DType::f64:
      return 0x1p-53;
    default:
      return 0x1p-24;
  }
}

/// |got - want| <= |want|·(rounding of dtype + steps roundings of the compute type) + magnitude·steps of
/// them. `magnitude` is the size of the terms that cancel in `want`.
inline void expect_close(const std::vector<double>& got, const std::vector<double>& want, DType dtype,
                         double steps, double magnitude, const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  const double unit = dtype == DType::f64 ? 0x1p-53 : 0x1p-24;
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (std::isnan(want[i]) && std::isnan(got[i])) continue;
    if (std::isinf(want[i]) && got[i] == want[i]) continue;
    // fp16 loses relative accuracy below 2^-14, and everything below 2^-25; fp32 and bf16 flush below 2^-126.
    const double least = dtype == DType::f16 ? 0x1p-25 : dtype == DType::f64 ? 0x1p-1022 : 0x1p-126;
    const double bound =
        std::fabs(want[i]) * (1.01 * roundoff(dtype) + steps * unit) + magnitude * steps * unit + least;
    ASSERT_LE(std::fabs(got[i] - want[i]), bound)
        << what << ": element " << i << " is " << got[i] << ", should be " << want[i];
  }
}

/// Runs `run` on every machine. The first one's results must pass `check`, the others' must be the same bits.
inline void on_every_machine(const std::function<std::vector<Tensor>(Machine&)>& run,
                             const std::function<void(const std::vector<Tensor>&)>& check) {
  std::vector<std::vector<std::byte>> first;
  for (const auto& machine : all_machines()) {
    const std::vector<Tensor> results = run(*machine);
    for (std::size_t i = 0; i < results.size(); ++i) {
      const std::vector<std::byte> bytes(results[i].raw(), results[i].raw() + results[i].bytes());
      if (i == first.size())
        first.push_back(bytes);
      else
        ASSERT_TRUE(first[i] == bytes)
            << "result " << i << " on " << machine->name() << " has other bits than on "
            << "the first machine";
    }
    if (machine->isa == CpuIsa::portable && machine->device->arena().threads() == 1) check(results);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

}  // namespace sherd::test
