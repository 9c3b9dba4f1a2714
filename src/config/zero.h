#pragma once

#include <cstdint>
#include <limits>
#include <string>

namespace sherd::config {

enum class OffloadDevice : std::uint8_t { none, cpu, nvme };

/// Sections `zero_optimization.offload_param` and `.offload_optimizer`. This build accepts only device none;
/// the other keys are checked and their fields keep the defaults.
struct Offload {
  OffloadDevice device = OffloadDevice::none;
  std::string nvme_path;                    ///< directory; required for nvme
  std::int64_t buffer_count = 5;            ///< staging buffers (offload_optimizer: 4)
  std::int64_t buffer_size = 100'000'000;   ///< elements; offload_param only
  std::int64_t max_in_cpu = 1'000'000'000;  ///< elements kept in host memory beside nvme; offload_param only
  bool pin_memory = true;
  bool pipeline_read = false, pipeline_write = false;  ///< offload_optimizer only
  bool fast_init = false;                              ///< offload_optimizer only
  double ratio = 1.0;  ///< share of the state to offload, 0–1; offload_optimizer only

  /// The defaults of `offload_optimizer`.
  static Offload of_optimizer() {
    Offload offload;
    offload.buffer_count = 4;
    return offload;
  }
  bool operator==(const Offload&) const = default;
};

/// Section `zero_optimization`. Sizes are element counts, not bytes. Stage-3 keys are read with and without
/// their prefix `stage3_`. Keys that need no field here (because Sherd always behaves that way) become
/// Config::notes.
struct Zero {
  static constexpr std::int64_t unlimited = std::numeric_limits<std::int64_t>::max();

  int stage = 0;  ///< 0 nothing sharded, 1 optimizer states, 2 and gradients, 3 and parameters
  std::int64_t reduce_bucket_size = 500'000'000;  ///< elements per gradient reduction, ≥ 0
  std::int64_t allgather_bucket_size =
      500'000'000;            ///< elements per all-gather of updated parameters, ≥ 0, even
  bool overlap_comm = false;  ///< communicate beside computation; null or absent: true at stage 3 only

  std::int64_t prefetch_bucket_size =
      50'000'000;  ///< `stage3_prefetch_bucket_size`, elements; 0: no prefetch
  std::int64_t param_persistence_threshold =
      100'000;  ///< `stage3_…`: parameters of at most this many stay gathered
  std::int64_t model_persistence_threshold =
      unlimited;  ///< `stage3_…`: most elements that may stay so in total
  std::int64_t max_live_parameters = 1'000'000'000;  ///< `stage3_…`: gathered elements that prefetch respects
  std::int64_t max_reuse_distance = 1'000'000'000;  ///< `stage3_…`: keep what is used again within this many

  Offload offload_param;
  Offload offload_optimizer = Offload::of_optimizer();
  bool operator==(const Zero&) const = default;
};

}  // namespace sherd::config
