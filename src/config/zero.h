#pragma once

#include <cstdint>
#include <limits>
#include <string>

namespace sherd::config {

enum class OffloadDevice : std::uint8_t { none, cpu, nvme };

/// Sections `zero_optimization.offload_param` (stage 3) and `.offload_optimizer` (stages 1 to 3; DeepSpeed
/// has device nvme only at stage 3, Sherd at all three): where a state lives while nobody computes with it
/// (Ren et al. 2021, ZeRO-Offload; Rajbhandari et al. 2021, ZeRO-Infinity). No key changes a result.
/// DeepSpeed's `fast_init` has no field: states are always written straight to where they live.
struct Offload {
  OffloadDevice device = OffloadDevice::none;
  /// Directory, required for nvme. It is looked at only when a run starts.
  std::string nvme_path;
  /// Staging buffers in host memory, ≥ 1 with nvme; offload_param's hold parameters (buffer_size elements
  /// each), offload_optimizer's (default 4) one sub-group with all its states each.
  std::int64_t buffer_count = 5;
  std::int64_t buffer_size = 100'000'000;   ///< elements; offload_param, nvme
  std::int64_t max_in_cpu = 1'000'000'000;  ///< elements kept in host memory beside nvme; offload_param, nvme
  bool pin_memory = true;                   ///< page-locked host memory; cannot matter on a CPU device
  /// offload_optimizer, nvme: read the next sub-groups, write the previous ones, while one is updated. (On
  /// unless told otherwise, unlike DeepSpeed: only time depends on it.)
  bool pipeline_read = true, pipeline_write = true;
  double ratio = 1.0;  ///< share of the states to offload, 0–1, below 1 at stage 3 only; offload_optimizer

  /// The defaults of `offload_optimizer`.
  static Offload of_optimizer() {
    Offload offload;
    offload.buffer_count = 4;
    return offload;
  }
  bool operator==(const Offload&) const = default;
};

/// Section `aio`: how states travel to and from NVMe. Idle without a device nvme.
struct Aio {
  /// The means by which bytes move; Sherd's own key.
  enum class Backend : std::uint8_t {
    automatic,  ///< "auto": io_uring, or threads where the kernel or the file system refuses
    io_uring,   ///< or an error
    threads     ///< positional reads and writes
  } backend = Backend::automatic;
  std::int64_t block_size = 1 << 20;  ///< bytes of one request; a multiple of 4096, at most 1 GiB
  std::int64_t queue_depth = 8;       ///< requests under way, 1–4096
  std::int64_t thread_count = 1;  ///< `thread_count` or `intra_op_parallelism`, with backend threads, 1–256
  bool single_submit = false;     ///< hand requests to the kernel one by one; io_uring
  bool overlap_events = true;     ///< false: start requests only when none is under way
  bool checksums = false;         ///< CRC-32C of every page, verified by every read; Sherd's own key
  bool operator==(const Aio&) const = default;
};

/// Section `zero_optimization`. Sizes are element counts, not bytes. Stage-3 keys are read with and without
/// their prefix `stage3_`. Keys that need no field here (because Sherd always behaves that way) become
/// Config::notes.
struct Zero {
  static constexpr std::int64_t unlimited = std::numeric_limits<std::int64_t>::max();

  int stage = 0;  ///< 0 nothing sharded, 1 optimizer states, 2 and gradients, 3 and parameters
  std::int64_t reduce_bucket_size = 500'000'000;  ///< elements per gradient reduction, ≥ 0
  /// Elements per all-gather of updated parameters, ≥ 0, even.
  std::int64_t allgather_bucket_size = 500'000'000;
  bool overlap_comm = false;  ///< communicate beside computation; null or absent: true at stage 3 only

  /// `stage3_prefetch_bucket_size`, elements; 0: no prefetch.
  std::int64_t prefetch_bucket_size = 50'000'000;
  /// `stage3_…`: parameters of at most this many stay gathered.
  std::int64_t param_persistence_threshold = 100'000;
  /// `stage3_…`: most elements that may stay so in total.
  std::int64_t model_persistence_threshold = unlimited;
  std::int64_t max_live_parameters = 1'000'000'000;  ///< `stage3_…`: gathered elements that prefetch respects
  std::int64_t max_reuse_distance = 1'000'000'000;  ///< `stage3_…`: keep what is used again within this many

  /// Elements that the optimizer updates at once, at most, where states pass through buffers (device nvme).
  std::int64_t sub_group_size = 1'000'000'000;

  Offload offload_param;
  Offload offload_optimizer = Offload::of_optimizer();
  bool operator==(const Zero&) const = default;
};

}  // namespace sherd::config
