#pragma once

#include <memory>
#include <optional>

#include "engine/checkpoint/checkpoint.h"
#include "engine/pipeline/stage_link.h"
#include "engine/setup/resources.h"
#include "models/inference/score.h"
#include "sharding/pass.h"
#include "sharding/sharded_model.h"

namespace sherd::cli {

/// Where the weights of a model lie that generates or scores texts.
struct WeightsPlace {
  config::OffloadDevice offload = config::OffloadDevice::none;  ///< off the device, gathered block by block
  std::string nvme_path;                                        ///< for nvme
  std::uint64_t device_memory_limit = 0;                        ///< bytes; 0: none
  std::optional<StoredFormat> base_format;  ///< how linear layers' weights are kept; not set: as the run had
};

/// `config` of a run as inference takes it: its weights in the dtype that it computes in, where `place`
/// says; over `ranks` ranks, of which those beyond tensor × pipeline share the weights out (ZeRO 3). Nothing
/// of training. Throws Error{config} for ranks that do not divide, UsageError for nvme without a path.
void prepare_for_inference(config::Config& config, const WeightsPlace& place, int ranks);

/// A checkpoint's model, ready to run, to generate or to score texts: frozen, and gathered block by block
/// where its weights lie elsewhere or are shared out. One per rank, used from its thread; construction is
/// collective.
class InferenceModel {
 public:
  /// `config`: of prepare_for_inference().
  InferenceModel(const engine::CheckpointReader& reader, config::Config config, const DistributedPtr& dist);
  ~InferenceModel();
  InferenceModel(const InferenceModel&) = delete;
  InferenceModel& operator=(const InferenceModel&) = delete;

  models::Gpt& model() { return *model_; }
  device::Device& device() const { return resources_->device(); }
  /// Which of the texts this rank scores, where data-parallel ranks share them out.
  models::ScoreShare share() const { return share_; }
  /// This rank is the first of those that compute one text together, which all find the same.
  bool leads() const { return leads_; }
  /// A pass over the model, for models::generate_texts().
  models::RunPass run() {
    return [this](const std::function<void(autograd::Tape&)>& body) { pass_->evaluate(body); };
  }

 private:
  config::Config config_;
  models::ScoreShare share_;
  bool leads_;
  std::unique_ptr<engine::Resources> resources_;
  std::shared_ptr<models::Gpt> model_;
  std::unique_ptr<engine::StageLayout> stages_;
  std::unique_ptr<sharding::ShardedModel> sharded_;
  std::unique_ptr<sharding::Pass> pass_;
  std::optional<engine::ModelStages> over_stages_;
};

}  // namespace sherd::cli
