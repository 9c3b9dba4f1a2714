#include "engine/estimate/dry_run.h"

#include "comm/dry/dry_world.h"
#include "engine/preference/preference_run.h"
#include "engine/preference/reference_copy.h"
#include "engine/setup/make_device.h"
#include "engine/setup/process_grid.h"
#include "nn/layered_model.h"
#include "nn/text_loss.h"
#include "tensor/meta/recording_kernels.h"

namespace sherd::engine {
namespace {

/// Without limits, and without a word to the log.
config::Config quiet(config::Config config) {
  config.device.device_memory_limit = config.device.host_memory_limit = 0;
  config.notes.clear();
  config.dump_state = config.memory_breakdown = config.wall_clock_breakdown = false;
  config.steps_per_print = 0;
  config.log_level.reset();
  return config;
}

/// Takes down what passes from part to part of a model that one rank runs whole.
class FormRecorder final : public nn::Stages {
 public:
  explicit FormRecorder(nn::LayeredModel& model) : model_(model) { model_.set_stages(this); }
  ~FormRecorder() override { model_.set_stages(nullptr); }
  bool has(std::size_t) const override { return true; }
  autograd::Var cross(autograd::Tape&, std::size_t, const autograd::Var& x) override {
    forms_.push_back({x.value().shape(), x.value().dtype()});
    return x;
  }
  tensor::Tensor from_last(autograd::Tape&, const tensor::Tensor& value) override { return value; }
  const std::vector<ValueForm>& forms() const { return forms_; }

 private:
  nn::LayeredModel& model_;
  std::vector<ValueForm> forms_;
};

}  // namespace

DryRun::DryRun(const config::Config& config, const ModelSource& model, const MakeBatch& batch,
               const DryRank& rank, const WorkListeners& listeners)
    : batch_(batch) {
  const auto dist =
      std::make_shared<Distributed>(comm::make_dry_world(rank.rank, rank.ranks, listeners.calls),
                                    rank.rank % rank.local_ranks, rank.local_ranks);
  const int threads = compute_threads(config, rank.local_ranks);
  auto device = meant_for_gpus(config) ? device::make_meta_gpu(threads) : device::make_meta_device(threads);
  const auto groups =
      std::make_shared<comm::ProcessGroups>(dist->world(), comm::Grid(rank.ranks, grid_sizes(config)), false);
  require_takes_layout(model.takes_layout(), *groups);
  std::unique_ptr<tensor::Kernels> kernels;
  if (listeners.kernels)
    kernels =
        std::make_unique<tensor::meta::RecordingKernels>(make_kernels(config, *device), listeners.kernels);
  engine_ = std::make_unique<Engine>(dist, model.build(layout_of(*groups, config)), quiet(config),
                                     std::move(device), std::move(kernels), groups);
  if (config.reference() == config::Reference::copy)
    copy_ = make_reference_copy(*engine_, model.build(layout_of(*groups, config)), groups);
}

void DryRun::before_step() {
  const config::Config& config = engine_->config();
  if (passes_before_step(config) == 0) return;
  const bool adapter = config.reference() == config::Reference::adapter;
  auto* model = dynamic_cast<nn::TextModel*>(&reference().module());
  if (!model) return;
  const tensor::Batch texts = batch();
  if (!texts.contains("sides")) return;
  reference().evaluate([&](autograd::Tape& tape) { model->text_scores(tape, texts, adapter); });
}

std::vector<ValueForm> DryRun::forms_of_parts() {
  FormRecorder recorder(dynamic_cast<nn::LayeredModel&>(engine_->module()));
  evaluate();
  return recorder.forms();
}

}  // namespace sherd::engine
