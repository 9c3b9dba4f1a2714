#include "config/tables.h"

namespace sherd::config {
namespace {

constexpr const char* zeropp = "ZeRO++ is not in this build; OneBitAdam compresses what replicas exchange";

std::vector<Key<Zero>> general_keys() {
  std::vector<Key<Zero>> keys;
  keys.push_back(integer("stage", &Zero::stage, "2", 0, 3));
  keys.push_back(integer("reduce_bucket_size", &Zero::reduce_bucket_size, "1000", 0));
  keys.push_back(custom<Zero>("allgather_bucket_size", "1000", [](Zero& zero, const Value& value) {
                   zero.allgather_bucket_size = value.integer(0);
                   if (zero.allgather_bucket_size % 2 != 0)
                     value.error("must be even, not ", value.node.brief());
                 }).takes(integers(0) + ", even"));
  keys.push_back(boolean("overlap_comm", &Zero::overlap_comm));
  keys.back().example = "false";  // at stage 3 the default is true
  return keys;
}

std::vector<Key<Zero>> stage3_keys() {
  std::vector<Key<Zero>> keys;
  keys.push_back(integer("stage3_prefetch_bucket_size", &Zero::prefetch_bucket_size, "1000", 0)
                     .alias("prefetch_bucket_size"));
  keys.push_back(integer("stage3_param_persistence_threshold", &Zero::param_persistence_threshold, "10", 0)
                     .alias("param_persistence_threshold"));
  keys.push_back(integer("stage3_model_persistence_threshold", &Zero::model_persistence_threshold, "10", 0)
                     .alias("model_persistence_threshold"));
  keys.push_back(integer("stage3_max_live_parameters", &Zero::max_live_parameters, "1000", 0)
                     .alias("max_live_parameters"));
  keys.push_back(
      integer("stage3_max_reuse_distance", &Zero::max_reuse_distance, "1000", 0).alias("max_reuse_distance"));
  return keys;
}

std::vector<Key<Zero>> noted_keys() {
  std::vector<Key<Zero>> keys;
  const auto add = [&](const char* name, Holds holds, const char* reason) {
    keys.push_back(noted<Zero>(name, holds, reason));
  };
  add("contiguous_gradients", Holds::boolean, "always on in Sherd");
  add("reduce_scatter", Holds::boolean, "every reduction is a reduce-scatter in Sherd");
  add("use_multi_rank_bucket_allreduce", Holds::boolean, "every reduction is a reduce-scatter in Sherd");
  add("allgather_partitions", Holds::boolean, "partitions are always all-gathered in Sherd");
  add("round_robin_gradients", Holds::boolean, "each rank copies only its own gradients to the host");
  add("memory_efficient_linear", Holds::boolean, "Sherd's linear layers keep no gathered weight");
  add("pipeline_loading_checkpoint", Holds::boolean, "checkpoints load shard by shard in Sherd");
  add("override_module_apply", Holds::boolean, "concerns PyTorch modules");
  add("log_trace_cache_warnings", Holds::boolean, "Sherd keeps no trace cache");
  add("load_from_fp32_weights", Holds::boolean, "checkpoints always restore the fp32 masters");
  add("ignore_unused_parameters", Holds::boolean, "parameters without a gradient are always allowed");
  add("compute_grad_norm", Holds::boolean, "the norm of gradients is always computed");
  add("parameter_alignment", Holds::boolean, "parameters are always aligned, whatever their sizes");
  add("elastic_checkpoint", Holds::boolean, "checkpoints load on any number of ranks");
  add("leaf_module", Holds::anything, "what is gathered together are the blocks that a model marks");
  keys.push_back(noted<Zero>("stage3_module_granularity_threshold", Holds::count,
                             "what is gathered together are the blocks that a model marks")
                     .alias("module_granularity_threshold"));
  add("enable_sanity_checks", Holds::boolean, "Sherd's checks are always on");
  add("mics_hierarchical_params_gather", Holds::boolean,
      "one all-gather within the ranks that share states brings parameters");
  keys.push_back(noted<Zero>("stage3_use_all_reduce_for_fetch_params", Holds::boolean,
                             "parameters are always fetched by all-gather")
                     .alias("use_all_reduce_for_fetch_params"));
  keys.push_back(noted<Zero>("stage3_gather_16bit_weights_on_model_save", Holds::boolean,
                             "checkpoints hold the fp32 weights by name; no 16-bit copy is gathered")
                     .alias("gather_16bit_weights_on_model_save")
                     .alias("stage3_gather_fp16_weights_on_model_save"));
  return keys;
}

std::vector<Key<Zero>> refused_keys() {
  std::vector<Key<Zero>> keys;
  const auto add = [&](const char* name, const char* example, const char* reason, auto off) -> Key<Zero>& {
    keys.push_back(refused<Zero>(name, example, reason, off));
    return keys.back();
  };
  const auto at_most = [](double limit) {
    return [limit](const Value& value) { return value.real() <= limit; };
  };
  add("legacy_stage1", "true", "DeepSpeed removed it too; give stage 1", is_false);
  add("save_muon_momentum_buffer_in_memory", "true", "Muon's momenta lie where offload_optimizer says",
      is_false);
  add("stage3_allgather_sequential", "true", "set stage3_prefetch_bucket_size to 1 instead", is_false)
      .aliases.push_back("allgather_sequential");
  add("zero_hpz_partition_size", "4",
      "ZeRO++ is not in this build; parallel.shard_size keeps gathers within a machine", at_most(1));
  add("zero_quantized_weights", "true", zeropp, is_false);
  add("zero_quantized_nontrainable_weights", "true", zeropp, is_false);
  add("zero_quantized_gradients", "true", zeropp, is_false);
  add("zeropp_loco_param", "{\"err_beta\": 0.8}", zeropp, is_empty);
  add("zenflow", "{\"topk_ratio\": 0.1}",
      "ZenFlow is not in this build; offload_optimizer reads and writes beside computing", is_empty);
  return keys;
}

std::vector<Text> sharding_texts() {
  return {
      {"stage",
       "what ranks share out: 0 nothing, 1 optimizer states, 2 also gradients, 3 also parameters; the whole "
       "section may be true (stage 1) or false"},

      {"reduce_bucket_size",
       "elements of gradients that travel together, and wait on the device until then; no bit depends on it"},

      {"allgather_bucket_size", "elements per all-gather of updated parameters"},
      derived("overlap_comm", "true at stage 3, else false", "communicate beside computation"),
      derived("mics_shard_size", "off", "`parallel.shard_size` (MiCS), at stages 1 to 3; 0 or less: off"),
      {"stage3_prefetch_bucket_size", "stage 3: elements gathered ahead of their use; 0: no prefetch"},
      {"stage3_param_persistence_threshold",
       "stage 3: parameters of at most so many elements stay gathered; counts what this rank's layers hold, "
       "of a matrix cut in two half"},

      {"stage3_model_persistence_threshold", "stage 3: most elements that may stay gathered in all"},
      {"stage3_max_live_parameters", "stage 3: gathered elements that prefetch stays within"},
      {"stage3_max_reuse_distance", "stage 3: what is used again within so many elements stays gathered"},
      {"sub_group_size",
       "states on NVMe: elements that the optimizer updates at once, at most; never more than 4 million",
       "0: a parameter at a time; here the default"},
      derived("cpu_offload", "off", "old name of `offload_optimizer.device` \"cpu\""),
      derived("cpu_offload_param", "off", "old name of `offload_param.device` \"cpu\""),
  };
}

/// Keys that have no effect here, or are refused.
std::vector<Text> idle_texts() {
  return {
      {"cpu_offload_use_pin_memory", "page-locked memory for what is offloaded"},
      {"contiguous_gradients", "copy gradients into one buffer as they are made"},
      {"reduce_scatter", "reduce each slice to its owner alone, not an all-reduce"},
      {"use_multi_rank_bucket_allreduce", "reduce slices of several owners in one call"},
      {"allgather_partitions", "gather updated parameters by all-gather, not by broadcasts"},
      {"round_robin_gradients", "ranks copy different gradients to the host at a time"},
      {"memory_efficient_linear", "linear layers that keep no gathered weight for backward"},
      {"pipeline_loading_checkpoint", "load checkpoints shard after shard"},
      {"override_module_apply", "`Module.apply` gathers parameters"},
      {"log_trace_cache_warnings", "warn where the order of modules changes"},
      {"load_from_fp32_weights", "restore fp32 masters from a checkpoint's, not from 16-bit weights"},
      {"ignore_unused_parameters", "allow parameters without a gradient"},
      {"enable_sanity_checks", "more assertions"},
      {"mics_hierarchical_params_gather", "gather parameters in two steps, between machines and within"},
      {"stage3_use_all_reduce_for_fetch_params", "fetch parameters by all-reduce"},
      {"stage3_gather_16bit_weights_on_model_save", "gather 16-bit weights for `save_16bit_model()`"},
      {"compute_grad_norm", "false: gradients' norm is left out where nothing needs it"},
      {"parameter_alignment", "pad parameters to 16 bytes in the flat buffer"},
      {"elastic_checkpoint", "checkpoints for another number of ranks"},
      {"legacy_stage1", "the first implementation of stage 1"},
      {"save_muon_momentum_buffer_in_memory", "Muon's momenta in memory at stage 3"},
      {"stage3_module_granularity_threshold", "fetch small modules whole"},
      {"stage3_allgather_sequential", "gather one parameter at a time"},
      {"leaf_module", "modules that are fetched whole"},
      {"zero_hpz_partition_size", "ZeRO++ hpZ: a second copy of the parameters on so many ranks"},
      {"zero_quantized_weights", "ZeRO++: gather weights in 8 bits"},
      {"zero_quantized_nontrainable_weights", "ZeRO++: keep frozen weights in 8 bits"},
      {"zero_quantized_gradients", "ZeRO++: reduce gradients in 4 bits"},
      {"zeropp_loco_param", "ZeRO++: error feedback of these gradients"},
      {"zenflow", "update important gradients first, others later"},
  };
}

// `config` gets what a key of this section says of another one; it may be null where keys are only listed.
Table<Zero> zero_table(Config* config) {
  Table<Zero> table{Auto::to_default, general_keys()};
  table.keys.push_back(custom<Zero>("mics_shard_size", "4", [config](Zero&, const Value& value) {
                         read_mics_shard_size(*config, value);
                       }).takes(integers()));
  append(table.keys, stage3_keys());
  append(table.keys, offload_keys());
  append(table.keys, noted_keys());
  append(table.keys, refused_keys());
  describe(table.keys, sharding_texts());
  describe(table.keys, idle_texts());
  return table;
}

void note_idle_stage3_keys(const Zero& zero, const Given& given, const Value& section) {
  for (const Key<Zero>& key : stage3_keys())
    if (given.contains(key.name))
      section.context.note(join(section.path, key.name),
                           cat("no effect at stage ", zero.stage, ", only at 3"));
}

/// As DeepSpeed: at lower stages each rank computes with parameters of its own, which stay where they are.
void drop_offload_param(Zero& zero, const Given& given, const Value& section) {
  if (zero.offload_param.device == OffloadDevice::none) return;
  zero.offload_param.device = OffloadDevice::none;
  section.context.note(
      join(section.path, given.contains("offload_param") ? "offload_param" : "cpu_offload_param"),
      cat("no effect at stage ", zero.stage,
          ": parameters are sharded, and offloaded, at stage 3 only, here as in DeepSpeed"));
}

void read_zero(Config& config, const Value& section) {
  Zero& zero = config.zero;
  if (section.node.is(Node::Kind::boolean)) {
    zero.stage = section.node.boolean ? 1 : 0;
    section.note(cat("the boolean form means stage ", zero.stage, "; write {\"stage\": ", zero.stage, "}"));
    return;
  }
  const Given given = read_section(zero_table(&config), zero, section);
  if (!given.contains("overlap_comm")) zero.overlap_comm = zero.stage == 3;
  if (zero.stage < 3) {
    note_idle_stage3_keys(zero, given, section);
    drop_offload_param(zero, given, section);
  }
  check_offload(zero, given, section);
}

}  // namespace

Key<Config> zero_key() {
  Key<Config> key = custom<Config>("zero_optimization", "", read_zero);
  key.list = [](const std::string& prefix, std::vector<KeyInfo>& out) {
    list_keys(zero_table(nullptr), prefix, out);
  };
  return key;
}

}  // namespace sherd::config
