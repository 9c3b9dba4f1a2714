#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/cpu_isa.h"
#include "base/random.h"
#include "device/cuda.h"
#include "simt/emulated.h"
#include "support/full_suite.h"
#include "support/gpu/gpu.h"
#include "support/print_dtype.h"
#include "tensor/cpu/cpu_kernels.h"

namespace sherd::test {

using tensor::Shape;
using tensor::Tensor;

inline constexpr DType floating_dtypes[] = {DType::f32, DType::bf16, DType::f16, DType::f64};

/// A device and its kernels: a CPU with the loops of one instruction set and a number of threads, the CUDA
/// kernels on the emulator (tests/simt), or a GPU.
struct Machine {
  Machine(CpuIsa which, int threads)
      : Machine(cat(name_of(which), " with ", threads, " threads"), "cpu", device::make_cpu_device(threads),
                [&](device::Device& on) { return std::make_unique<tensor::cpu::CpuKernels>(on, which); }) {}
  explicit Machine(simt::Order threads_run)
      : Machine(threads_run == simt::Order::ascending ? "emulator" : "emulator, backwards", "emulator",
                device::make_cpu_device(1), [](device::Device& on) { return make_emulated_kernels(on); }) {
    order = threads_run;
  }
  explicit Machine(const std::shared_ptr<device::Accelerator>& gpu)
      : Machine(gpu->name(), "cuda", gpu, [](device::Device& on) { return tensor::make_kernels(on); }) {}

  const std::string& name() const { return label; }

  Tensor empty(const Shape& shape, DType dtype) { return Tensor::empty(*device, shape, dtype); }

  /// Rounds to `dtype` by base/dtype.h, not by the kernels under test.
  Tensor of(const Shape& shape, DType dtype, const std::vector<double>& values) {
    const auto as = [&]<class T>(T) {
      std::vector<T> converted(values.size());
      for (std::size_t i = 0; i < values.size(); ++i) converted[i] = T(static_cast<float>(values[i]));
      return holding(shape, converted);
    };
    switch (dtype) {
      case DType::f32:
        return as(float{});
      case DType::bf16:
        return as(bf16{});
      case DType::f16:
        return as(f16{});
      default:
        return holding(shape, values);
    }
  }
  Tensor ids(const Shape& shape, const std::vector<std::int32_t>& values) { return holding(shape, values); }

  template <class T>
  Tensor holding(const Shape& shape, const std::vector<T>& values) {
    EXPECT_EQ(static_cast<std::size_t>(shape.numel()), values.size());
    Tensor out = empty(shape, dtype_of<T>());
    device->copy(out.raw(), values.data(), out.bytes());
    device->synchronize();
    return out;
  }

  /// Waits for all work; throws what kernels found wrong with their data.
  void settle() {
    device->synchronize();
    if (family == "emulator") check_emulated_data(kernels);
  }

  /// The tensor where the processor can read it, when all work on it is done.
  Tensor host(const Tensor& x) {
    if (device->kind() == device::Kind::cpu) return x;
    Tensor out =
        Tensor::empty(*device, x.shape(), x.dtype(), tensor::Category::activations, device::Tier::host);
    device->copy(out.raw(), x.raw(), x.bytes());
    device->synchronize();
    return out;
  }

  std::string label, family;  ///< machines of one family give the same bits
  std::shared_ptr<device::Device> device;
  std::unique_ptr<tensor::Kernels> own;
  tensor::Kernels& kernels;
  simt::Order order = simt::Order::ascending;

