#include "engine/estimate/part_work.h"

#include <functional>
#include <numeric>
#include <set>

#include "engine/preference/preference_run.h"
#include "engine/setup/process_grid.h"
#include "engine/step/step_report.h"
#include "nn/layered_model.h"

namespace sherd::engine {
namespace {

/// Nothing is sharded, and no state is offloaded; a step has two micro-batches, of which the first exchanges
/// no gradient.
config::Config by_parts(config::Config config, int data) {
  config::Zero plain;
  plain.offload_param.nvme_path = config.zero.offload_param.nvme_path;  // inputs of blocks may go there
  plain.offload_optimizer.nvme_path = config.zero.offload_optimizer.nvme_path;
  config.zero = std::move(plain);
  config.parallel.pipeline = config.parallel.virtual_stages = 1;
  config.parallel.micro_batch_group = config.parallel.shard_size = 0;
  config.parallel.schedule = config::Schedule::layered;
  config.training.recompute_micro_batches = -1;
  config.batch.gradient_accumulation_steps = 2;
  config.batch.train_batch_size = 2 * config.batch.micro_batch_size * data;
  return config;
}

/// Appends what it is told to the pass under way.
class PartRecorder final : public InstructionObserver, public nn::Stages {
 public:
  using Op = sharding::Instruction::Op;

  /// Records `pass`, which runs the model before a step and is no instruction: where it is, cross() tells.
  void record_reference(nn::LayeredModel& model, const std::function<void()>& pass) {
    parts_.resize(model.parts());
    pass_ = &parts_.front().reference;
    model.set_stages(this);
    pass();
    model.set_stages(nullptr);
    pass_ = nullptr;
  }
  bool has(std::size_t) const override { return true; }
  autograd::Var cross(autograd::Tape&, std::size_t part, const autograd::Var& x) override {
    pass_ = &parts_.at(part).reference;
    return x;
  }
  tensor::Tensor from_last(autograd::Tape&, const tensor::Tensor& value) override { return value; }

  void begin(const sharding::Instruction& instruction) override {
    if (instruction.micro_batch != 0) return;
    const auto part = static_cast<std::size_t>(instruction.chunk);
    if (instruction.op != Op::forward && instruction.op != Op::backward) return;
    if (parts_.size() <= part) parts_.resize(part + 1);
    pass_ = instruction.op == Op::forward ? &parts_[part].forward : &parts_[part].backward;
    before_ = held();
  }
  void end(const sharding::Instruction& instruction, double) override {
    if (!pass_) return;
    if (instruction.op == Op::forward && held() > before_)
      parts_[static_cast<std::size_t>(instruction.chunk)].saved = held() - before_;
    pass_ = nullptr;
  }

  void tell(Work work) {
    if (pass_) pass_->push_back(std::move(work));
  }
  void watch(device::Ledger& ledger) { ledger_ = &ledger; }
  std::vector<PartWork>& parts() { return parts_; }

 private:
  std::uint64_t held() const { return ledger_->current(device::Tier::device, device::Category::activations); }

  std::vector<PartWork> parts_;
  std::vector<Work>* pass_ = nullptr;
  device::Ledger* ledger_ = nullptr;
  std::uint64_t before_ = 0;
};

void count_parameters(const nn::LayeredModel& model, int expert_rank, std::vector<PartWork>& parts) {
  std::set<const autograd::Parameter*> seen;
  for (std::size_t i = 0; i < parts.size(); ++i)
    for (const auto& module : model.modules(i))
      for (const auto& parameter : module->parameters()) {
        if (parameter->expert_rank >= 0 && parameter->expert_rank != expert_rank) continue;
        if (!seen.insert(parameter.get()).second) {
          parts[i].tied = true;
          continue;
        }
        std::int64_t& count = !parameter->trainable         ? parts[i].frozen
                              : parameter->expert_rank >= 0 ? parts[i].experts
                                                            : parts[i].trained;
        count += parameter->numel();
        if (parameter->fp8)
          (parameter->expert_rank >= 0 ? parts[i].experts_in_fp8 : parts[i].in_fp8) += parameter->numel();
      }
}

}  // namespace

std::vector<PartWork> record_parts(const config::Config& config, const ModelSource& model,
                                   const MakeBatch& batch) {
  const config::Parallel& parallel = config.parallel;
  const int data = parallel.expert / std::gcd(parallel.expert, parallel.context);
  const int ranks = parallel.tensor * parallel.context * data;
  PartRecorder recorder;
  DryRun run(by_parts(config, data), model, batch, {.ranks = ranks, .local_ranks = ranks},
             {.kernels = [&](const tensor::KernelWork& work) { recorder.tell(work); },
              .calls = [&](const comm::CommWork& work) { recorder.tell(work); }});
  recorder.watch(run.engine().device().ledger());
  if (auto* model = dynamic_cast<nn::LayeredModel*>(&run.reference().module()))
    for (int i = 0; i < passes_before_step(run.engine().config()); ++i)
      recorder.record_reference(*model, [&] { run.before_step(); });
  run.engine().set_observer(&recorder);
  run.engine().train_batch([&] { return run.batch(); });
  run.engine().set_observer(nullptr);
  std::vector<PartWork>& parts = recorder.parts();
  const std::vector<ValueForm> forms = run.forms_of_parts();
  for (std::size_t i = 0; i < forms.size(); ++i)
    parts.at(i).output = static_cast<std::uint64_t>(forms[i].shape.numel()) * size_of(forms[i].dtype);
  const auto& layered = dynamic_cast<const nn::LayeredModel&>(run.engine().module());
  count_parameters(layered, 0, parts);
  return std::move(parts);
}

}  // namespace sherd::engine
