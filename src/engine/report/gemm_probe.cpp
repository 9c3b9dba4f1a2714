#include "engine/report/gemm_probe.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iomanip>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/cpu_isa.h"
#include "base/error.h"
#include "base/files.h"
#include "base/log.h"
#include "base/random.h"
#include "base/version.h"
#include "tensor/library_version.h"

namespace sherd::engine {
namespace fs = std::filesystem;
using tensor::Shape;
using tensor::Tensor;

double measure_gemm_rate(tensor::Kernels& kernels, DType dtype, double seconds) {
  using Clock = std::chrono::steady_clock;
  constexpr std::int64_t rows = 1024, inner = 768, columns = 3072;
  tensor::Device& device = kernels.device();
  tensor::Matmul product;
  product.a = Tensor::empty(device, Shape{rows, inner}, dtype, device::Category::workspace);
  product.b = Tensor::empty(device, Shape{inner, columns}, dtype, device::Category::workspace);
  product.c = Tensor::empty(device, Shape{rows, columns}, dtype, device::Category::workspace);
  // Random values: processors draw less power, and run faster, on constant ones.
  kernels.fill_normal(product.a, RandomKey{1, 1}, 0, 0, 1);
  kernels.fill_normal(product.b, RandomKey{1, 2}, 0, 0, 0.02);
  kernels.matmul(product);
  device.synchronize();

  const auto start = Clock::now();
  double best = std::numeric_limits<double>::infinity();
  for (int run = 0; run == 0 || std::chrono::duration<double>(Clock::now() - start).count() < seconds;
       ++run) {
    const auto before = Clock::now();
    kernels.matmul(product);
    device.synchronize();
    best = std::min(best, std::chrono::duration<double>(Clock::now() - before).count());
  }
  return 2.0 * rows * inner * columns / best;
}

std::optional<fs::path> default_cache_folder() {
  if (const char* cache = std::getenv("XDG_CACHE_HOME"); cache && cache[0] == '/')
    return fs::path(cache) / "sherd";
  if (const char* home = std::getenv("HOME"); home && home[0] == '/') return fs::path(home) / ".cache/sherd";
  return std::nullopt;
}

std::string cpu_model() {
  std::ifstream in("/proc/cpuinfo");
  for (std::string line; std::getline(in, line);)
    if (line.starts_with("model name"))
      if (const auto colon = line.find(':'); colon + 2 < line.size()) return line.substr(colon + 2);
  return "unknown";
}

namespace {

std::string key_of(int threads, DType dtype) {
  return cat(cpu_model(), " | ", threads, " threads | ", name_of(dtype), " | ", name_of(cpu_isa()),
             cpu_has_bf16_products() ? "+bf16" : "", cpu_has_bf16_tiles() ? "+tiles" : "", " | ",
             tensor::matmul_library(), " | Sherd ", version());
}

fs::path file_of(const fs::path& folder, const std::string& key) {
  std::ostringstream name;
  name << "gemm-" << std::hex << std::setw(16) << std::setfill('0') << stable_hash(key) << ".json";
  return folder / name.str();
}

struct KeptRate {
  double flops_per_second = 0;  ///< 0: none
  int rounds = 0;               ///< measurements of which it is the fastest
};

KeptRate read_rate(const fs::path& path, const std::string& key) {
  std::ifstream in(path);
  if (!in) return {};
  const auto object = nlohmann::json::parse(in, nullptr, false);
  if (!object.is_object() || object.value("key", nlohmann::json()) != key) return {};
  const auto rate = object.value("flops_per_second", nlohmann::json());
  const auto rounds = object.value("rounds", nlohmann::json(1));
  if (!rate.is_number() || !std::isfinite(rate.get<double>()) || rate.get<double>() <= 0) return {};
  if (!rounds.is_number_integer()) return {};
  return {rate.get<double>(), rounds.get<int>()};
}

void keep_rate(const fs::path& path, const std::string& key, const KeptRate& kept) {
  try {
    fs::create_directories(path.parent_path());
    const nlohmann::json object{
        {"key", key}, {"flops_per_second", kept.flops_per_second}, {"rounds", kept.rounds}};
    write_file_atomically(path, object.dump() + '\n');
  } catch (const std::exception& error) {  // full, read-only or shared home: the next run measures again
    log_debug("the measured GEMM rate was not kept: ", error.what());
  }
}

}  // namespace

GemmRate gemm_rate(int threads, DType dtype, const GemmProbe& probe) {
  const std::string key = key_of(threads, dtype);
  const KeptRate kept = probe.cache_folder ? read_rate(file_of(*probe.cache_folder, key), key) : KeptRate{};
  const bool enough = kept.flops_per_second >= probe.reached && kept.rounds >= probe.rounds && !probe.refresh;
  if (kept.flops_per_second > 0 && enough) return {kept.flops_per_second, true};
  const auto device = device::make_cpu_device(threads);
  const auto kernels = tensor::make_kernels(*device);
  const double rate = std::max(measure_gemm_rate(*kernels, dtype, probe.seconds), probe.reached);
  const KeptRate best{std::max(rate, kept.flops_per_second), kept.rounds + 1};
  if (probe.cache_folder) keep_rate(file_of(*probe.cache_folder, key), key, best);
  return {best.flops_per_second, kept.flops_per_second >= rate};
}

}  // namespace sherd::engine
