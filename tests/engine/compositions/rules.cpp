#include "tests/engine/compositions/rules.h"

namespace sherd::test {
namespace {

bool is_pipeline_of_tied(const RunSpec& s) {
  return s.tied && s.pipeline > 1;
}

/// Sums of micro-batches' gradients in the global order, each formed from zero: the same for any number of
/// ranks.
bool folds_in_global_order(const RunSpec& s) {
  const bool in_fp32 = s.dtype == "fp32" || s.accumulate_in == "fp32";
  const bool by_micro_batch = s.stage >= 2 || (s.accumulation == 1 && s.expert == 1);
  const bool once_per_step = s.accumulation == 1 && !is_pipeline_of_tied(s);
  return in_fp32 && by_micro_batch && (replicas(s) == 1 || once_per_step) && !takes_rule(s, "OneBit");
}

/// Says that there is one replica, which a 1-bit optimizer must be told.
void set_one_replica(RunSpec& s) {
  s.shard_size = takes_rule(s, "OneBit") ? data_ranks(s) * s.context : 0;
}

void set_data_ranks(RunSpec& s, int ranks) {
  s.accumulation = s.accumulation * data_ranks(s) / ranks;
  s.ranks = s.tensor * s.context * s.pipeline * ranks;
  s.expert = 1;
  set_one_replica(s);
}

void set_pipeline(RunSpec& s, int stages) {
  s.ranks = s.ranks / s.pipeline * stages, s.pipeline = stages;
  s.schedule = stages > 1 ? "1f1b" : "accumulate", s.partition = "";
  s.virtual_stages = 1, s.micro_batch_group = 0;
}

}  // namespace

std::string bits_of(const RunSpec& s) {
  // A table's gradients are then summed use by use, over several micro-batches.
  const bool in_two_layers = s.tied && s.schedule == "layered";
  if (s.reduction == "native" || in_two_layers) return "";
  std::string out = "ordered";
  if (s.tensor > 1) out += cat(", tensor ", s.tensor, s.sequence_parallel ? " cuts sequences" : "");
  if (s.context > 1) out += cat(", context ", s.context, ' ', s.context_method);
  if (is_pipeline_of_tied(s)) out += ", a table on two stages";
  if (folds_in_global_order(s)) return out + ", folded";
  out += cat(", data ", data_ranks(s));
  // With one micro-batch there is nothing to fold before ranks, or replicas, are summed; but copies of a
  // table are summed as replicas are, one after the other.
  const bool exchanges = takes_rule(s, "OneBit");
  if (s.accumulation > 1 || is_pipeline_of_tied(s) || exchanges) out += cat(", replicas ", replicas(s));
  if (exchanges && s.stage == 0) out += ", states on all ranks";
  // Persistent parameters are a segment of their own, so that other elements share a scale.
  if (exchanges && s.persistence > 0) out += ", persistent parameters apart";
  if (s.accumulation > 1 && s.stage < 2) out += ", once a step";
  if (s.expert > 1) out += cat(", expert ", s.expert);
  return out;
}

RunSpec plainest(const RunSpec& spec) {
  RunSpec out = spec;
  for (const Simplification simplify : simpler_layouts()) {
    RunSpec next = out;
    simplify(next);
    if (bits_of(next) == bits_of(out)) out = next;
  }
  return out;
}

RunSpec one_rank(const RunSpec& spec) {
  RunSpec out = spec;
  for (const Simplification simplify : simpler_layouts()) simplify(out);
  out.reduction = "";
  return out;
}

Tolerance tolerance_of(const RunSpec& spec) {
  // Some times what thousands of compositions showed. Steps are few, and their rates small; weights that
  // hardly have a gradient move by its rounding errors all the same, with optimizers that normalize.
  if (spec.dtype == "fp32") return {.loss = 1e-4, .norm = 2e-3, .weights = 0.2};
  if (spec.dtype == "fp16") return {.loss = 1e-3, .norm = 5e-3, .weights = 0.3};
  return {.loss = 5e-3, .norm = 3e-2, .weights = 0.5};
}

bool keeps_states(const RunSpec& first, const RunSpec& second) {
  // Scales of codes are those of blocks of the slices that tensor ranks hold.
  return !takes_rule(first, "AdamW8bit") || first.tensor == second.tensor;
}

const std::vector<Simplification>& simpler_layouts() {
  static const std::vector<Simplification> all{
      [](RunSpec& s) {
        s.offload_param = s.offload_optimizer = "none", s.offload_param_extra = s.offload_extra = s.aio = "";
        s.nvme_checkpointing = false, s.sub_group = 1'000'000'000;
      },
      [](RunSpec& s) {
        s.recompute = "none", s.recompute_blocks = s.recompute_micro_batches = -1;
        s.cpu_checkpointing = s.nvme_checkpointing = false;
      },
      [](RunSpec& s) { set_pipeline(s, 2); },
      [](RunSpec& s) { set_pipeline(s, 1); },
      [](RunSpec& s) { s.stage = 2, set_data_ranks(s, 1); },
      [](RunSpec& s) { set_data_ranks(s, 1); },
      [](RunSpec& s) { s.ranks /= s.tensor, s.tensor = 1; },
      [](RunSpec& s) {
        s.ranks /= s.context, s.context = 1;
        s.expert = 1;
        set_one_replica(s);
      },
      set_one_replica,
      [](RunSpec& s) { s.expert = 1; },
      [](RunSpec& s) {
        s.stage = s.stage / 2 * 2;
        s.prefetch = s.persistence = s.max_reuse = 0, s.max_live = 1'000'000'000;
      },
      [](RunSpec& s) { s.overlap = false; },
      [](RunSpec& s) { s.bucket = 500'000'000; },
      [](RunSpec& s) { s.split_masters = true; },
      [](RunSpec& s) { s.threads = 1; },
  };
  return all;
}

const std::vector<Simplification>& simpler_problems() {
  static const std::vector<Simplification> all{
      [](RunSpec& s) { s.moe = ""; },
      [](RunSpec& s) { s.adapter = ""; },
      [](RunSpec& s) { s.sparsity = ""; },
      [](RunSpec& s) { s.groups = ""; },
      [](RunSpec& s) {
        if (takes_rule(s, "OneBit")) s.shard_size = replicas(s) > 1 ? s.shard_size : 0;
        s.optimizer = RunSpec{}.optimizer;
      },
      [](RunSpec& s) { s.moments = "fp32"; },
      [](RunSpec& s) { s.dtype = "fp32", s.accumulate_in = s.communicate_in = ""; },
      [](RunSpec& s) { s.communicate_in = ""; },
      [](RunSpec& s) { s.ragged = false; },
      [](RunSpec& s) { s.dropout = 0; },
      [](RunSpec& s) { s.clipping = 0; },
      [](RunSpec& s) { s.llama = false; },
      [](RunSpec& s) { s.tied = false; },
      [](RunSpec& s) { s.layers = 2; },
      [](RunSpec& s) { s.hidden = 32; },
      [](RunSpec& s) { s.rows = 1; },
  };
  return all;
}

}  // namespace sherd::test
