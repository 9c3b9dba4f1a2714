#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tensor/kernels.h"

namespace sherd::bench {

struct KernelRoundsOptions {
  bool cuda = false;  ///< the first GPU instead of the processor
  int threads = 1, rounds = 15;
  std::string filter;  ///< only cases whose "name.dtype" contains it
};

/// A kernel's call, with what it must move at least: a tensor that is read and written counts twice.
struct MovingCase {
  std::string name;
  std::vector<tensor::Tensor> reads, writes;
  std::function<void()> run;
};

/// Times kernels of one device and prints a line of JSON for each: those that move memory in turn with a copy
/// of as many bytes, the others by their products. A time is the best of all rounds. Those of a GPU are of as
/// many calls as take some milliseconds, from an idle GPU to an idle one.
class KernelRounds {
 public:
  explicit KernelRounds(const KernelRoundsOptions& options);
  ~KernelRounds();

  device::Device& device() { return *device_; }
  tensor::Kernels& kernels() { return *kernels_; }
  bool cuda() const { return options_.cuda; }
  bool wanted(const std::string& name, DType dtype) const;

  /// Random numbers: constant ones draw less power, and are faster.
  tensor::Tensor make(const tensor::Shape& shape, DType dtype, device::Tier tier = device::Tier::device);
  tensor::Tensor ids(std::int64_t n, std::int32_t limit);

  void measure(const MovingCase& test, DType dtype);
  /// `flops`: multiply-adds of a call, times two.
  void measure_products(const std::string& name, DType dtype, double flops, const std::function<void()>& run);
  /// Lines "name: figures" about everything measured.
  void print_summary() const;

 private:
  struct Rate {
    std::string name;
    double of_copy = 0, tflops = 0, gigabytes = 0;
  };
  double now() const;
  int calls_for(const std::function<void()>& run);
  double seconds_of(const std::function<void()>& run, int calls);
  void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes);

  KernelRoundsOptions options_;
  std::shared_ptr<device::Device> device_;
  std::unique_ptr<tensor::Kernels> kernels_;
  std::vector<Rate> rates_;
};

}  // namespace sherd::bench
