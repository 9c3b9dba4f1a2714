#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "device/device.h"
#include "tensor/tensor.h"

namespace sherd::comm {
class Communicator;
}

namespace sherd::engine {

/// Means by name: what Engine::evaluate() gives of a model.
using MetricMeans = std::map<std::string, double>;

/// The sums of an evaluation, on one rank: by name a sum, and what it is divided by. Used from the rank's
/// thread.
class MetricSums {
 public:
  explicit MetricSums(device::Device& device) : device_(device) {}

  /// Adds to the metric `name`, which becomes the quotient of all sums and all counts.
  void add(const std::string& name, double sum, double count = 1);
  /// The same of a tensor of one number; waits for the device.
  void add(const std::string& name, const tensor::Tensor& sum, double count = 1);
  /// Adds to how many rows of `logits` [..., classes] have their largest value, the first of them, at the
  /// class that `labels` names (int32, one per row; rows of `ignore_index` do not count): accuracy. Waits for
  /// the device.
  void add_accuracy(const std::string& name, const tensor::Tensor& logits, const tensor::Tensor& labels,
                    std::int32_t ignore_index = -100);

  /// Later sums belong to the next batch.
  void next_batch() { batches_.emplace_back(); }
  /// Forgets all batches.
  void clear() { batches_.clear(); }
  /// Nothing of it counts.
  void drop_batch() { batches_.back().clear(); }
  /// The means over all batches of all `ranks`, which have as many; sums are added in the global order of
  /// batches (all ranks' first, then all ranks' second …), so that the bits do not depend on how many ranks
  /// share them. Of the ranks of `stages`, which hold a model's stages, the last one's count; a count of 0
  /// gives 0. The same on all. Collective.
  MetricMeans means(comm::Communicator& ranks, comm::Communicator& stages) const;

 private:
  struct Sum {
    double sum = 0, count = 0;
  };
  using Batch = std::map<std::string, Sum>;

  std::vector<std::int64_t> packed() const;
  static std::vector<Batch> unpacked(const std::vector<std::int64_t>& numbers);

  device::Device& device_;
  std::vector<Batch> batches_;
};

}  // namespace sherd::engine
