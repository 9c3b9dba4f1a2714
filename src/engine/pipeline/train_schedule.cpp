#include "engine/pipeline/train_schedule.h"

#include <cstdio>
#include <map>
#include <utility>

#include "base/text/excerpt.h"
#include "nn/layered_model.h"
#include "sharding/placement.h"
#include "sharding/schedule/schedules.h"
#include "sharding/schedule/simulate.h"

namespace sherd::engine {

using config::Schedule;

bool TrainSchedule::runs_micro_batches(const config::Config& config, bool by_micro_batches) const {
  if (schedule == Schedule::accumulate) return true;
  if (!by_micro_batches) return false;
  const bool can = config.parallel.schedule == Schedule::automatic && layout.stages == 1;
  require(can,
          "train_batch() with this parallel.schedule takes a whole step of gradient_accumulation_steps "
          "micro-batches: set_gradient_accumulation_boundary() and steps that forward() has begun go with "
          "accumulate only");
  return true;
}

void TrainSchedule::require_micro_batches(const config::Config& config) const {
  const bool can = schedule == Schedule::accumulate || config.parallel.schedule == Schedule::automatic;
  require(can || layout.stages > 1,
          "forward() takes one micro-batch at a time, and this parallel.schedule whole steps: call "
          "train_batch(), or set it to auto or accumulate");
}

StageLayout whole_model(const nn::Model& model) {
  const auto* layered = dynamic_cast<const nn::LayeredModel*>(&model);
  StageLayout layout;
  layout.chunks = {{0, layered ? layered->parts() : 1}};
  return layout;
}

namespace {

/// A model that is run part by part never runs what belongs to none of them.
void require_all_in_parts(const nn::LayeredModel& model) {
  if (const autograd::Parameter* outside = outside_of_parts(model))
    fail(ErrorKind::config, "parallel.schedule runs the model part by part, and no part has parameter '",
         outside->name, "': give its module to append_part(), or choose accumulate");
}

bool ties_parts(const nn::LayeredModel& model) {
  std::map<const autograd::Parameter*, std::size_t> part_of;
  for (std::size_t part = 0; part < model.parts(); ++part)
    for (const auto& module : model.modules(part))
      for (const auto& parameter : module->parameters())
        if (part_of.emplace(parameter.get(), part).first->second != part) return true;
  return false;
}

/// One stage whose chunks are the parts.
StageLayout by_parts(const nn::Model& model) {
  const auto* layered = dynamic_cast<const nn::LayeredModel*>(&model);
  if (!layered)
    fail(ErrorKind::config,
         "parallel.schedule is layered, and the model offers no list of parts: derive it from "
         "nn::LayeredModel, or choose accumulate");
  StageLayout layout;
  layout.chunks.clear();
  for (std::size_t part = 0; part < layered->parts(); ++part) layout.chunks.push_back({part, part + 1});
  return layout;
}

/// Parameters that have to come for each use: from where. Null where they are there.
const char* source_of_parameters(const config::Config& config, int shards) {
  const sharding::Placement parameters = sharding::make_placements(config).parameters;
  if (parameters.spread != sharding::Spread::sharded) return nullptr;
  if (parameters.tier == device::Tier::nvme) return "NVMe";
  if (parameters.tier == device::Tier::host) return "host memory";
  return shards > 1 ? "other ranks" : nullptr;
}

/// Whether parameters would come again with each of several micro-batches, and once for all of them with
/// `layered`.
bool saves_traffic(const config::Config& config, const nn::Model& model, int shards) {
  const auto* layered = dynamic_cast<const nn::LayeredModel*>(&model);
  return layered && layered->parts() > 1 && !outside_of_parts(*layered) &&
         config.batch.gradient_accumulation_steps > 1 && source_of_parameters(config, shards);
}

bool recomputes_all(const config::Training& training) {
  return training.recompute == Recompute::full && training.recompute_blocks < 0 &&
         training.recompute_micro_batches < 0;
}

}  // namespace

Schedule schedule_of(const config::Config& config, bool by_parts, int shards) {
  if (config.parallel.schedule != Schedule::automatic) return config.parallel.schedule;
  if (config.parallel.virtual_stages > 1) return Schedule::interleaved;
  if (config.parallel.pipeline > 1) return Schedule::one_forward_one_backward;
  const bool layered = by_parts && config.batch.gradient_accumulation_steps > 1 &&
                       source_of_parameters(config, shards) && recomputes_all(config.training);
  return layered ? Schedule::layered : Schedule::accumulate;
}

TrainSchedule choose_schedule(const config::Config& config, const nn::Model& model, StageLayout layout,
                              int shards) {
  const auto* layered = dynamic_cast<const nn::LayeredModel*>(&model);
  const Schedule schedule =
      schedule_of(config, saves_traffic(config, model, shards) && !ties_parts(*layered), shards);
  const bool one_stage = schedule == Schedule::accumulate || schedule == Schedule::layered;
  if (one_stage && layout.stages > 1)
    fail(ErrorKind::config, "parallel.schedule ", schedule == Schedule::layered ? "layered" : "accumulate",
         " runs on one stage, and parallel.pipeline is ", layout.stages,
         ": choose 1f1b, gpipe, interleaved or zero_bubble");
  if (schedule == Schedule::layered) layout = by_parts(model);
  if (layout.chunks.size() > 1) require_all_in_parts(dynamic_cast<const nn::LayeredModel&>(model));
  return {schedule, std::move(layout)};
}

namespace {

/// The shape as the first stage has it.
sharding::ScheduleShape shape_of(const TrainSchedule& schedule, const config::Config& config) {
  sharding::ScheduleShape shape;
  shape.stages = schedule.layout.stages;
  shape.chunks = schedule.layout.own_chunks();
  shape.micro_batches = config.batch.gradient_accumulation_steps;
  shape.group = config.parallel.micro_batch_group;
  return shape;
}

}  // namespace

std::int64_t most_in_flight(const TrainSchedule& schedule, const config::Config& config) {
  if (schedule.schedule == Schedule::accumulate) return 1;
  return sharding::most_in_flight(sharding::make_schedule(schedule.schedule, shape_of(schedule, config)));
}

std::vector<sharding::Instruction> make_list(const TrainSchedule& schedule, const config::Config& config,
                                             bool early_update, bool late_update) {
  sharding::ScheduleShape shape = shape_of(schedule, config);
  shape.stage = schedule.layout.stage;
  shape.early_update = early_update;
  shape.late_update = late_update && schedule.schedule == Schedule::layered;
  std::vector<sharding::Instruction> list = sharding::make_schedule(schedule.schedule, shape);
  if (const std::int64_t recompute = config.training.recompute_micro_batches; recompute >= 0)
    sharding::keep_activations(list, most_in_flight(schedule, config) - recompute);
  return list;
}

double ideal_bubble(const TrainSchedule& schedule, const config::Config& config, nn::LayeredModel& model) {
  using Op = sharding::Instruction::Op;
  const std::vector<std::int64_t> weights = part_weights(model, "best");
  TrainSchedule of_stage = schedule;
  std::vector<std::vector<sharding::Instruction>> lists;
  for (of_stage.layout.stage = 0; of_stage.layout.stage < schedule.layout.stages; ++of_stage.layout.stage)
    lists.push_back(make_list(of_stage, config, false, false));
  const double again = config.training.recompute == Recompute::full ? 1 : 0;
  const auto time = [&](int stage, const sharding::Instruction& i) -> sharding::InstructionTime {
    const auto number = static_cast<std::size_t>(i.chunk * schedule.layout.stages + stage);
    double forward = 0;
    for (std::size_t part = schedule.layout.chunks[number].begin; part < schedule.layout.chunks[number].end;)
      forward += static_cast<double>(weights[part++]);
    switch (i.op) {
      case Op::forward:
      case Op::weight_gradients:
        return {forward};
      case Op::backward_input:
        return {forward * (1 + again)};
      case Op::backward:
        return {forward * (2 + again)};
      default:
        return {};
    }
  };
  return sharding::simulate(lists, time).bubble();
}

std::string describe_schedule(const TrainSchedule& schedule, const config::Config& config, nn::Model& model,
                              int shards) {
  const std::int64_t micro_batches = config.batch.gradient_accumulation_steps;
  const std::string name = cat("schedule ", config::name_of(schedule.schedule));
  if (schedule.layout.stages > 1) {
    char bubble[32];
    std::snprintf(bubble, sizeof bubble, "%.3f",
                  ideal_bubble(schedule, config, dynamic_cast<nn::LayeredModel&>(model)));
    return cat(name, ", ", schedule.layout.stages, " stages, gradient_accumulation_steps ", micro_batches,
               ": a bubble of ", bubble, " of the time that ranks compute, as their parts' parameters weigh");
  }
  if (!saves_traffic(config, model, shards)) return "";
  const char* source = source_of_parameters(config, shards);
  if (schedule.schedule == Schedule::layered)
    return cat(name, ": parameters come from ", source, " twice per step, not with each of ", micro_batches,
               " micro-batches",
               ties_parts(dynamic_cast<const nn::LayeredModel&>(model))
                   ? "; gradients of what parts of the model share agree with accumulate's to rounding"
                   : "");
  return cat(name, ": parameters come from ", source, " with each of ", micro_batches,
             " micro-batches; with parallel.schedule layered twice per step, which keeps the activations of "
             "all micro-batches (few with training.recompute full)");
}

}  // namespace sherd::engine
