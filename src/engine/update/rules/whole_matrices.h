#pragma once

#include <functional>
#include <map>
#include <span>
#include <vector>

#include "optim/muon.h"
#include "sharding/segment.h"

namespace sherd::engine {

/// A matrix that an optimizer takes whole (Packing::tensors), of logical rows and columns.
struct Matrix {
  const sharding::Segment* segment;
  std::size_t slot;  ///< its parameter's number in the segment
  std::int64_t rows, columns;
  std::vector<tensor::Range> ranges;  ///< its rows in order, as flat elements of the logical parameter

  const autograd::Parameter& parameter() const { return *segment->layout().parameters()[slot]; }
  std::int64_t numel() const { return rows * columns; }
  /// The cost of orthogonalising it, in any unit.
  double work() const {
    static const optim::Hyper usual = config::default_rule(config::OptimizerType::muon);
    return optim::orthogonalize_flops(rows, columns, usual);
  }
};

/// The matrices of all parameters of a segment, in order. Pure arithmetic.
std::vector<Matrix> matrices_of(const sharding::Segment& segment);

/// Calls visit(begin, count, rows, columns) for the runs of a parameter's local elements [begin, end) that
/// are of matrices of one (logical) shape each, in order.
void for_each_shape(const autograd::Parameter& parameter, std::int64_t begin, std::int64_t end,
                    const std::function<void(std::int64_t, std::int64_t, std::int64_t, std::int64_t)>& visit);

/// The rank that takes each piece of work: the largest first, each to the rank with the least so far. Pure,
/// so that all ranks know.
std::vector<int> deal_out(std::span<const double> work, int ranks);

/// Does what lies between the two passes of an optimizer of whole matrices. Keeps directions of the segments
/// of one batch, in whose place their orthogonal forms come. Used from the rank's thread.
class WholeMatrices {
 public:
  /// Directions of the segment's update range; memory of the tier, made where there is none yet. On a GPU all
  /// segments of a batch have one tier.
  const tensor::Tensor& of(const sharding::Segment& segment, device::Device& device, device::Tier tier);
  /// The same where there is one.
  const tensor::Tensor& at(const sharding::Segment& segment) const { return directions_.at(&segment); }
  /// Orthogonalises everything there is. Each matrix comes to one rank of those that together hold it
  /// (RankGroups::holders_of_all()), is worked on there, and goes back: about 2 bytes per element each way, 4
  /// where the model computes in fp32; what all shards hold comes once, and goes back to all. Collective over
  /// these ranks.
  void orthogonalize(const std::function<const optim::Hyper&(const autograd::Parameter&)>& hyper_of,
                     tensor::Kernels& kernels);
  /// Drops the directions of a segment whose update has ended.
  void drop(const sharding::Segment& segment) { directions_.erase(&segment); }
  void clear() { directions_.clear(), order_.clear(); }

 private:
  /// The slices that each rank of its group holds of a segment's parameters, by rank and slot; of those that
  /// are not cut nothing.
  using Slices = std::vector<std::vector<tensor::Slice>>;
  const Slices& slices_of(const sharding::Segment& segment, device::Device& device);

  std::map<const sharding::Segment*, Slices> slices_;
  std::map<const sharding::Segment*, tensor::Tensor> directions_;
  std::vector<const sharding::Segment*> order_;  ///< the batch's segments, as they came
  device::Tier tier_ = device::Tier::device;
};

}  // namespace sherd::engine
