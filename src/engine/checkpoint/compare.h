#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace sherd::engine {

/// One state of one parameter that is not as a checkpoint has it.
struct TensorDifference {
  std::string name;            ///< KIND.PARAMETER, as "exp_avg.blocks.0.mlp.up.weight"
  std::int64_t first = 0;      ///< flat index in the logical tensor of the first element that differs
  double saved = 0, here = 0;  ///< its values
  std::int64_t differing = 0, elements = 0;
  /// The largest difference in units in the last place: how many numbers of the type lie between the two
  /// values, plus one. NaNs and infinities count as such numbers too.
  std::uint64_t ulps = 0;
};

/// How what training has made differs from a checkpoint (Engine::compare_checkpoint()). The same on all
/// ranks, but for the texts, which rank 0 has.
struct Comparison {
  std::int64_t tensors = 0, differing_tensors = 0;    ///< states of parameters, over all ranks
  std::int64_t elements = 0, differing_elements = 0;  ///< theirs
  /// The first of them that differs: weights go before the optimizer's states, each in the order of names.
  std::optional<TensorDifference> first;
  /// Steps, samples, states of schedule, loss scale and modules: "optimizer steps were 4 and are 3".
  std::vector<std::string> others;
  std::int64_t differing_others = 0;
  bool counts_agree = true;  ///< steps, samples, updates and the loader's position, of rank 0's
  /// Where an earlier checkpoint is known: the root mean square of the weights' differences, over that of
  /// their changes since then. Infinite where only the latter is 0; NaN where a weight is NaN.
  std::optional<double> weights_error;

  bool agrees() const { return differing_elements == 0 && differing_others == 0; }
};

}  // namespace sherd::engine
