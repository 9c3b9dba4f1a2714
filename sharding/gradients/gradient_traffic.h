#pragma once

#include <memory>
#include <vector>

#include "device/accelerator.h"
#include "sharding/segment.h"

namespace sherd::sharding {

/// Gradients of one rank that are kept beside its GPU rather than on it (Ren et al. 2021, ZeRO-Offload): what
/// a segment has summed up so far comes before backward adds to it, and the new sum goes back behind, both on
/// streams of their own, so that they travel while backward computes. As many as three buffers per size of
/// segment: one comes, one is added to, one goes. Used from the rank's thread.
class GradientTraffic {
 public:
  /// `device`: a GPU, or a meta device in its place, on which this takes the same memory.
  explicit GradientTraffic(device::Device& device);
  /// Joins.
  ~GradientTraffic();
  GradientTraffic(const GradientTraffic&) = delete;
  GradientTraffic& operator=(const GradientTraffic&) = delete;

  /// A flat tensor of the padded segment, on the GPU, for work that the compute stream is given from now on;
  /// with the lasting gradients in it when `load`. It goes back when the last holder lets go.
  std::shared_ptr<const Tensor> open(const Segment& segment, bool load);
  /// Sends what open() gave and the compute stream has written by now to the lasting gradients, in parts of
  /// `part_elements`; segment.gradients_arrived() tells when which of them are there.
  void send(Segment& segment, const Tensor& full, std::int64_t part_elements = std::int64_t{1} << 21);
  /// Work that the compute stream is given from now on finds lasting gradients in their place.
  void join();

 private:
  struct StagingBuffer {
    Tensor memory;
    device::Event idle;       ///< when its last user is done with it
    std::int64_t opened = 0;  ///< the number of the call of open() that took it
    bool lent = false, sent = false;
  };
  StagingBuffer& free_buffer(std::int64_t numel, DType dtype);

  device::Device& device_;
  device::Accelerator* gpu_;  ///< null on a meta device
  device::Stream coming_, going_;
  std::vector<std::shared_ptr<StagingBuffer>> buffers_;  ///< the one opened longest ago first
  std::int64_t opens_ = 0;
};

}  // namespace sherd::sharding
