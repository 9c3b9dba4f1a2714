#include <cctype>
#include <cstdlib>

#include "config/sections/tables.h"

namespace sherd::config {
namespace {

Key<Device> threads_key() {
  constexpr int most = 4096;
  const auto read = [](const Value& value) {
    return value.node.is_text("auto") ? 0 : static_cast<int>(value.integer(0, most));
  };
  return field_key("threads_per_rank", "3", &Device::threads_per_rank, read)
      .takes({integers(0, most).words + ", or \"auto\"",
              cat(R"({"anyOf": [)", integers(0, most).schema, R"(, {"const": "auto"}]})")});
}

std::string computes_in(const Config& config) {
  return cat("no effect: the model computes in ", sherd::name_of(config.precision.compute));
}

/// A row of GPUs; `why` knows more reasons than that there is none.
Key<Device> of_gpus(Key<Device> key, std::string (*why)(const Config&) = nullptr) {
  return std::move(key).with(idle([why](const Config& config) -> std::string {
    if (config.device.type == DeviceType::cpu)
      return "no effect: device.type is \"cpu\", and this is a matter of GPUs";
    return why ? why(config) : "";
  }));
}

std::string why_no_tf32(const Config& config) {
  return config.device.tf32 && config.precision.compute != DType::f32 ? computes_in(config) : "";
}

std::string why_not_fused(const Config& config) {
  if (!config.device.fused_gelu) return "";
  if (config.precision.compute == DType::f32) return computes_in(config);
  if (!config.model || config.model->activation == FfnActivation::gelu_tanh) return "";
  return cat("no effect: model.activation is \"", name_of(config.model->activation), "\", not \"gelu_tanh\"");
}

std::string why_deterministic(const Config& config) {
  if (config.device.deterministic_attention) return "";
  const char* own = ", where Sherd's own kernels run, which are deterministic";
  if (config.precision.compute == DType::f32) return computes_in(config) + own;
  return config.model && config.model->attention_dropout > 0
             ? cat("no effect: model.attention_dropout is on", own)
             : "";
}

/// Nothing lies in host memory.
bool nothing_offloaded(const Config& config) {
  return config.device.host_memory_limit > 0 && config.zero.offload_param.device == OffloadDevice::none &&
         config.zero.offload_optimizer.device == OffloadDevice::none &&
         !(config.training.cpu_checkpointing && config.training.recompute == Recompute::full);
}

Table<Device> device_table() {
  using T = Device;
  return {Auto::is_a_value,
          {choice("type", &T::type, {"auto", "cpu", "cuda"}, "\"cpu\"",
                  {{"gpu", "cuda"}, {"gpus", "cuda"}, {"nvidia", "cuda"}})
               .means("auto takes GPUs where there are any; cpu leaves them alone, cuda demands them",
                      Concerns::machine),
           threads_key().means("compute threads; 0 or auto: cores divided by the ranks of this machine",
                               Concerns::machine),
           boolean("bind_cores", &T::bind_cores)
               .means("pins each rank's threads to cores of its own", Concerns::machine),
           bytes("device_memory_limit", &T::device_memory_limit, "\"512MiB\"")
               .means("bytes that a rank may allocate on its device, on CPUs in the tier that plays a small "
                      "GPU; 0: no limit",
                      Concerns::machine),
           bytes("host_memory_limit", &T::host_memory_limit, "\"8GB\"")
               .means("bytes that a rank may allocate in host memory, of what is offloaded; 0: no limit",
                      Concerns::machine, idle(nothing_offloaded, "no effect: nothing is offloaded")),
           of_gpus(boolean("tf32", &T::tf32), why_no_tf32)
               .means("GPU: products of an fp32 model round their operands to 10 bits of fraction",
                      Concerns::training),
           of_gpus(boolean("fused_gelu", &T::fused_gelu), why_not_fused)
               .means("GPU: GELU inside the product, before it rounds; recompute may then change last bits",
                      Concerns::training),
           of_gpus(boolean("deterministic_attention", &T::deterministic_attention), why_deterministic)
               .means("GPU: attention's gradient repeats to the bit; false lets cuDNN sum atomically, which "
                      "is faster"),
           of_gpus(boolean("cuda_graphs", &T::cuda_graphs))
               .means("GPU: runs what blocks queue as [CUDA graphs](gpu.md)"),
           of_gpus(real("peak_tflops", &T::peak_tflops, "989.4", 0))
               .means("GPU: dense TFLOP/s of one in the model's dtype, for MFU; 0 or auto: the data sheet's",
                      Auto::to_default, Concerns::machine)}};
}

}  // namespace

std::optional<std::uint64_t> bytes_of(const std::string& text) {
  constexpr std::pair<std::string_view, double> units[] = {{"B", 1},        {"KB", 1e3},     {"MB", 1e6},
                                                           {"GB", 1e9},     {"TB", 1e12},    {"KiB", 0x1p10},
                                                           {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40}};
  char* end = nullptr;
  const double amount = std::strtod(text.c_str(), &end);
  std::string_view unit(end);
  while (!unit.empty() && std::isspace(static_cast<unsigned char>(unit.front()))) unit.remove_prefix(1);
  if (end == text.c_str() || !(amount >= 0)) return {};
  for (const auto& [name, factor] : units)
    if (unit == name && amount * factor < 0x1p63) return static_cast<std::uint64_t>(amount * factor);
  return {};
}

Key<Config> device_key() {
  return section("device", &Config::device, device_table()).with(Concerns::run);
}

}  // namespace sherd::config
