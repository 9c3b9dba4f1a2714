#pragma once

#include <memory>
#include <vector>

#include "device/stream.h"

namespace sherd::test {

/// A stream that runs no kernel and writes down the grid of each, and its blocks.
class CountingQueue final : public device::StreamQueue {
 public:
  void launch(const device::KernelLaunch& kernel) override {
    grids.push_back(kernel.grid);
    blocks.push_back(kernel.block);
  }
  std::shared_ptr<const device::StreamEvent> record() override { return nullptr; }
  void follow(const device::StreamEvent&) override {}
  void* native() override { return nullptr; }

  std::vector<device::Extent3> grids, blocks;
};

}  // namespace sherd::test
