#include "cli/verification/promises.h"

#include <algorithm>

#include "base/text/excerpt.h"
#include "engine/setup/process_grid.h"

namespace sherd::cli {
namespace {

bool has_table_on_two_stages(const RunShape& run) {
  return run.pipeline > 1 && run.config.model && run.config.model->tied();
}

bool exchanges_momentum(const RunShape& run) {
  const config::Optimizer& optimizer = run.config.optimizer;
  return optimizer.exchanges_momentum() ||
         std::ranges::any_of(optimizer.groups, [](const auto& group) { return group.exchanges_momentum(); });
}

/// Why the order in which gradients are summed depends on the number of ranks; empty: it does not.
std::string order_by_ranks(const RunShape& run) {
  const config::Config& config = run.config;
  if (exchanges_momentum(run)) return "a 1-bit optimizer exchanges what each replica has of its own";
  if (config.precision.gradient_dtype() != DType::f32)
    return cat("gradients are summed in ", name_of(config.precision.gradient_dtype()),
               " (data_types.grad_accum_dtype fp32 would make bits equal on any number of ranks)");
  const bool one_each = run.accumulation == 1 && run.expert == 1;
  if (config.zero.stage < 2 && !one_each)
    return cat("ZeRO stage ", config.zero.stage,
               " sums the micro-batches of each rank before ranks (2 and 3 go by micro-batches)");
  if (run.replicas > 1 && (run.accumulation > 1 || has_table_on_two_stages(run)))
    return "replicas (parallel.shard_size) sum their micro-batches each by themselves";
  return "";
}

void add_layout(const RunShape& saved, const RunShape& here, std::vector<std::string>& out) {
  const auto differs = [&](const char* what, std::int64_t then, std::int64_t now) {
    if (then != now) out.push_back(cat(counted(then, what), " trained, and ", now, " replay"));
  };
  differs("tensor rank", saved.tensor, here.tensor);
  differs("context rank", saved.context, here.context);
  const config::Parallel &then = saved.config.parallel, &now = here.config.parallel;
  if (saved.tensor > 1 && then.sequence_parallel != now.sequence_parallel)
    out.push_back("parallel.sequence_parallel is another");
  if (saved.context > 1 && then.context_method != now.context_method)
    out.push_back("parallel.context_method is another");
  if (has_table_on_two_stages(saved) != has_table_on_two_stages(here))
    out.push_back("a tied table lies on one pipeline stage, and on two");
}

void add_order(const RunShape& saved, const RunShape& here, std::vector<std::string>& out) {
  const std::string then = order_by_ranks(saved), now = order_by_ranks(here);
  if (then.empty() && now.empty()) return;
  if (saved.data != here.data) {
    out.push_back(cat(counted(saved.data, "data-parallel rank"), " trained, and ", here.data,
                      " replay: ", then.empty() ? now : then));
    return;
  }
  if (saved.replicas != here.replicas && saved.accumulation * here.accumulation > 1)
    out.push_back(cat(counted(saved.replicas, "replica"), " trained, and ", here.replicas, " replay"));
  if ((saved.config.zero.stage < 2) != (here.config.zero.stage < 2) && saved.accumulation > 1)
    out.push_back(cat("ZeRO stage ", saved.config.zero.stage, " trained, and stage ", here.config.zero.stage,
                      " replays, with ", saved.accumulation, " micro-batches to a step"));
}

}  // namespace

RunShape RunShape::of(const config::Config& config, const engine::Manifest& saved) {
  const auto size = [&](comm::Axis axis) {
    const auto found = saved.grid.find(std::string(comm::name_of(axis)));
    return found == saved.grid.end() ? std::int64_t{1} : found->second;
  };
  using comm::Axis;
  RunShape out{config,
               size(Axis::tensor),
               size(Axis::context),
               size(Axis::data),
               size(Axis::pipeline),
               size(Axis::expert),
               size(Axis::replica)};
  out.accumulation = config::resolve_batch(config, static_cast<int>(out.data)).gradient_accumulation_steps;
  return out;
}

RunShape RunShape::of(const config::Config& config, int ranks) {
  using comm::Axis;
  const comm::Grid grid(ranks, engine::grid_sizes(config));
  RunShape out{config,
               grid.size(Axis::tensor),
               grid.size(Axis::context),
               grid.size(Axis::data),
               grid.size(Axis::pipeline),
               grid.size(Axis::expert),
               grid.size(Axis::replica)};
  out.accumulation = config::resolve_batch(config, static_cast<int>(out.data)).gradient_accumulation_steps;
  return out;
}

std::vector<std::string> missing_promises(const RunShape& saved, const RunShape& here) {
  std::vector<std::string> out;
  for (const RunShape* run : {&saved, &here}) {
    if (!out.empty()) break;
    if (run->config.parallel.reduction == Reduction::native)
      out.push_back("parallel.reduction is native, whose sums have no fixed order");
  }
  if (!saved.config.device.deterministic_attention || !here.config.device.deterministic_attention)
    out.push_back("device.deterministic_attention is false");
  add_layout(saved, here, out);
  add_order(saved, here, out);
  return out;
}

std::vector<std::string> missing_promises(const engine::RunFacts& saved, const engine::RunFacts& here) {
  std::vector<std::string> out;
  const auto compare = [&](const char* what, const auto& then, const auto& now) {
    if (then != now) out.push_back(cat(what, " was ", then, " and is ", now));
  };
  compare("the version of Sherd", saved.version, here.version);
  compare("the device", saved.device, here.device);
  compare("the instruction set", saved.instruction_set, here.instruction_set);
  compare("the library of products", saved.libraries, here.libraries);
  compare("the number of compute threads per rank", saved.threads, here.threads);
  compare("the micro-batch (train_micro_batch_size_per_gpu)", saved.micro_batch, here.micro_batch);
  return out;
}

}  // namespace sherd::cli
