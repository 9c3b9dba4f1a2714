#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "optim/one_bit_lamb.h"
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
  /// The rule of a parameter; null where that does not measure.
  using HyperOf = std::function<const optim::Hyper*(const autograd::Parameter&)>;
  /// Adds up the sums over all ranks that hold parts of the model, and makes trust ratios for step number
  /// `step` of them. `ratios`: some rule takes these. Collective over these ranks, once a step.
  void share(sharding::ShardedModel& model, device::Device& device, std::int64_t step,
             const HyperOf& hyper_of, bool ratios);
  /// By what the parameter's step is multiplied, from the last share(). 1 before the first.
  double trust(const autograd::Parameter& parameter) const;
  /// Whether 1-bit LAMB refreshed the parameter's variance in the step before, of this run or of the one that
  /// saved what it goes on from.
  bool refreshed(const autograd::Parameter& parameter) const;

  /// What 1-bit LAMB keeps from step to step of each parameter that this rank has parts of, as text by the
  /// parameter's name.
  std::map<std::string, std::string> save() const;
  /// Of any parameters, in place of what was there. Throws Error{data} for what save() has not written.
  void restore(const std::map<std::string, std::string>& saved);

 private:
  void learn_names(sharding::ShardedModel& model, device::Device& device, const HyperOf& hyper_of);
  void share_ratios(comm::Communicator& ranks, device::Device& device);
  double trust_of(const autograd::Parameter& parameter, const optim::NormSums& sums, std::int64_t step,
                  const optim::Hyper& hyper);

  std::unordered_map<const autograd::Parameter*, optim::NormSums> sums_;
  std::unordered_map<const autograd::Parameter*, double> trust_;
  std::map<std::string, optim::TrustMemory> memories_;                  ///< by the parameter's name
  std::unordered_map<std::uint64_t, const autograd::Parameter*> mine_;  ///< by hashes of names
  std::vector<std::uint64_t>
      names_;  ///< hashes of all measured parameters of the model, on every rank the same
};

}  // namespace sherd::engine
