#include <sys/utsname.h>

#include <cctype>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/arena.h"
#include "base/cpu_isa.h"
#include "base/error.h"
#include "base/text/excerpt.h"
#include "base/version.h"
#include "cli/build_info.h"
#include "cli/command_line.h"
#include "cli/flight_report.h"
#include "cli/program.h"
#include "comm/communicator.h"
#include "config/keys.h"
#include "device/cuda.h"
#include "engine/report/gemm_probe.h"
#include "engine/report/machine.h"
#include "engine/report/report.h"
#include "tensor/library_version.h"

namespace sherd::cli {
namespace {

#if defined(__clang__)
constexpr const char* compiler = "Clang";
#else
constexpr const char* compiler = "GCC";
#endif

std::string memory_text() {
  const engine::MemorySizes sizes = engine::memory_sizes();
  std::string text =
      cat(engine::human_bytes(sizes.total), ", ", engine::human_bytes(sizes.available), " available");
  if (sizes.limit) text += cat(", limited to ", engine::human_bytes(sizes.limit), " for this process");
  return text;
}

std::string bf16_text() {
  if (cpu_has_bf16_products()) return "in hardware";
  return "converted to fp32 (the processor has no AVX512-BF16, or DNNL_MAX_CPU_ISA hides it)";
}

std::string kernel_text() {
  utsname name{};
  return ::uname(&name) == 0 ? cat(name.sysname, ' ', name.release, ' ', name.machine) : "unknown";
}

std::string cuda_text() {
  const device::CudaStatus status = device::cuda_status();
  if (!status.built) return "not in this build";
  const auto library = [](const char* name, const std::string& version) {
    return cat(version.empty() ? ", no " : ", ", name, version.empty() ? "" : " ", version);
  };
  return cat("built with ", status.version, library("cuDNN", tensor::cudnn_version()),
             library("NCCL", comm::nccl_version()),
             status.driver_version.empty() ? ", no driver" : cat(", driver for ", status.driver_version));
}

/// ", 989TFLOP/s in bf16", which MFU counts against; nothing where it is not known.
std::string peak_text(const device::CudaGpu& gpu) {
  const double peak = device::peak_flops(gpu, DType::bf16);
  return peak > 0 ? cat(", ", engine::human_count(peak), "FLOP/s in bf16") : "";
}

/// "cpu, cuda 0 (NVIDIA H200, 139.8 GiB, compute capability 9.0, 989TFLOP/s in bf16)", or why there is no
/// GPU.
std::string devices_text() {
  const device::CudaStatus status = device::cuda_status();
  std::string text = "cpu";
  for (const device::CudaGpu& gpu : status.gpus)
    text += cat(", cuda ", gpu.ordinal, " (", gpu.name, ", ", engine::human_bytes(gpu.memory),
                ", compute capability ", gpu.major, '.', gpu.minor, peak_text(gpu), ")");
  return status.usable() ? text : cat(text, " (no GPU: ", status.why_not, ")");
}

std::string rate_text(DType dtype) {
  const engine::GemmRate rate = engine::gemm_rate(available_cores(), dtype, {.refresh = true});
  return cat(engine::human_count(rate.flops_per_second), "FLOP/s on ", counted(available_cores(), "thread"),
             rate.cached ? " (the best so far)" : "");
}

/// "io_uring", "bf16_products"
std::string json_key(std::string name) {
  for (char& c : name) c = c == ' ' ? '_' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return name;
}

}  // namespace

CommandLine info_line() {
  CommandLine line("info", "Prints versions, processor, memory and the features of this build.",
                   "[--gemm] [--json] | --keys | --schema | --flight-recorder F...");
  line.flag("gemm", "also measure the rate of matrix products, and keep it for MFU");
  line.flag("keys", "print every key of the configuration instead: values, defaults, meanings (Markdown)");
  line.flag("schema", "print the JSON Schema of configuration files instead, by which editors complete them");
  line.list("flight-recorder", "F",
            "compare flight_recorder_rank_*.json of a run's ranks instead (files, or their folder): who is "
            "behind, and in which call")
      .json()
      .rest_to("flight-recorder");
  return line;
}

void info_command(const CommandLine& line) {
  const bool flights = line.has("flight-recorder");
  const bool keys = line.has("keys"), schema = line.has("schema");
  if (keys + schema + flights + line.has("gemm") > 1)
    throw UsageError(
        "--gemm, --keys, --schema and --flight-recorder are different questions; ask one at a time");
  if (line.has("json") && (keys || schema || flights))
    throw UsageError("--json is of the facts about this machine: --schema is JSON, and --keys is not");
  if (flights) {
    std::fputs(flight_report(line.all("flight-recorder")).c_str(), stdout);
    return;
  }
  if (keys || schema) {
    std::fputs((keys ? config::keys_page() : config::json_schema()).c_str(), stdout);
    return;
  }
  std::vector<std::pair<const char*, std::string>> facts{
      {"Sherd", cat(version(), ", ", SHERD_BUILD_TYPE, " build by ", compiler, " ", __VERSION__)},
      {"system", kernel_text()},
      {"processor", cat(engine::cpu_model(), ", ", counted(available_cores(), "usable core"))},
      {"instruction set", std::string(name_of(cpu_isa()))},
      {"bf16 products", bf16_text()},
      {"memory", memory_text()},
      {"io_uring", engine::io_uring_state()},
      {"matrix products", tensor::matmul_library()},
      {"threads", "oneTBB " SHERD_TBB_VERSION},
      {"other libraries", "Eigen " SHERD_EIGEN_VERSION ", SentencePiece " SHERD_SENTENCEPIECE_VERSION
                          ", PCRE2 " SHERD_PCRE2_VERSION ", ICU " SHERD_ICU_VERSION
                          ", nlohmann-json " SHERD_JSON_VERSION ", cxxopts " SHERD_CXXOPTS_VERSION},
      {"communicators", comm::mpi_available() ? "local, tcp, mpi" : "local, tcp (built without MPI)"},
      {"CUDA", cuda_text()},
      {"devices", devices_text()}};
  if (line.has("gemm")) {
    facts.emplace_back("fp32 GEMM", rate_text(DType::f32));
    facts.emplace_back("bf16 GEMM", rate_text(DType::bf16));
  }
  if (line.has("json")) {
    nlohmann::ordered_json object;
    for (const auto& [name, value] : facts) object[json_key(name)] = value;
    return print_json(object);
  }
  for (const auto& [name, value] : facts) std::printf("%-17s%s\n", name, value.c_str());
}

}  // namespace sherd::cli
