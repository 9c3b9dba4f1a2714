#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/update/rules/packed_tensors.h"
#include "optim/one_bit_lamb.h"
#include "sharding/sharded_model.h"

namespace sherd::engine {

/// Norms of published tensors, of which every rank measures a part (Phase::parameter_norms). Used from the
/// rank's thread.
class ParameterNorms {
 public:
  /// Elements of the segment whose squares this rank adds, [begin, end): its shard, where it is the first of
  /// those that hold it.
  static sharding::Segment::Range counted(const sharding::Segment& segment);
  /// Opens a step: forgets what one that was abandoned has measured.
  void begin() { sums_.clear(); }
  /// The sums of a tensor in the step under way, to which squares are added.
  optim::NormSums& of(const MeasuredTensor& tensor) { return sums_[tensor]; }
  /// The rule of a parameter; null where that does not measure.
  using HyperOf = std::function<const optim::Hyper*(const autograd::Parameter&)>;
  /// Adds up the sums over all ranks that hold parts of the model, and makes trust ratios for step number
  /// `step` of them. `ratios`: some rule takes these. Collective over these ranks, once a step.
  void share(sharding::ShardedModel& model, device::Device& device, std::int64_t step,
             const HyperOf& hyper_of, bool ratios);
  /// The factor of the tensor's step, from the last share(); 1 before the first, and for padding.
  double trust(const MeasuredTensor& tensor) const;
  /// Whether 1-bit LAMB refreshed the tensor's variance in the step before, of this run or of the one that
  /// saved what it goes on from.
  bool refreshed(const MeasuredTensor& tensor) const;

  /// 1-bit LAMB's memory from step to step of each tensor that this rank has parts of, as text by the
  /// tensor's name. Earlier versions kept one of all tensors of a parameter, by the parameter's name; from
  /// that each of them goes on.
  std::map<std::string, std::string> save() const;
  /// Takes back memories of any tensors, in place of what was there. Throws Error{data} for what save() has
  /// not written.
  void restore(const std::map<std::string, std::string>& saved);

 private:
  void learn_names(sharding::ShardedModel& model, device::Device& device, const HyperOf& hyper_of);
  void share_ratios(comm::Communicator& ranks, device::Device& device);
  void part_memories();
  double trust_of(const MeasuredTensor& tensor, const optim::NormSums& sums, std::int64_t step,
                  const optim::Hyper& hyper);

  std::map<MeasuredTensor, optim::NormSums> sums_;
  std::map<MeasuredTensor, double> trust_;
  std::map<std::string, optim::TrustMemory> memories_;      ///< by the tensor's name
  std::unordered_map<std::uint64_t, MeasuredTensor> mine_;  ///< by hashes of names
  /// Hashes of all measured tensors of the model, on every rank the same.
  std::vector<std::uint64_t> names_;
};

}  // namespace sherd::engine
