#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>
#include <mutex>

#include "comm/communicator.h"
#include "sharding/parallel/layout.h"
#include "support/plain_parameters.h"

namespace sherd::parallel {

/// Runs body(cpu, group) on so many ranks, each with a CPU of one thread.
inline void on_ranks(int ranks, const std::function<void(test::Cpu&, comm::Communicator&)>& body) {
  comm::run_local(ranks, {.timeout_seconds = 30}, [&](comm::Communicator& group) {
    test::Cpu cpu(1);
    body(cpu, group);
  });
}

/// This rank's rows of a stream [batch, rows, width], as a tensor of its own.
inline tensor::Tensor stream_part(test::Cpu& cpu, const tensor::Tensor& whole, const Layout& layout) {
  const std::int64_t ranks = layout.cuts_stream() ? layout.tensor_size() : 1;
  const std::int64_t batch = whole.shape()[0], rows = whole.shape()[1] / ranks, width = whole.shape()[2];
  const std::int64_t first = ranks > 1 ? layout.tensor_rank() * rows : 0;
  const std::vector<double> values = cpu.values(whole);
  std::vector<double> part;
  for (std::int64_t b = 0; b < batch; ++b) {
    const auto from = values.begin() + (b * whole.shape()[1] + first) * width;
    part.insert(part.end(), from, from + rows * width);
  }
  return cpu.convert(tensor::Tensor::of<double>(*cpu.device, {batch, rows, width}, part), whole.dtype());
}

/// The results of ranks of one model, put together: by name, whole tensors.
class Found {
 public:
  /// This rank's part of a stream.
  void add_stream(test::Cpu& cpu, const std::string& name, const tensor::Tensor& part, const Layout& layout) {
    const tensor::Slice slice =
        layout.cuts_stream() ? layout.stream_slice(part.shape()) : tensor::Slice::whole(part.shape());
    add(name, cpu.values(part), slice);
  }
  /// Values, or gradients, of the parameters that this rank holds.
  void add_parameters(test::Cpu& cpu, const std::string& kind, const test::PlainParameters& held,
                      const Layout& layout) {
    for (const auto& p : held.all()) {
      const bool gradient = kind == "gradient ";
      if (gradient && !p->trainable) continue;
      const std::vector<double> values = cpu.values(gradient ? p->grad : p->value);
      if (gradient && p->partial_gradient)
        add_part(kind + p->name, values, layout.tensor_rank());
      else
        add(kind + p->name, values, p->logical_slice());
    }
  }
  std::map<std::string, std::vector<double>> all() const {
    auto out = whole_;
    for (const auto& [name, by_rank] : parts_)
      for (const auto& [rank, values] : by_rank) {
        std::vector<double>& sum = out[name];
        sum.resize(values.size());
        for (std::size_t i = 0; i < values.size(); ++i) sum[i] += values[i];
      }
    return out;
  }

 private:
  void add_part(const std::string& name, std::vector<double> values, int rank) {
    const std::lock_guard lock(mutex_);
    parts_[name][rank] = std::move(values);
  }
  /// Values that several ranks hold must be the same.
  void add(const std::string& name, const std::vector<double>& values, const tensor::Slice& slice) {
    const std::lock_guard lock(mutex_);
    std::vector<double>& whole = whole_[name];
    whole.resize(static_cast<std::size_t>(slice.logical().numel()), std::nan(""));
    slice.for_each_run(0, slice.numel(), [&](std::int64_t local, std::int64_t logical, std::int64_t count) {
      for (std::int64_t i = 0; i < count; ++i) {
        double& at = whole[static_cast<std::size_t>(logical + i)];
        const double value = values[static_cast<std::size_t>(local + i)];
        EXPECT_TRUE(std::isnan(at) || at == value) << name << ": ranks differ";
        at = value;
      }
    });
  }
  std::mutex mutex_;
  std::map<std::string, std::vector<double>> whole_;
  std::map<std::string, std::map<int, std::vector<double>>> parts_;  ///< parts of sums, by rank
};

/// The same tensors, with elements within `tolerance` of each other, relative to the tensor's largest.
inline void expect_found(const Found& got, const std::map<std::string, std::vector<double>>& want,
                         double tolerance, const std::string& what) {
  const auto all = got.all();
  ASSERT_EQ(all.size(), want.size()) << what;
  for (const auto& [name, values] : want) {
    ASSERT_TRUE(all.contains(name)) << what << " has no " << name;
    const std::vector<double>& found = all.at(name);
    ASSERT_EQ(found.size(), values.size()) << what << ", " << name;
    double largest = 1e-3;
    for (const double v : values) largest = std::max(largest, std::abs(v));
    for (std::size_t i = 0; i < values.size(); ++i)
      ASSERT_LE(std::abs(found[i] - values[i]), tolerance * largest)  // and no NaN
          << what << ", " << name << ", element " << i << ": " << found[i] << " for " << values[i];
  }
}

}  // namespace sherd::parallel