 private:
  template <class Make>
  Machine(std::string label_, std::string family_, std::shared_ptr<device::Device> on, const Make& make)
      : label(std::move(label_)),
        family(std::move(family_)),
        device(std::move(on)),
        own(make(*device)),
        kernels(*own) {}
};

/// A CPU machine for every instruction set this processor and DNNL_MAX_CPU_ISA allow, with one thread and
/// with three.
inline std::vector<std::unique_ptr<Machine>> all_cpus() {
  std::vector<std::unique_ptr<Machine>> out;
  for (int isa = 0; isa <= static_cast<int>(cpu_isa()); ++isa)
    for (const int threads : {1, 3})
      out.push_back(std::make_unique<Machine>(static_cast<CpuIsa>(isa), threads));
  return out;
}

/// All CPUs, and the emulator with its threads in either order. In a run for CPUs no emulator; in one for
/// GPUs one CPU and the GPU; where there is none the test counts as skipped.
inline std::vector<std::unique_ptr<Machine>> all_machines() {
  if (cpu_run()) return all_cpus();
  if (!gpu_run()) {
    std::vector<std::unique_ptr<Machine>> out = all_cpus();
    for (const simt::Order order : {simt::Order::ascending, simt::Order::descending})
      out.push_back(std::make_unique<Machine>(order));
    return out;
  }
  std::vector<std::unique_ptr<Machine>> out;
  if (const std::shared_ptr<device::Accelerator> gpu = first_gpu_or_skip()) {
    out.push_back(std::make_unique<Machine>(CpuIsa::portable, 1));
    out.push_back(std::make_unique<Machine>(gpu));
  }
  return out;
}

/// One CPU machine, with the loops that make_kernels() chooses, and the emulator; in a run for GPUs the GPU.
/// For tests whose results are held to a reference rather than to each other.
inline std::vector<std::unique_ptr<Machine>> one_of_each() {
  std::vector<std::unique_ptr<Machine>> out = all_machines();
  const auto passed_over = [&](const std::unique_ptr<Machine>& m) {
    return gpu_run() ? m->family != "cuda" : m->family == "cpu" || m->order == simt::Order::descending;
  };
  std::erase_if(out, passed_over);
  if (!gpu_run()) out.insert(out.begin(), std::make_unique<Machine>(cpu_isa(), 2));
  return out;
}

/// The machines; in part without the emulator for fp16, whose kernels have the code of bf16, and for fp64, in
/// which nothing trains and of which only what is computed, and that it repeats itself, is tried there.
inline std::vector<std::unique_ptr<Machine>> in_part(std::vector<std::unique_ptr<Machine>> machines,
                                                     DType dtype) {
  if (!full_suite() && (dtype == DType::f16 || dtype == DType::f64))
    std::erase_if(machines, [](const std::unique_ptr<Machine>& m) { return m->family == "emulator"; });
  return machines;
}

inline std::vector<std::byte> bytes(Machine& m, const Tensor& x) {
  const Tensor readable = m.host(x);
  return {readable.raw(), readable.raw() + readable.bytes()};
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
  std::vector<double> out;
  out.reserve(static_cast<std::size_t>(n) + 3);
  for (std::uint64_t block = 0; std::ssize(out) < n; ++block)
    for (const float value : normal_block({11, stream}, block))
      out.push_back(scale * static_cast<double>(value));
  out.resize(static_cast<std::size_t>(n));
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

/// How alike the results of different families (CPU, emulator, GPU) must be.
enum class Alike { within_rounding, to_the_bit };

/// Runs `run` on the machines. The results of the first one of each family must pass `check`, the others' of
/// that family must be the same bits; and those of all families where they are to be alike to the bit.
inline void on_machines(const std::vector<std::unique_ptr<Machine>>& machines,
                        const std::function<std::vector<Tensor>(Machine&)>& run,
                        const std::function<void(const std::vector<Tensor>&)>& check,
                        Alike alike = Alike::within_rounding) {
  std::map<std::string, std::vector<std::vector<std::byte>>> first_of;
  for (const auto& machine : machines) {
    simt::set_order(machine->order);
    SCOPED_TRACE(machine->name());
    std::vector<Tensor> results = run(*machine);
    std::vector<std::vector<std::byte>> bytes;
    for (Tensor& result : results) {
      result = machine->host(result);
      bytes.emplace_back(result.raw(), result.raw() + result.bytes());
    }
    simt::set_order(simt::Order::ascending);
    const auto [first, is_first] =
        first_of.try_emplace(alike == Alike::to_the_bit ? "all" : machine->family, bytes);
    for (std::size_t i = 0; i < bytes.size(); ++i)
      ASSERT_TRUE(first->second[i] == bytes[i])
          << "result " << i << " has other bits than on the first machine";
    if (is_first) check(results);
    if (::testing::Test::HasFatalFailure()) return;
  }
}
inline void on_every_machine(const std::function<std::vector<Tensor>(Machine&)>& run,
                             const std::function<void(const std::vector<Tensor>&)>& check,
                             Alike alike = Alike::within_rounding) {
  on_machines(all_machines(), run, check, alike);
}
inline void on_every_cpu(const std::function<std::vector<Tensor>(Machine&)>& run,
                         const std::function<void(const std::vector<Tensor>&)>& check) {
  on_machines(all_cpus(), run, check);
}

}  // namespace sherd::test
