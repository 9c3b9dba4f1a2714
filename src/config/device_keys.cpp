#include "config/bytes.h"
#include "config/tables.h"

namespace sherd::config {
namespace {

std::uint64_t read_bytes(const Value& value) {
  if (value.node.is(Node::Kind::integer) || value.node.is(Node::Kind::number))
    return static_cast<std::uint64_t>(value.integer(0));
  if (const auto bytes = bytes_of(value.node.text)) return *bytes;
  value.error("must be ", bytes_form, ", not ", value.node.brief());
}

Table<Device> device_table() {
  using T = Device;
  Table<T> table;
  table.keys.push_back(choice("type", &T::type, {"auto", "cpu", "cuda"}, "\"cpu\"",
                              {{"gpu", "cuda"}, {"gpus", "cuda"}, {"nvidia", "cuda"}}));
  constexpr int most_threads = 4096;
  table.keys.push_back(custom<T>("threads_per_rank", "3", [](T& device, const Value& value) {
                         device.threads_per_rank = value.node.is_text("auto")
                                                       ? 0
                                                       : static_cast<int>(value.integer(0, most_threads));
                       }).takes(integers(0, most_threads) + ", or \"auto\""));
  table.keys.push_back(boolean("bind_cores", &T::bind_cores));
  table.keys.push_back(custom<T>("device_memory_limit", "\"512MiB\"", [](T& device, const Value& value) {
                         device.device_memory_limit = read_bytes(value);
                       }).takes(bytes_form));
  table.keys.push_back(custom<T>("host_memory_limit", "\"8GB\"", [](T& device, const Value& value) {
                         device.host_memory_limit = read_bytes(value);
                       }).takes(bytes_form));
  table.keys.push_back(boolean("tf32", &T::tf32));
  table.keys.push_back(boolean("fused_gelu", &T::fused_gelu));
  table.keys.push_back(boolean("deterministic_attention", &T::deterministic_attention));
  table.keys.push_back(boolean("cuda_graphs", &T::cuda_graphs));
  table.keys.push_back(real("peak_tflops", &T::peak_tflops, "989.4", 0).with_auto(Auto::to_default));
  describe(
      table.keys,
      {{"type", "auto takes GPUs where there are any; cpu leaves them alone, cuda demands them"},
       {"threads_per_rank", "compute threads; 0 or auto: cores divided by the ranks of this machine"},
       {"bind_cores", "pins each rank's threads to cores of its own"},
       {"device_memory_limit",
        "bytes that a rank may allocate on its device, on CPUs in the tier that plays a "
        "small GPU; 0: no limit"},
       {"host_memory_limit",
        "bytes that a rank may allocate in host memory, of what is offloaded; 0: no limit"},
       {"tf32", "GPU: products of an fp32 model round their operands to 10 bits of fraction"},
       {"fused_gelu", "GPU: GELU inside the product, before it rounds; recompute may then change last bits"},
       {"deterministic_attention",
        "GPU: attention's gradient repeats to the bit; false lets cuDNN sum atomically, which is faster"},
       {"cuda_graphs", "GPU: runs what blocks queue as [CUDA graphs](gpu.md)"},
       {"peak_tflops",
        "GPU: dense TFLOP/s of one in the model's dtype, for MFU; 0 or auto: the data sheet's"}});
  return table;
}

/// Why a key of GPUs cannot matter, given the rest of the file; empty where it can.
std::string why_idle(const std::string& key, const Config& config) {
  const DType compute = config.precision.compute;
  const std::string computes = cat("the model computes in ", sherd::name_of(compute));
  if (config.device.type == DeviceType::cpu) return "device.type is \"cpu\", and this is a matter of GPUs";
  if (key == "tf32" && config.device.tf32 && compute != DType::f32) return computes;
  if (key == "fused_gelu" && config.device.fused_gelu) {
    if (compute == DType::f32) return computes;
    if (config.model && config.model->activation != FfnActivation::gelu_tanh)
      return cat("model.activation is \"", name_of(config.model->activation), "\", not \"gelu_tanh\"");
  }
  if (key == "deterministic_attention" && !config.device.deterministic_attention) {
    const char* own = ", where Sherd's own kernels run, which are deterministic";
    if (compute == DType::f32) return cat(computes, own);
    if (config.model && config.model->attention_dropout > 0) return cat("model.attention_dropout is on", own);
  }
  return "";
}

}  // namespace

Key<Config> device_key() {
  return section("device", &Config::device, device_table());
}

void note_idle_device(const Config& config, const Given& given, Context& context) {
  const auto section = given.find("device");
  if (section == given.end()) return;
  for (const char* key : {"tf32", "fused_gelu", "deterministic_attention", "cuda_graphs", "peak_tflops"}) {
    const Node* node = section->second->find(key);
    if (!node || node->is(Node::Kind::null) || node->is_text("auto")) continue;
    if (const std::string why = why_idle(key, config); !why.empty())
      context.note(join("device", key), cat("no effect: ", why));
  }
}

}  // namespace sherd::config
