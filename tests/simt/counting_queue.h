#pragma once

#include <memory>
#include <vector>

#include "base/error.h"
#include "device/stream.h"
#include "simt/simt.h"

namespace sherd::test {

/// A stream for emulated kernels, which runs each at once and writes down its grid.
class CountingQueue final : public device::StreamQueue {
 public:
  void launch(const device::KernelLaunch& kernel) override {
    grids.push_back(kernel.grid);
    simt::enrolled(kernel.entry)
        .call(kernel.entry, {kernel.grid.x, kernel.grid.y, kernel.grid.z},
              {kernel.block.x, kernel.block.y, kernel.block.z}, kernel.shared_bytes, kernel.arguments.data());
  }
  std::shared_ptr<const device::StreamEvent> record() override { return nullptr; }
  void follow(const device::StreamEvent&) override {}
  void* native() override { return nullptr; }

  std::vector<device::Extent3> grids;
};

}  // namespace sherd::test
