#include <algorithm>

#include "config/tables.h"

namespace sherd::config {
namespace {

struct Nothing {};

// A section of DeepSpeed's that Sherd does not have. Its keys are checked by name, so that a misspelt
// "enabled" does not pass for "off"; then `off` decides.
Key<Config> foreign(const std::string& name, const std::vector<std::string>& names,
                    const std::string& example, const std::string& reason,
                    const std::function<bool(const Value&)>& off, bool noted_only = false) {
  Table<Nothing> table;
  for (const std::string& key : names)
    table.keys.push_back(custom<Nothing>(key, "", [](Nothing&, const Value&) {}));
  Key<Config> key = custom<Config>(name, example, [=](Config&, const Value& value) {
    if (value.node.is(Node::Kind::object)) {
      Nothing nothing;
      read_section(table, nothing, value);
    }
    if (noted_only) {
      value.note(reason);
    } else {
      if (!off(value)) value.error("Sherd does not support this section: ", reason, "; remove or disable it");
      value.note("disabled, no effect");
    }
  });
  key.effect = noted_only ? Effect::noted : Effect::refused;
  key.reason = reason;
  key.choices = names, key.values = "section";
  return key;
}

// `"enabled"` absent, false or "auto".
bool not_enabled(const Value& value) {
  value.expect(Node::Kind::object);
  const Node* enabled = value.node.find("enabled");
  if (!enabled || enabled->is(Node::Kind::null) || enabled->is_text("auto")) return true;
  return !Value{*enabled, value.path + ".enabled", value.context}.boolean();
}

/// Nothing below has an "enabled" that is on.
bool enables_nothing(const Value& value) {
  const Node& node = value.node;
  const Node* enabled = node.find("enabled");
  if (enabled && unquoted({*enabled, join(value.path, "enabled"), value.context}).boolean) return false;
  return node.is(Node::Kind::object) &&
         std::all_of(node.members.begin(), node.members.end(), [&](const auto& member) {
           const Value below{member.second, join(value.path, member.first), value.context};
           return !below.node.is(Node::Kind::object) || enables_nothing(below);
         });
}

/// Reports, which change no number: what gives the same here.
std::vector<Key<Config>> report_sections() {
  const auto report = [](const char* name, const std::vector<std::string>& names, const char* reason) {
    return foreign(name, names, cat("{\"", names[0], "\": true}"), reason, not_enabled, true);
  };
  const char* service =
      "this service is not in this build; the sections tensorboard and csv_monitor, and `sherd train "
      "--metrics`, write the same to files";
  return {report("wandb", {"enabled", "group", "team", "project"}, service),
          report("comet",
                 {"enabled", "samples_log_interval", "project", "workspace", "api_key", "experiment_name",
                  "experiment_key", "online", "mode"},
                 service),
          report("flops_profiler",
                 {"enabled", "recompute_fwd_factor", "profile_step", "module_depth", "top_modules",
                  "detailed", "output_file"},
                 "`sherd train` always tells the share of peak FLOPs, and --trace what each block takes"),
          report("comms_logger", {"enabled", "prof_all", "prof_ops", "verbose", "debug"},
                 "every byte sent is always counted and reported at the end of a run"),
          report("timers", {"throughput"}, "throughput is always measured")};
}

std::vector<Key<Config>> feature_sections() {
  const std::string enabled = "{\"enabled\": true}";
  return {
      foreign("amp",
              {"enabled", "opt_level", "loss_scale", "cast_model_type", "patch_torch_functions",
               "keep_batchnorm_fp32", "master_weights", "cast_model_outputs", "num_losses", "verbosity",
               "min_loss_scale", "max_loss_scale"},
              enabled, "use bf16 or fp16", not_enabled),
      foreign("torch_autocast", {"enabled", "dtype", "lower_precision_safe_modules"}, enabled,
              "use bf16 or fp16", not_enabled),
      foreign("elasticity",
              {"enabled", "max_train_batch_size", "micro_batch_sizes", "min_gpus", "max_gpus", "min_time",
               "version", "prefer_larger_batch", "ignore_non_elastic_batch_info", "model_parallel_size",
               "num_gpus_per_node"},
              enabled, "set the batch sizes instead", not_enabled),
      foreign("autotuning",
              {"enabled",
               "fast",
               "results_dir",
               "exps_dir",
               "overwrite",
               "start_profile_step",
               "end_profile_step",
               "metric",
               "metric_path",
               "tuner_type",
               "tuner_early_stopping",
               "tuner_num_trials",
               "arg_mappings",
               "max_train_batch_size",
               "min_train_batch_size",
               "max_train_micro_batch_size_per_gpu",
               "min_train_micro_batch_size_per_gpu",
               "num_tuning_micro_batch_sizes",
               "mp_size",
               "model_info",
               "model_info_path"},
              enabled,
              "there is no autotuner in this build; `sherd estimate` tells what fits, and what to change",
              not_enabled),
      foreign("nebula",
              {"enabled", "persistent_storage_path", "persistent_time_interval",
               "num_of_version_in_retention", "enable_nebula_load", "load_path"},
              enabled, "checkpoints go to training.save_dir", not_enabled, true),
      foreign("hybrid_engine",
              {"enabled", "max_out_tokens", "inference_tp_size", "release_inference_cache", "pin_parameters",
               "tp_gather_partition_size", "enable_cuda_graph"},
              enabled, "concerns generation between steps, which has no engine of its own here", not_enabled,
              true),
      foreign("expert_parallel",
              {"enabled",
               "autoep_size",
               "expert_tensor_parallel_size",
               "validate_folding_routing",
               "async_split_plan",
               "preset_model",
               "moe_layer_pattern",
               "expert_pattern",
               "router_pattern",
               "use_grouped_mm",
               "disable_triton_grouped_mm",
               "route_norm",
               "route_scale",
               "score_apply",
               "combine_impl",
               "row_weighting_impl",
               "gate_up_impl",
               "comm_backend",
               "comm_num_sm",
               "comm_qp_margin",
               "comm_max_tokens_per_rank",
               "num_expert_groups",
               "num_limited_groups",
               "score_func",
               "top_k",
               "load_balance_coeff",
               "routed_scaling_factor",
               "expert_w1",
               "expert_w2",
               "expert_w3",
               "num_experts_attr",
               "top_k_attr",
               "has_shared_experts",
               "shared_experts_pattern",
               "shared_experts_gate_pattern",
               "expert_activation"},
              enabled, "parallel.expert shares out the experts of model.moe", not_enabled),
      foreign("compile",
              {"deepcompile",
               "enabled",
               "backend",
               "kwargs",
               "free_activation",
               "free_activation_threshold",
               "offload_activation",
               "offload_activation_pin_memory",
               "offload_opt_states",
               "offload_parameters",
               "double_buffer",
               "symmetric_memory",
               "debug_log",
               "sync_before_reduce",
               "sync_after_reduce",
               "sync_before_allgather",
               "sync_after_allgather",
               "keep_int_input_tensors",
               "keep_all_input_tensors",
               "passes",
               "autoep_non_moe"},
              "{\"deepcompile\": true}",
              "there is no graph compiler in this build, and nothing for one to do", not_enabled, true),
  };
}

std::vector<Key<Config>> training_method_sections() {
  const std::string enabled = "{\"enabled\": true}";
  return {
      foreign("data_efficiency", {"enabled", "seed", "data_sampling", "data_routing"}, enabled,
              "data is sampled as the section `data` says", not_enabled),
      foreign("curriculum_learning",
              {"enabled", "curriculum_type", "min_difficulty", "max_difficulty", "schedule_type",
               "schedule_config"},
              enabled, "the sequence length is fixed in this build", not_enabled),
      foreign("progressive_layer_drop", {"enabled", "theta", "gamma"}, enabled, "all layers run",
              not_enabled),
      foreign("eigenvalue",
              {"enabled", "verbose", "max_iter", "tol", "stability", "gas_boundary_resolution", "layer_name",
               "layer_num"},
              enabled, "it serves quantised training", not_enabled),
      foreign("compression_training",
              {"weight_quantization", "activation_quantization", "sparse_pruning", "row_pruning",
               "head_pruning", "channel_pruning", "layer_reduction"},
              "{\"layer_reduction\": {\"enabled\": true}}", "there is no compression in this build",
              enables_nothing),
      foreign(
          "quantize_training",
          {"enabled", "quantize_weight_in_forward", "quantize_verbose", "quantize_groups", "quantize_bits",
           "quantize_schedule", "quantize_algo", "fp16_mixed_quantize", "quantizer_kernel", "eigenvalue",
           "quantize_type", "quantize_rounding", "quantize_change_ratio"},
          enabled, "there is no quantisation in this build", not_enabled),
      foreign("weight_quantization", {"enabled", "post_init_quant", "quantized_initialization"},
              "{\"post_init_quant\": {\"fc\": {}}}", "there is no quantisation in this build", is_empty),
      foreign("sparse_attention",
              {"mode", "block", "different_layout_per_head", "num_local_blocks", "num_global_blocks",
               "attention", "horizontal_global_attention", "num_different_global_patterns",
               "num_random_blocks", "local_window_blocks", "global_block_indices", "global_block_end_indices",
               "num_sliding_window_blocks"},
              "{\"mode\": \"fixed\"}",
              "attention is dense and causal in this build; model.sliding_window limits it", is_empty),
  };
}

std::vector<Text> switch_texts() {
  return {
      {"sparse_gradients", "exchange embedding gradients as indices and values"},
      {"disable_allgather", "leave updated parameters where they are"},
      {"gradient_allreduce_op", "mean or sum of the ranks' gradients"},
      {"managed_gradient_accumulation", "false: the program says where a step ends"},
      {"data_parallel_size", "ranks of a device mesh"},
      {"use_data_before_expert_parallelism", "order of data and expert ranks"},
      {"prescale_gradients", "divide gradients before they are summed"},
      {"gradient_predivide_factor", "by how much"},
      {"zero_allow_untested_optimizer", "ZeRO with optimizers that DeepSpeed has not tested"},
      {"zero_force_ds_cpu_optimizer", "insist on DeepSpeed's CPU Adam with offload"},
      {"disable_python_gc", "no garbage collection within steps"},
      {"graph_harvesting", "CUDA graphs in the bf16 optimizer; here `device.cuda_graphs`"},
      {"vocabulary_size", "warn where it is no multiple of 8"},
      {"allgather_size", "elements per all-gather, beside `\"zero_optimization\": true`"},
  };
}

std::vector<Text> section_texts() {
  return {
      {"wandb", "report to Weights & Biases"},
      {"comet", "report to Comet"},
      {"flops_profiler", "count operations of each module"},
      {"comms_logger", "log what is sent"},
      {"timers", "measure throughput"},
      {"amp", "mixed precision by apex"},
      {"torch_autocast", "mixed precision by PyTorch"},
      {"elasticity", "batch sizes that many numbers of GPUs divide"},
      {"autotuning", "search for stage and micro-batch"},
      {"nebula", "checkpoints to Azure's service"},
      {"hybrid_engine", "generate while training (RLHF)"},
      {"expert_parallel", "share out experts of public models"},
      {"compile", "DeepCompile: ZeRO by a graph compiler"},
      {"data_efficiency", "sample by difficulty, drop tokens"},
      {"curriculum_learning", "sequences that grow while training"},
      {"progressive_layer_drop", "leave out layers at random"},
      {"eigenvalue", "curvature of layers, for quantised training"},
      {"compression_training", "quantise and prune while training"},
      {"quantize_training", "quantise weights while training"},
      {"weight_quantization", "quantise weights for inference"},
      {"sparse_attention", "attention to some blocks only"},
  };
}

std::vector<Key<Config>> switches() {
  const auto is_true = [](const Value& value) { return value.boolean(); };
  std::vector<Key<Config>> keys;
  const auto refuse = [&](const char* name, const char* example, const char* reason, auto off) {
    keys.push_back(refused<Config>(name, example, reason, off));
  };
  const auto note = [&](const char* name, Holds holds, const char* reason) {
    keys.push_back(noted<Config>(name, holds, reason));
  };
  refuse("disable_allgather", "true", "updated parameters are always gathered", is_false);
  refuse("gradient_allreduce_op", "\"sum\"", "gradients are averaged over ranks", [](const Value& value) {
    return value.choice({"mean", "sum"}) == 0;
  });
  refuse("managed_gradient_accumulation", "false",
         "Sherd manages it; programs move the boundary with set_gradient_accumulation_boundary()", is_true);
  refuse("data_parallel_size", "2", "it follows from the number of ranks", equals_number(1));
  refuse("use_data_before_expert_parallelism", "true",
         "expert ranks are neighbours, and those with the same experts farther apart", is_false);
  note("sparse_gradients", Holds::boolean, "embedding gradients are exchanged dense, to the same sums");
  note("prescale_gradients", Holds::boolean, "rank sums run in fp32, which leaves nothing to scale against");
  note("gradient_predivide_factor", Holds::real,
       "rank sums run in fp32, which leaves nothing to scale against");
  note("zero_allow_untested_optimizer", Holds::boolean, "every optimizer of this build is tested with ZeRO");
  note("zero_force_ds_cpu_optimizer", Holds::boolean, "Sherd's own optimizer runs on every device");
  note("disable_python_gc", Holds::boolean, "there is no Python");
  note("graph_harvesting", Holds::boolean, "concerns CUDA graphs");
  note("vocabulary_size", Holds::count, "model.pad_vocab_to_multiple_of pads the embedding");
  for (Key<Config>& key : keys) key.auto_rule = Auto::to_default;
  note("allgather_size", Holds::count, "give zero_optimization.allgather_bucket_size");
  describe(keys, switch_texts());
  return keys;
}

}  // namespace

std::vector<Key<Config>> foreign_keys() {
  std::vector<Key<Config>> keys = switches();
  append(keys, report_sections());
  append(keys, feature_sections());
  append(keys, training_method_sections());
  describe(keys, section_texts());
  keys.push_back(tensor_parallel_key());
  keys.push_back(sequence_parallel_size_key());
  keys.push_back(pipeline_key());
  return keys;
}

}  // namespace sherd::config
