#pragma once

#include <gtest/gtest.h>

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "sharding/parallel/layout.h"
#include "support/plain_parameters.h"

namespace sherd::test {

/// Whole gradients by parameter, of what the ranks of a layout, threads of this process, find in a pass:
/// their sum by logical index; where tensor ranks hold the same and find the same, of one of them.
class LogicalGradients {
 public:
  void add(Cpu& cpu, const PlainParameters& parameters, const parallel::Layout& layout) {
    const std::lock_guard lock(mutex_);
    for (const auto& p : parameters.all()) {
      const tensor::Slice slice = p->logical_slice();
      std::vector<double>& sum = gradients_[p->name];
      sum.resize(static_cast<std::size_t>(slice.logical().numel()));
      EXPECT_TRUE(p->grad_written) << p->name;
      if (slice.is_whole() && !p->partial_gradient && layout.tensor_rank() > 0) continue;
      const std::vector<double> mine = cpu.values(p->grad);
      slice.for_each_run(0, p->numel(), [&](std::int64_t local, std::int64_t logical, std::int64_t count) {
        for (std::int64_t i = 0; i < count; ++i)
          sum[static_cast<std::size_t>(logical + i)] += mine[static_cast<std::size_t>(local + i)];
      });
    }
  }
  std::map<std::string, std::vector<double>> take() { return std::move(gradients_); }

 private:
  std::mutex mutex_;
  std::map<std::string, std::vector<double>> gradients_;
};

}  // namespace sherd::test
