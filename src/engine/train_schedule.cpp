#include "engine/train_schedule.h"

#include <utility>

#include "nn/layered_model.h"
#include "sharding/schedule/schedules.h"

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

StageLayout whole_model(const nn::Model& model) {
  const auto* layered = dynamic_cast<const nn::LayeredModel*>(&model);
  StageLayout layout;
  layout.chunks = {{0, layered ? layered->parts() : 1}};
  return layout;
}

namespace {

Schedule automatic(const StageLayout& layout) {
  if (layout.own_chunks() > 1) return Schedule::interleaved;
  return layout.stages > 1 ? Schedule::one_forward_one_backward : Schedule::accumulate;
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

}  // namespace

TrainSchedule choose_schedule(const config::Config& config, const nn::Model& model, StageLayout layout) {
  Schedule schedule = config.parallel.schedule;
  if (schedule == Schedule::automatic) schedule = automatic(layout);
  const bool one_stage = schedule == Schedule::accumulate || schedule == Schedule::layered;
  if (one_stage && layout.stages > 1)
    fail(ErrorKind::config, "parallel.schedule ", schedule == Schedule::layered ? "layered" : "accumulate",
         " runs on one stage, and parallel.pipeline is ", layout.stages,
         ": choose 1f1b, gpipe, interleaved or zero_bubble");
  if (schedule == Schedule::layered) layout = by_parts(model);
  return {schedule, std::move(layout)};
}

std::vector<sharding::Instruction> make_list(const TrainSchedule& schedule, const config::Config& config,
                                             bool early_update, bool late_update) {
  sharding::ScheduleShape shape;
  shape.stages = schedule.layout.stages;
  shape.stage = schedule.layout.stage;
  shape.chunks = schedule.layout.own_chunks();
  shape.micro_batches = config.batch.gradient_accumulation_steps;
  shape.group = config.parallel.micro_batch_group;
  shape.early_update = early_update;
  shape.late_update = late_update && schedule.schedule == Schedule::layered;
  return sharding::make_schedule(schedule.schedule, shape);
}

}  // namespace sherd::engine
