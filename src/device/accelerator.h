#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "device/device.h"
#include "device/stream.h"

namespace sherd::device {

/// Bytes of a device's own memory, over all processes.
struct DeviceMemory {
  std::uint64_t free = 0, total = 0;
};

/// A device whose work runs in queues of its own and whose device tier is a memory of its own: a rank's GPU.
/// Kernels run on the compute stream, in whose order memory of the device tier is reused: whoever hands it to
/// another stream keeps it alive until the compute stream waits for that. The host tier is
/// page-locked memory, of which a freed block is reused when the compute stream has passed that point.
///
/// Used from the rank's thread, which has the GPU as its current one from the device's construction on;
/// allocation, release and streams are safe from any thread.
class Accelerator : public Device {
 public:
  Accelerator* accelerator() final { return this; }
  Tier processor_tier() const final { return Tier::host; }
  Event record() final { return compute_stream().record(); }

  /// The maker's name for it.
  virtual std::string name() const = 0;
  /// The accelerator's number among those of this process.
  virtual int ordinal() const = 0;
  virtual DeviceMemory memory() = 0;
  /// Makes it current on the calling thread (helper threads that talk to the driver themselves).
  virtual void make_current() = 0;

  virtual Stream& compute_stream() = 0;
  /// A stream beside the compute stream; of `urgent` ones the device starts ready work first.
  virtual Stream make_stream(bool urgent = false) = 0;
  /// Copies as copy() does, in the order of `stream` instead.
  virtual void copy_on(Stream& stream, void* to, const void* from, std::size_t bytes) = 0;
  /// True for memory of this or another GPU; false for any memory of the host.
  virtual bool in_gpu_memory(const void* data) const = 0;
  /// How the compute stream's work was run, where it is run as graphs; else zeros.
  virtual GraphCounts graph_counts() const { return {}; }

  /// Registers what synchronize() calls when all work has ended, and check() at any time, to throw what
  /// kernels found wrong with their data; until the handle goes. From any thread.
  virtual std::shared_ptr<void> after_synchronize(std::function<void()> check) = 0;
};

}  // namespace sherd::device
