#pragma once

#include <memory>
#include <string>
#include <vector>

#include "data/loader.h"
#include "engine/engine.h"
#include "engine/preference/preference_run.h"
#include "engine/token_data.h"
#include "models/gpt.h"

namespace sherd::cli {

/// One rank's part of what a configuration trains: the engine with its model, and the training data. What
/// `sherd train` runs and `sherd verify` replays.
class TrainSetup {
 public:
  /// Collective.
  TrainSetup(DistributedPtr dist, const config::Config& config,
             std::shared_ptr<const engine::TokenData> data);

  /// For a run that begins: takes the weights of training.init_from, or leaves those that were drawn.
  /// Collective.
  void begin();

  /// A step on the next batches. Collective.
  const engine::StepReport& train_step();

  Engine& engine() const { return *engine_; }
  data::Loader& loader() const { return *loader_; }
  /// Null where no preferences are learned.
  engine::PreferenceRun* preferences() const { return preferences_.get(); }
  const models::GptConfig& shape() const { return shape_; }

 private:
  bool speaks() const { return dist_->rank() == 0; }
  void require_base() const;
  std::vector<std::int32_t> prompt_ids() const;
  void refer_to(const std::string& folder);
  void begin_from(const std::string& folder);
  void make_reference();
  void warn_of_other_tokenizer(const engine::ExtraFiles& companions) const;

  DistributedPtr dist_;
  std::shared_ptr<const engine::TokenData> data_;
  models::GptConfig shape_;
  std::shared_ptr<comm::ProcessGroups> groups_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<Engine> reference_;  ///< the frozen copy; null: there is none
  std::unique_ptr<data::Loader> loader_;
  std::unique_ptr<engine::PreferenceRun> preferences_;
};

}  // namespace sherd::cli
