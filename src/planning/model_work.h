#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "engine/estimate/step_time.h"
#include "models/gpt_config.h"

namespace sherd::planning {

/// The configuration as it runs on a machine: on its GPUs, where it has some and no device is named.
config::Config placed_on(const config::Machine& machine, config::Config config);
/// The same, with batch sizes resolved for so many ranks. Throws what config::resolve_batch() throws.
config::Config as_run_on(const config::Machine& machine, config::Config config, int ranks);

/// The work of transformers by what decides about it: tensor, context and expert ranks, micro-batch and
/// recompute. Each kind of block is recorded once, whatever the number of layers.
class GptWork {
 public:
  /// `vocabulary`: the dataset's ids, where the model section leaves them out.
  explicit GptWork(std::int64_t vocabulary) : vocabulary_(vocabulary) {}

  /// `config` has its batch sizes resolved, and the same model and precision at every call. Valid as long as
  /// this object. Throws what engine::record_parts() throws.
  const engine::ModelWork& of(const config::Config& config);

 private:
  engine::ModelWork record(const config::Config& config) const;
  std::vector<int> stages_of_parts(const config::Parallel& parallel) const;

  std::int64_t vocabulary_;
  std::vector<std::int64_t> weights_;  ///< of the parts, as all layouts have them
  std::string cut_by_;                 ///< the partition_method of weights_
  std::map<std::string, engine::ModelWork> recorded_;
};

}  // namespace sherd::planning
