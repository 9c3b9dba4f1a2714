#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

namespace sherd::engine {

/// The lowest validation loss of a run, for training.keep_best and training.patience. The same on all ranks.
class BestLoss {
 public:
  /// Takes the loss that the evaluation after `step` found.
  void see(std::int64_t step, double loss);

  std::optional<double> loss() const { return best_; }
  std::int64_t step() const { return step_; }  ///< after which it was found
  /// The last loss seen is the lowest.
  bool improved() const { return best_.has_value() && without_ == 0; }
  /// Evaluations since, which found no lower one. A loss that is NaN or infinite is none.
  std::int64_t without_improvement() const { return without_; }

  /// Into a checkpoint's strings, and out of them: nothing was seen where they say nothing. Throws
  /// Error{data} where they hold no numbers.
  void save(std::map<std::string, std::string>& client) const;
  void restore(const std::map<std::string, std::string>& client);

 private:
  std::optional<double> best_;
  std::int64_t step_ = 0, without_ = 0;
};

}  // namespace sherd::engine
