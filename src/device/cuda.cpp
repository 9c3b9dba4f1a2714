#include "device/cuda.h"

#include <string_view>

#include "base/error.h"

namespace sherd::device {
namespace {

/// One card's data sheet, dense (the sheets of Hopper and later print twice that, for sparse matrices).
struct Card {
  std::string_view name;  ///< part of what the driver calls it, in whole words
  int processors;         ///< multiprocessors of the whole card
  double half_tflops;     ///< bf16 and fp16 on tensor cores; TF32 is half of it
  double single_tflops;   ///< fp32 without tensor cores
};

// The first whose name occurs counts. A table, because tensor cores of Hopper run at a lower clock than the
// one that the driver names (H100 SXM: 1.83 of 1.98 GHz).
constexpr Card cards[] = {
    {"A100", 108, 311.9, 19.5},      {"A800", 108, 311.9, 19.5},   {"A30", 56, 165, 10.3},
    {"H100 PCIe", 114, 756.4, 51.2}, {"H100 NVL", 132, 835.5, 60}, {"H100", 132, 989.4, 66.9},
    {"H800 PCIe", 114, 756.4, 51.2}, {"H800", 132, 989.4, 66.9},   {"H200 NVL", 132, 835.5, 60},
    {"H200", 132, 989.4, 66.9},      {"GH200", 132, 989.4, 66.9},  {"H20", 78, 148, 44},
    {"B200", 148, 2250, 75},
};

bool alphanumeric(char c) {
  return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z');
}

/// Whether `words` occur in `name` as whole words: an "RTX A1000" is no "A100".
bool names(std::string_view name, std::string_view words) {
  const std::size_t at = name.find(words);
  if (at == std::string_view::npos) return false;
  const std::size_t end = at + words.size();
  return (at == 0 || !alphanumeric(name[at - 1])) && (end == name.size() || !alphanumeric(name[end]));
}

/// Floating-point operations of one multiprocessor in a cycle.
struct PerCycle {
  double half = 0, single = 0;
};

PerCycle per_cycle(const CudaGpu& gpu) {
  const int capability = gpu.major * 10 + gpu.minor;
  // GeForce cards sum 16-bit products in fp32 at half the rate of the same chip elsewhere.
  const double half = gpu.name.find("GeForce") == std::string::npos ? 1 : 0.5;
  switch (capability) {
    case 80:
      return {2048, 128};
    case 86:
    case 89:
      return {1024 * half, 256};
    case 90:
      return {4096, 256};
    default:
      return {};
  }
}

}  // namespace

double peak_flops(const CudaGpu& gpu, DType dtype, bool tf32) {
  if (dtype != DType::bf16 && dtype != DType::f16 && dtype != DType::f32) return 0;
  const bool on_tensor_cores = dtype != DType::f32 || tf32;
  const double part = dtype == DType::f32 ? 0.5 : 1;  // TF32's, of the 16-bit rate
  for (const Card& card : cards)
    if (names(gpu.name, card.name))
      return 1e12 * (on_tensor_cores ? part * card.half_tflops : card.single_tflops) * gpu.processors /
             card.processors;
  const PerCycle rate = per_cycle(gpu);
  return (on_tensor_cores ? part * rate.half : rate.single) * gpu.processors * gpu.clock_hz;
}

int cuda_ordinal_for(int local_rank, int gpus) {
  require(local_rank >= 0 && gpus > 0, "no GPU can be chosen for local rank ", local_rank, " among ", gpus);
  return local_rank % gpus;
}

}  // namespace sherd::device
