#include "sharding/schedule/schedules.h"

#include <algorithm>
#include <array>

#include "sharding/schedule/step_list.h"

namespace sherd::sharding {
namespace {

using Op = Instruction::Op;

void check(const ScheduleShape& shape) {
  require(shape.stages > 0 && shape.stage >= 0 && shape.stage < shape.stages && shape.chunks > 0 &&
              shape.micro_batches > 0,
          "a schedule needs a stage of a pipeline, a chunk and a micro-batch");
}

void require_one_chunk(const char* schedule, const ScheduleShape& shape) {
  check(shape);
  if (shape.chunks > 1)
    fail(ErrorKind::config, "parallel.schedule ", schedule,
         " has one chunk per stage, and "
         "parallel.virtual_stages is ",
         shape.chunks, ": set it to 1, or take schedule interleaved");
}

void require_one_stage(const char* schedule, const ScheduleShape& shape) {
  check(shape);
  if (shape.stages > 1)
    fail(ErrorKind::config, "parallel.schedule ", schedule,
         " runs the whole model on each rank, and "
         "parallel.pipeline is ",
         shape.stages, ": set it to 1, or take 1f1b, gpipe, interleaved or zero_bubble");
}

/// `op` of all micro-batches on chunk 0.
ComputeOrder all(Op op, const ScheduleShape& shape) {
  ComputeOrder order;
  for (std::int64_t m = 0; m < shape.micro_batches; ++m) order.push_back({op, m});
  return order;
}

/// `warm_up` forwards, then one forward and one backward in turn, then the backwards that are left.
ComputeOrder alternate(const ComputeOrder& forwards, const ComputeOrder& backwards, std::int64_t warm_up) {
  ComputeOrder order;
  order.reserve(forwards.size() + backwards.size());
  const auto ahead = std::min(forwards.size(), static_cast<std::size_t>(warm_up));
  order.assign(forwards.begin(), forwards.begin() + static_cast<std::ptrdiff_t>(ahead));
  for (std::size_t i = 0; i < backwards.size(); ++i) {
    if (i + ahead < forwards.size()) order.push_back(forwards[i + ahead]);
    order.push_back(backwards[i]);
  }
  return order;
}

ComputeOrder one_then_one(const ScheduleShape& shape) {
  return alternate(all(Op::forward, shape), all(Op::backward, shape), shape.stages - shape.stage - 1);
}

// ---- interleaved ----

/// The last group may be smaller than others, but a micro-batch must be back from the last stage when the
/// first one has passed the group on.
bool serves(std::int64_t group, const ScheduleShape& shape) {
  const std::int64_t rest = shape.micro_batches % group;
  return group >= shape.stages && group <= shape.micro_batches && (rest == 0 || rest >= shape.stages);
}

void check_group(std::int64_t group, const ScheduleShape& shape) {
  if (serves(group, shape)) return;
  const std::int64_t m = shape.micro_batches, stages = shape.stages;
  const std::string what =
      cat("parallel.schedule interleaved: groups of ", group, " micro-batches (",
          shape.group > 0 ? "parallel.micro_batch_group" : "as many as stages",
          ") do not fit gradient_accumulation_steps = ", m,
          group > m ? ", which do not fill one"
                    : cat(", for none may be smaller than parallel.pipeline = ", stages));
  const std::int64_t enough = std::max(group, stages);
  if (m < stages)
    fail(ErrorKind::config, what, ": set gradient_accumulation_steps to ", enough,
         " or a multiple, or take schedule 1f1b");
  std::string groups;
  for (std::int64_t g = stages, found = 0; g <= m && found < 4; ++g)
    if (serves(g, shape)) groups += cat(found++ > 0 ? ", " : "", g);
  fail(ErrorKind::config, what, ": set parallel.micro_batch_group to one of ", groups,
       ", or gradient_accumulation_steps to a multiple of ", enough);
}

/// Groups of micro-batches, and in a group chunk after chunk; backward visits chunks from the last one.
ComputeOrder by_groups(Op op, std::int64_t group, const ScheduleShape& shape) {
  ComputeOrder order;
  order.reserve(static_cast<std::size_t>(shape.micro_batches * shape.chunks));
  for (std::int64_t begin = 0; begin < shape.micro_batches; begin += group)
    for (int c = 0; c < shape.chunks; ++c)
      for (std::int64_t m = begin; m < std::min(begin + group, shape.micro_batches); ++m)
        order.push_back({op, m, op == Op::forward ? c : shape.chunks - 1 - c});
  return order;
}

}  // namespace

std::string_view name_of(Instruction::Op op) {
  static constexpr std::array<std::string_view, 16> names = {
      "update_chunk",     "gather",          "release",        "receive_activation",
      "forward",          "send_activation", "share_loss",     "begin_update",
      "receive_gradient", "backward",        "backward_input", "send_gradient",
      "weight_gradients", "reduce",          "count",          "update"};
  return names.at(static_cast<std::size_t>(op));
}

std::vector<Instruction> gpipe(const ScheduleShape& shape) {
  require_one_chunk("gpipe", shape);
  return complete_step(shape,
                       alternate(all(Op::forward, shape), all(Op::backward, shape), shape.micro_batches));
}

std::vector<Instruction> one_forward_one_backward(const ScheduleShape& shape) {
  require_one_chunk("1f1b", shape);
  return complete_step(shape, one_then_one(shape));
}

std::vector<Instruction> interleaved(const ScheduleShape& shape) {
  check(shape);
  if (shape.chunks == 1) return one_forward_one_backward(shape);
  const std::int64_t group = shape.group > 0 ? shape.group : shape.stages;
  check_group(group, shape);
  const std::int64_t warm_up = 2 * (shape.stages - shape.stage - 1) + (shape.chunks - 1) * group;
  return complete_step(
      shape, alternate(by_groups(Op::forward, group, shape), by_groups(Op::backward, group, shape), warm_up));
}

/// Stage s forms weight gradients s micro-batches late: so long the stages before it wait for its gradients.
std::vector<Instruction> zero_bubble(const ScheduleShape& shape) {
  require_one_chunk("zero_bubble", shape);
  ComputeOrder order;
  std::int64_t next = 0;
  const auto weights = [&] { order.push_back({Op::weight_gradients, next++}); };
  for (const Instruction& i : one_then_one(shape)) {
    order.push_back(i);
    if (i.op != Op::backward) continue;
    order.back().op = Op::backward_input;
    if (i.micro_batch >= shape.stage) weights();
  }
  while (next < shape.micro_batches) weights();
  return complete_step(shape, order);
}

std::vector<Instruction> layered(const ScheduleShape& shape) {
  require_one_stage("layered", shape);
  const int last = shape.chunks - 1;
  ComputeOrder order;
  const auto each = [&](int chunk, std::initializer_list<Op> ops) {
    for (std::int64_t m = 0; m < shape.micro_batches; ++m)
      for (const Op op : ops) order.push_back({op, m, chunk});
  };
  for (int c = 0; c < last; ++c) each(c, {Op::forward});
  each(last, {Op::forward, Op::backward});
  for (int c = last - 1; c >= 0; --c) each(c, {Op::backward});
  return complete_step(shape, order, Gathers::by_chunk);
}

std::vector<Instruction> accumulate(std::int64_t micro_batch, bool ends_step, bool early_update) {
  std::vector<Instruction> list{{Op::forward, micro_batch}};
  if (ends_step) list.push_back({Op::share_loss, micro_batch});
  if (ends_step && early_update) list.push_back({Op::begin_update, micro_batch});
  for (const Op op : {Op::backward, Op::reduce, Op::count}) list.push_back({op, micro_batch});
  if (ends_step) list.push_back({Op::update, micro_batch});
  return list;
}

std::vector<Instruction> accumulate(const ScheduleShape& shape) {
  require_one_stage("accumulate", shape);
  require_one_chunk("accumulate", shape);
  std::vector<Instruction> list;
  if (shape.late_update) list.push_back({Op::update_chunk, -1});
  for (std::int64_t m = 0; m < shape.micro_batches; ++m)
    for (const Instruction& each : accumulate(m, m + 1 == shape.micro_batches, shape.early_update))
      list.push_back(each);
  return list;
}

std::vector<Instruction> make_schedule(config::Schedule schedule, const ScheduleShape& shape) {
  switch (schedule) {
    case config::Schedule::accumulate:
      return accumulate(shape);
    case config::Schedule::layered:
      return layered(shape);
    case config::Schedule::gpipe:
      return gpipe(shape);
    case config::Schedule::one_forward_one_backward:
      return one_forward_one_backward(shape);
    case config::Schedule::interleaved:
      return interleaved(shape);
    case config::Schedule::zero_bubble:
      return zero_bubble(shape);
    case config::Schedule::automatic:
      break;
  }
  fail(ErrorKind::usage, "a list is made for a schedule that was chosen");
}

}  // namespace sherd::sharding
