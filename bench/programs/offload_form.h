#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "base/arena.h"
#include "comm/communicator.h"
#include "device/device.h"

namespace sherd::bench {

/// The options of bench_offload_step.
struct OffloadSettings {
  std::filesystem::path path;  ///< where the stores' files go
  std::int64_t parameters = 100'000'000, sub_group = 1 << 22;
  int rounds = 5, threads = available_cores(), buffers = 4, depth = 8;
  std::int64_t block = 1 << 20;
  std::vector<std::string> forms{"fp32", "split", "split_moments16"};
  bool parameters_on_nvme = false, serve = false;
};

/// Bytes on NVMe per parameter in one form of the states. Throws Error{usage} for a form that does not exist.
std::int64_t bytes_per_parameter(const OffloadSettings& settings, const std::string& form);

/// One form of the states of a synthetic model on NVMe, and what is measured of it.
class OffloadForm {
 public:
  /// Makes two steps: disks are slower where nothing has been written yet. `settings`, `device` and `group`
  /// must outlive this.
  OffloadForm(const OffloadSettings& settings, const std::string& name, device::Device& device,
              comm::Communicator& group);
  ~OffloadForm();

  std::int64_t parameters() const;
  /// Seconds of a whole step.
  double step();
  /// Prints what `rounds` rounds of steps, transfers alone and arithmetic alone gave. Throws Error{usage}
  /// when the weights are not those of the same steps in memory.
  void report(int rounds);

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace sherd::bench
