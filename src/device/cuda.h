#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "device/device.h"
#include "device/graph_counts.h"
#include "device/stream.h"

namespace sherd::device {

/// One GPU that the driver shows to this process (CUDA_VISIBLE_DEVICES applies).
struct CudaGpu {
  int ordinal = 0;
  std::string name;
  int major = 0, minor = 0;  ///< compute capability
  std::uint64_t memory = 0;  ///< bytes
  int processors = 0;        ///< streaming multiprocessors
  double clock_hz = 0;       ///< the highest that its multiprocessors run at; 0: the driver does not say
  std::size_t shared_per_block = 0;  ///< bytes of shared memory that a block may ask for
  std::array<std::uint8_t, 16>
      uuid{};  ///< the same in every process of the machine, of no other GPU; all zero: not known
};

/// What this build and this machine have of CUDA.
struct CudaStatus {
  bool built = false;          ///< this build has CUDA
  std::string version;         ///< of the runtime that it was built with, "13.0"; empty without
  std::string driver_version;  ///< the newest that the installed driver serves; empty without a driver
  std::vector<CudaGpu> gpus;   ///< that this build has kernels for
  /// Why there is none, and what to do about it; empty where there are GPUs.
  std::string why_not;
  bool usable() const { return !gpus.empty(); }
};

/// Asks the driver. Never throws.
CudaStatus cuda_status();

/// The GPU, counted among `gpus`, of the rank that is `local_rank`-th of those on its machine: its own where
/// there are enough, else shared by ranks that follow in turn.
int cuda_ordinal_for(int local_rank, int gpus);

/// How a CUDA device is made.
struct CudaDeviceOptions {
  int ordinal = 0;
  int threads = 1;  ///< compute threads of the processor, for what stays there (offloaded optimizers)
  std::vector<int> cores = {};    ///< as for make_cpu_device()
  double timeout_seconds = 1800;  ///< of every wait for the device
  bool graphs = false;  ///< run sequences of the compute stream's work that come again as CUDA graphs
};

struct CudaMemory {
  std::uint64_t free = 0, total = 0;  ///< bytes of the GPU, over all processes
};

/// A rank's GPU. Kernels run on the compute stream, in whose order memory of the device tier is reused:
/// whoever hands it to another stream keeps it alive until the compute stream waits for that (StreamUse). The
/// host tier is page-locked memory, of which a freed block is reused when the compute stream has passed that
/// point.
///
/// Used from the rank's thread, which has the GPU as its current one from the device's construction on;
/// allocation, release and streams are safe from any thread.
class CudaDevice : public Device {
 public:
  Kind kind() const final { return Kind::cuda; }
  Tier processor_tier() const final { return Tier::host; }

  virtual const CudaGpu& gpu() const = 0;
  int ordinal() const { return gpu().ordinal; }
  virtual Stream& compute_stream() = 0;
  /// A stream beside the compute stream; of `urgent` ones the GPU starts ready work first.
  virtual Stream make_stream(bool urgent = false) = 0;
  virtual CudaMemory memory() = 0;
  /// Makes the GPU current on the calling thread (helper threads that talk to the driver themselves).
  virtual void make_current() = 0;

  /// Copies as copy() does, in the order of `stream` instead.
  virtual void copy_on(Stream& stream, void* to, const void* from, std::size_t bytes) = 0;

  /// True for memory of this or another GPU; false for any memory of the host.
  virtual bool in_gpu_memory(const void* data) const = 0;

  /// What became of the compute stream's work where it is run as graphs; else zeros.
  virtual GraphCounts graph_counts() const { return {}; }

  /// Of a wait for this device that begins now.
  virtual Deadline deadline() const = 0;

  /// Registers what synchronize() calls when all work has ended, and check() at any time, to throw what
  /// kernels found wrong with their data; until the handle goes. From any thread.
  virtual std::shared_ptr<void> after_synchronize(std::function<void()> check) = 0;
  /// Throws what kernels that have ended by now found wrong with their data. Does not wait.
  virtual void check() = 0;
};

/// `device` as what it is. Throws Error{usage} for a device of another kind.
CudaDevice& as_cuda(Device& device);

/// Throws Error{config} with cuda_status().why_not where there is no such GPU, Error{memory} when it has no
/// room.
std::shared_ptr<CudaDevice> make_cuda_device(const CudaDeviceOptions& options);

}  // namespace sherd::device
