#include "cli/inference/inference_model.h"

#include <algorithm>
#include <limits>

#include "cli/command_line.h"
#include "cli/weights.h"
#include "engine/setup/process_grid.h"
#include "models/gpt.h"

namespace sherd::cli {

void prepare_for_inference(config::Config& config, const WeightsPlace& place, int ranks) {
  const int model_ranks = config.parallel.tensor * config.parallel.pipeline;
  if (ranks % model_ranks != 0)
    fail(ErrorKind::config, ranks, ranks == 1 ? " rank is" : " ranks are", " not a multiple of the ",
         model_ranks, " that share the model (parallel.tensor x parallel.pipeline)");
  if (place.offload == config::OffloadDevice::nvme && place.nvme_path.empty())
    throw UsageError(
        "--offload nvme needs --nvme-path DIR: a folder on the drive that is to hold the weights");
  const bool apart = place.offload != config::OffloadDevice::none || ranks > model_ranks;
  config.zero.stage = apart ? 3 : 0;
  config.zero.offload_optimizer = config::Offload::of_optimizer();
  config::Offload& parameters = config.zero.offload_param = {};
  parameters.device = place.offload;
  parameters.nvme_path = place.nvme_path;
  parameters.max_in_cpu = 0;  // all of them go there
  parameters.buffer_count = 3;
  parameters.buffer_size = std::numeric_limits<std::int64_t>::max();
  if (place.base_format) config.training.adapter.keep_base_as(*place.base_format);
  config.training.nvme_checkpointing = false;
  config.training.cpu_checkpointing = false;
  // Texts grow by single tokens, which ranks cannot cut.
  config.parallel.sequence_parallel = false;
  config.batch = {};
  config.batch.micro_batch_size = config.batch.gradient_accumulation_steps = 1;
  config.device.device_memory_limit = place.device_memory_limit;
}

namespace {
/// Elements of the largest part of a model that are gathered at once.
std::int64_t largest_part(const nn::LayeredModel& model) {
  std::int64_t most = 0;
  for (std::size_t part = 0; part < model.parts(); ++part) {
    std::int64_t elements = 0;
    for (const auto& module : model.modules(part))
      for (const autograd::ParameterPtr& parameter : module->parameters()) elements += parameter->numel();
    most = std::max(most, elements);
  }
  return most;
}
}  // namespace

InferenceModel::InferenceModel(const engine::CheckpointReader& reader, config::Config config,
                               const DistributedPtr& dist)
    : config_(std::move(config)) {
  const auto groups = make_groups(dist, config_);
  const auto coordinate = [&](comm::Axis axis) { return groups->grid().coordinate(axis, dist->rank()); };
  share_ = {coordinate(comm::Axis::data), groups->grid().size(comm::Axis::data)};
  leads_ = coordinate(comm::Axis::tensor) == 0 && coordinate(comm::Axis::pipeline) == 0;
  resources_ = std::make_unique<engine::Resources>(*dist, config_, nullptr, nullptr, groups);
  model_ = std::make_shared<models::Gpt>(models::gpt_config(config_, reader.manifest().data.vocab_size),
                                         layout_of(*groups, config_));
  // Frozen: neither gradients nor masters. Values come from the checkpoint, and none need be drawn.
  for (const autograd::ParameterPtr& parameter : model_->parameters()) {
    parameter->trainable = false;
    parameter->init = autograd::Init::zeros();
  }
  for (const autograd::ParameterPtr& weight : model_->linear_weights())
    weight->stored_as = config_.training.adapter.stored_base();
  engine::require_cut(*model_, *groups, *dist, true);
  stages_ =
      std::make_unique<engine::StageLayout>(engine::agree_on_stages(*model_, config_, *groups, *dist, true));
  sharding::ShardingOptions options = sharding::make_sharding_options(config_);
  // Room for the part that runs, and as much ahead of it.
  const std::int64_t largest = largest_part(*model_);
  options.residency = {.prefetch_bucket = largest, .max_live = 2 * largest, .max_reuse_distance = 0};
  options.parts = stages_->all_own();
  sharded_ = std::make_unique<sharding::ShardedModel>(
      model_, options, resources_->sources(engine::StateGroups(*model_, *stages_, *groups)));
  Weights weights(reader.folder().string(), model_->config(), resources_->device(), config_.training.adapter);
  engine::load_weights(weights.source(), *sharded_, resources_->kernels());
  pass_ = std::make_unique<sharding::Pass>(*sharded_);
  if (stages_->stages > 1) over_stages_.emplace(*model_, *stages_, groups->group(comm::Axis::pipeline));
}

InferenceModel::~InferenceModel() = default;

}  // namespace sherd::cli
