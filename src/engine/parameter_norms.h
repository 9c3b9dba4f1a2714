#pragma once

#include <cstdint>
#include <functional>
#include <unordered_map>
#include <vector>

#include "optim/parameter_norms.h"
#include "sharding/sharded_model.h"

namespace sherd::engine {

/// Norms of logical parameters, of which every rank measures a part (Phase::parameter_norms). Used from the
/// rank's thread.
class ParameterNorms {
 public:
  /// Elements of the segment whose squares this rank adds, [begin, end): its shard, where it is the first of
  /// those that hold it.
  static sharding::Segment::Range counted(const sharding::Segment& segment);
  /// Opens a step: forgets what one that was abandoned has measured.
  void begin() { sums_.clear(); }
  /// To which they are added, of the step under way.
  optim::NormSums& of(const autograd::Parameter& parameter) { return sums_[&parameter]; }
  /// Adds up the sums over all ranks that hold parts of the model, of the parameters in segments that
  /// `measured` names. Collective over these.
  void share(sharding::ShardedModel& model, device::Device& device,
             const std::function<bool(const sharding::Segment&)>& measured);
  /// By what the rule of `hyper` multiplies the parameter's step, from the last share(). 1 before the first.
  double trust(const autograd::Parameter& parameter, const optim::Hyper& hyper) const;

 private:
  struct Norms {
    double weight, measured;
  };
  std::vector<std::uint64_t> gather_names(comm::Communicator& ranks, device::Device& device) const;

  std::unordered_map<const autograd::Parameter*, optim::NormSums> sums_;
  std::unordered_map<const autograd::Parameter*, Norms> norms_;
  std::unordered_map<std::uint64_t, const autograd::Parameter*> mine_;  ///< by hashes of names
  std::vector<std::uint64_t>
      names_;  ///< hashes of all measured parameters of the model, on every rank the same
};

}  // namespace sherd::engine
