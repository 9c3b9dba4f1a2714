#pragma once

#include <span>
#include <vector>

namespace sherd::nn {

/// State that a module learns once per step outside of gradients: base of modules beside nn::Module. While it
/// trains, a module counts; what the ranks that see different tokens have counted is added up where the step
/// ends, and every rank takes the same sums, of layers of other pipeline stages too. Values that outlast the
/// step are saved in checkpoints, by the module's path.
class StepState {
 public:
  virtual ~StepState() = default;
  /// The counts of this rank since the last step: as many numbers on every rank, at any time. Whole ones
  /// (below 2^53) add up exactly.
  virtual std::vector<double> counted() const = 0;
  /// The step has ended with these sums over ranks; `applied`: its update was. Counting begins again.
  virtual void end_step(std::span<const double> sums, bool applied) = 0;
  /// The step is dropped. Counting begins again.
  virtual void drop_step() = 0;
  /// The values that checkpoints hold, the same on every rank; empty: nothing.
  virtual std::vector<float> saved() const = 0;
  /// Takes it back. As many values as saved() has.
  virtual void restore(std::span<const float> values) = 0;
};

}  // namespace sherd::nn
